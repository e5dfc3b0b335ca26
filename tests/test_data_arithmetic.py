"""Arithmetic task: correct answers, disjoint splits, solutions of very different lengths."""

import json
import random
import re
from collections import Counter
from itertools import islice

import pytest

from asyncrl.config.schema import DataConfig
from asyncrl.data.arithmetic import (
    TOTALS,
    Problem,
    demonstrations,
    draw_problem,
    final_answer,
    is_well_formed,
    main,
    solution,
)
from asyncrl.data.prompts import load_prompts
from asyncrl.rollouter.rewards.arithmetic import score


def test_a_solution_works_from_the_left_and_repeats_the_rest():
    assert solution(Problem(7, (-5, 2, 4))) == "7-5=2,+2+4\n2+2=4,+4\n4+4=8\nanswer: 8"


def test_careful_solutions_are_correct_and_well_formed():
    rng = random.Random(0)
    for _ in range(200):
        problem = draw_problem(rng, heldout=False)
        assert problem.answer == eval(problem.expression)
        assert final_answer(solution(problem)) == problem.answer
        assert is_well_formed(solution(problem))


def test_careless_solutions_are_well_formed_and_wrong_at_the_error_rate():
    rng = random.Random(0)
    right = steps = 0
    for _ in range(2000):
        problem = draw_problem(rng, heldout=False)
        written = solution(problem, rng, error_rate=0.2)
        assert is_well_formed(written)
        total = problem.first
        for term, line in zip(problem.steps, written.split("\n")):
            left, result = line.partition(",")[0].split("=")
            assert left == f"{total}{term:+d}"
            slip = int(result) - (total + term)
            assert abs(slip) <= 2
            right += slip == 0
            steps += 1
            total = int(result)
            assert total in TOTALS
        assert final_answer(written) == total
    assert 0.79 < right / steps < 0.85  # slips that would leave TOTALS are not made


def test_response_lengths_differ_more_than_fourfold():
    lengths = [len(response) for _, response in islice(demonstrations(0, careful=True), 500)]
    assert max(lengths) > 4 * min(lengths)


def test_careful_demonstrations_have_no_mistakes():
    def share_right(careful):
        written = list(islice(demonstrations(0, careful), 1000))
        right = [final_answer(text) == eval(m[0]["content"].removeprefix("Compute ")) for m, text in written]
        return sum(right) / len(right)

    assert share_right(careful=True) == 1.0
    assert 0.2 < share_right(careful=False) < 0.5


def test_written_files_are_disjoint_balanced_and_determined_by_the_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        main(["--out", str(tmp_path / name), "--train", "400", "--heldout", "100", "--seed", str(seed)])
    files = {p.relative_to(tmp_path).as_posix(): p.read_text() for p in tmp_path.glob("*/*.jsonl")}
    assert files["a/train.jsonl"] == files["b/train.jsonl"] != files["c/train.jsonl"]
    problems = {
        name: [json.loads(line)["prompt"][0]["content"] for line in text.splitlines()] for name, text in files.items()
    }
    train = {p for name, ps in problems.items() if "train" in name for p in ps}
    heldout = {p for name, ps in problems.items() if "heldout" in name for p in ps}
    assert not train & heldout  # across seeds too
    for careful in (True, False):
        assert not heldout & {messages[0]["content"] for messages, _ in islice(demonstrations(0, careful), 2000)}
    assert len(problems["a/train.jsonl"]) == 400
    terms = Counter(len(re.findall(r"[+-]", p)) for p in problems["a/train.jsonl"])
    assert max(terms.values()) < 1.6 * min(terms.values())  # short problems come up as often as long ones
    assert len(problems["a/heldout.jsonl"]) == len(set(problems["a/heldout.jsonl"])) == 100


def test_an_interrupted_write_leaves_no_training_file(tmp_path):
    (tmp_path / "heldout.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        main(["--out", str(tmp_path), "--train", "5", "--heldout", "5"])
    assert not (tmp_path / "train.jsonl").exists()


def test_the_files_load_and_their_answers_score_one(tmp_path):
    main(["--out", str(tmp_path), "--train", "50", "--heldout", "10"])
    for prompt in load_prompts([tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"], DataConfig()):
        expression = prompt.messages[0]["content"].removeprefix("Compute ")
        assert score(prompt, f"{expression}\nanswer: {eval(expression)}")["reward"] == 1.0
        assert prompt.extra["steps"] == sum(expression.count(sign) for sign in "+-")
