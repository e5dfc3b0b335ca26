"""Code task: answers that pass their tests, careless ones that often do not, disjoint splits."""

import json
import random
import subprocess
import sys
from itertools import islice

from asyncrl.config.schema import DataConfig
from asyncrl.data.programs import (
    ERROR_RATE,
    Problem,
    answer,
    demonstrations,
    draw_problem,
    draw_test,
    main,
    rows,
)
from asyncrl.data.prompts import load_prompts
from asyncrl.rollouter.rewards.unit_tests import program_of

PROBLEM = Problem(("double each", "keep the positive ones"), "print the sum")


def test_a_problem_says_what_its_program_does():
    assert PROBLEM.text == "Read integers. Double each, keep the positive ones, print the sum."
    assert answer(PROBLEM.lines).splitlines() == [
        "```python",
        "xs = [int(x) for x in input().split()]",
        "xs = [2 * x for x in xs]",
        "xs = [x for x in xs if x > 0]",
        "print(sum(xs))",
        "```",
    ]
    test = draw_test(PROBLEM, random.Random(0))
    assert int(test["stdout"]) == sum(2 * x for x in map(int, test["stdin"].split()) if x > 0)


def test_each_careful_demonstration_passes_tests_run_as_a_program():
    rng = random.Random(0)
    for problem in (draw_problem(rng, heldout=False) for _ in range(12)):
        program, test = program_of(answer(problem.lines)), draw_test(problem, rng)
        ran = subprocess.run([sys.executable, "-c", program], input=test["stdin"], capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) == (0, test["stdout"])


def test_careless_demonstrations_have_mistakes_in_their_lines_at_the_error_rate():
    right = lines = 0
    for messages, written in islice(demonstrations(0, careful=False), 1000):
        said = messages[0]["content"].removeprefix("Read integers. ").removesuffix(".").lower().split(", ")
        wanted = Problem(tuple(said[:-1]), said[-1]).lines
        found = program_of(written).splitlines()
        assert found[0] == wanted[0]
        right += len(set(wanted[1:]) & set(found[1:]))
        lines += len(wanted) - 1
    # some mistakes happen to write a right line
    assert 1 - ERROR_RATE < right / lines < 1 - 0.8 * ERROR_RATE


def test_written_files_are_disjoint_and_determined_by_the_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        main(["--out", str(tmp_path / name), "--train", "300", "--heldout", "60", "--seed", str(seed)])
    files = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.glob("*/*.jsonl")}
    assert files["a/train.jsonl"] == files["b/train.jsonl"] != files["c/train.jsonl"]
    texts = {
        name: [json.loads(line)["prompt"][0]["content"] for line in text.splitlines()] for name, text in files.items()
    }
    heldout = {text for name, lines in texts.items() if "heldout" in name for text in lines}
    assert not heldout & {text for name, lines in texts.items() if "train" in name for text in lines}
    assert len(set(texts["a/heldout.jsonl"])) == 60
    prompts = load_prompts([tmp_path / "a/train.jsonl"], DataConfig())
    assert {prompt.extra["steps"] for prompt in prompts} == {1, 2, 3, 4}
    assert all(len(json.loads(prompt.extra["tests"])) == 2 for prompt in prompts)


def test_tests_tell_the_right_program_from_others():
    rng = random.Random(0)
    told = wrong = 0
    for row in rows(rng, 200, heldout=False):
        other = draw_problem(rng, heldout=False)
        passes = all(_prints(other, test["stdin"]) == test["stdout"] for test in json.loads(row["tests"]))
        same = row["prompt"] == other.messages
        told += not passes and not same
        wrong += not same
    assert told > 0.95 * wrong


def _prints(problem, given):
    printed = []
    names = {"input": lambda: given, "print": lambda *values: printed.append(" ".join(map(str, values)) + "\n")}
    exec("\n".join(problem.lines), names)
    return "".join(printed)
