"""Published data sets become prompt files: each schema, what is dropped, and what is refused."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from asyncrl.cli.main import main
from asyncrl.config.schema import DataConfig, RewardConfig
from asyncrl.data import prepare as prepared
from asyncrl.data.prepare import prepare
from asyncrl.data.prompts import DataError, load_prompts
from tests.support.rewards import import_problem
from tests.test_docs import commands

DOCS = Path(__file__).parent.parent / "docs"

GSM8K = [
    {"question": "How many are 3 and 4?", "answer": "3+4 = <<3+4=7>>7\n#### 7"},
    {"question": "How many are 999 and 1?", "answer": "#### 1,000"},
    {"question": "How many?", "answer": "nobody knows"},
]
MATH = [
    {"problem": "Half?", "solution": r"$\boxed{\frac{1}{2}}$", "level": "Level 5", "type": "Algebra"},
    {"problem": "Two?", "solution": "two", "level": "Level 1", "type": "Algebra"},
]
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve: 1+1"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "a-1"},
}


def published(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts_of(name, source, out, **kwargs):
    """The prompts of all files, and what was said of each."""
    written = prepare(name, str(source), out, **kwargs)
    return load_prompts([one.file for one in written], DataConfig()), written


def passes(solution: str, test) -> bool:
    """Whether ``solution`` passes one test of our form, as one would run it."""
    if "code" in test:
        done = subprocess.run([sys.executable, "-c", f"{solution}\n{test['code']}"], capture_output=True, timeout=60)
        return done.returncode == 0
    done = subprocess.run(
        [sys.executable, "-c", solution], input=test["stdin"], capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip() == test["stdout"].strip()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_gsm8k_has_its_answer_after_the_hashes(tmp_path, suffix):
    source = published(tmp_path / f"train-00000-of-00001.{suffix}", GSM8K)
    (first, second), (written,) = prompts_of("gsm8k", source, tmp_path / "out")
    assert first.messages[0]["content"].startswith("How many are 3 and 4?\n\nReason step by step")
    assert (first.answer, second.answer) == ("7", "1000")
    assert (first.data_source, first.prompt_id) == ("gsm8k", "gsm8k/train/0")
    assert str(written) == f"{tmp_path}/out/train.jsonl: 3 rows read, 2 kept; dropped: 1 no answer after ####"


@pytest.mark.parametrize("column", ["question", "answer"])
def test_a_row_with_half_of_a_surrogate_pair_is_dropped(tmp_path, column):
    broken = GSM8K[0] | {column: GSM8K[0][column] + "\ud83d"}
    (prompt, _), (written,) = prompts_of("gsm8k", published(tmp_path / "train.jsonl", [broken, *GSM8K]), tmp_path / "o")
    assert prompt.prompt_id == "gsm8k/train/1"
    assert written.dropped == {"broken Unicode": 1, "no answer after ####": 1}


def test_a_prompt_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(prepared, "sync", lambda path: done.append(path.name))
    monkeypatch.setattr(prepared, "rename", lambda path, target: done.append((path.name, target.name)))
    prepare("gsm8k", str(published(tmp_path / "train.jsonl", GSM8K)), tmp_path / "out")
    assert done == ["train.jsonl.partial", ("train.jsonl.partial", "train.jsonl")]


def test_math_has_its_answer_in_the_last_box(tmp_path):
    (prompt,), (written,) = prompts_of("math", published(tmp_path / "test.jsonl", MATH), tmp_path)
    assert (prompt.answer, prompt.extra) == (r"\frac{1}{2}", {"level": "5", "subject": "Algebra"})
    assert prompt.messages[0]["content"].endswith("\\boxed{}.")
    assert written.dropped == {"no \\boxed{} in the solution": 1}


def test_math_500_has_the_answer_in_a_column(tmp_path):
    row = MATH[1] | {"answer": "2", "subject": "Algebra", "level": 3, "unique_id": "test/algebra/1.json"}
    (prompt,), _ = prompts_of("math", published(tmp_path / "test.jsonl", [row]), tmp_path / "out")
    assert (prompt.answer, prompt.prompt_id, prompt.extra["level"]) == ("2", "test/algebra/1.json", "3")


def test_dapo_17k_is_kept_once_of_a_hundred_times(tmp_path):
    other = DAPO | {"prompt": [{"role": "user", "content": "Solve: 2+2"}], "extra_info": {"index": "a-2"}}
    contradicting = DAPO | {"reward_model": {"ground_truth": "3", "style": ""}, "extra_info": {"index": "a-3"}}
    source = published(tmp_path / "dapo-math-17k.parquet", [DAPO, other] * 100 + [contradicting])
    found, (written,) = prompts_of("dapo-17k", source, tmp_path / "out")
    assert [(p.prompt_id, p.answer, p.data_source) for p in found] == [
        ("a-1", "2", "math_dapo"),
        ("a-2", "2", "math_dapo"),
    ]
    assert found[0].messages == tuple(DAPO["prompt"])
    assert (written.read, written.kept) == (201, 2)
    assert written.dropped == {"repeated": 198, "repeated with another answer": 1}
    with pytest.raises(DataError, match="--instruction: the prompts of dapo-17k have one"):
        prepare("dapo-17k", str(source), tmp_path, instruction="Be brief.")


ADD = "def add(a, b):\n    return a + b\n"
ADD_METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
ADD_PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
PAIRS = {"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [[1, 2]]]}
CODE = {
    "mbpp": (
        {
            "task_id": 2,
            "text": "Write a function to add.",
            "code": ADD,
            "test_list": ["assert add(1, 2) == N", "assert add(2, 2) == 4"],
            "test_setup_code": "N = 3",
        },
        ADD,
    ),
    "mbpp, sanitized": (
        {
            "task_id": 2,
            "prompt": "Add.",
            "test_list": ["assert math.isclose(add(1, 2), 3)"],
            "test_imports": ["import math"],
        },
        ADD,
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": 'def add(a, b):\n    """Add."""\n',
            "canonical_solution": "    return a + b\n",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
            "entry_point": "add",
        },
        ADD,
    ),
    "taco": ({"question": "Add.", "input_output": json.dumps(PAIRS), "difficulty": "EASY"}, ADD_PROGRAM),
    "taco, a function": ({"question": "Add.", "input_output": json.dumps(CALLS)}, ADD),
    "taco, a method": (
        {"question": "Add.", "input_output": json.dumps(CALLS), "starter_code": "class Solution:"},
        ADD_METHOD,
    ),
    "deepcoder": (
        {"problem": "Add.", "tests": json.dumps([{"type": "stdin_stdout", "input": "1 2", "output": "3"}])},
        ADD_PROGRAM,
    ),
    "deepcoder, a function": (
        {
            "problem": "Add.",
            "tests": json.dumps([{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]),
        },
        ADD,
    ),
    "livecodebench": (
        {
            "problem": "Add.",
            "tests": json.dumps(
                [{"testtype": "functional", "input": "[1]\n[2]", "output": "[1, 2]", "metadata": {"func_name": "add"}}]
            ),
        },
        ADD_METHOD,
    ),
    "ours": (
        {
            "prompt": [{"role": "user", "content": "Add."}],
            "tests": [{"stdin": "1 2", "stdout": "3"}],
        },
        ADD_PROGRAM,
    ),
}


@pytest.mark.parametrize("schema", CODE)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_code_problems_have_tests_that_a_solution_passes_and_a_wrong_one_does_not(tmp_path, schema, suffix):
    row, solution = CODE[schema]
    (prompt,), _ = prompts_of("code", published(tmp_path / f"train.{suffix}", [row]), tmp_path / "out")
    tests = json.loads(prompt.extra["tests"])
    assert tests
    assert all(passes(solution, test) for test in tests)
    assert not any(passes(solution.replace("a + b", "b"), test) for test in tests)
    named = "code" in tests[0] and "mbpp" not in schema
    assert prompt.extra.get("entry_point") == ("add" if named else None)
    assert prompt.messages[0]["content"].endswith("Put it in a ```python block.")


def test_code_problems_without_readable_tests_are_dropped(tmp_path):
    bad = ["", "[]", "{", '{"inputs": ["1"], "outputs": []}', '[{"input": "1"}]']
    rows = [{"problem": f"P{i}", "tests": tests} for i, tests in enumerate(bad)] + [CODE["deepcoder"][0]]
    (prompt,), (written,) = prompts_of("code", published(tmp_path / "train.jsonl", rows), tmp_path / "out")
    assert prompt.prompt_id == "code/train/5"
    assert written.dropped == {"tests that cannot be read": 4, "no tests": 1}


def test_a_folder_s_splits_become_a_file_each(tmp_path):
    published(tmp_path / "hub/main/train-00000-of-00002.parquet", GSM8K[:1])
    published(tmp_path / "hub/main/train-00001-of-00002.parquet", GSM8K[1:])
    published(tmp_path / "hub/convert/test/0000.parquet", GSM8K[:1])
    (tmp_path / "hub/README.md").write_text("# a data set")
    _, written = prompts_of("gsm8k", tmp_path / "hub", tmp_path / "out")
    assert [(one.file.name, one.kept) for one in written] == [("test.jsonl", 1), ("train.jsonl", 2)]
    (written,) = prepare("gsm8k", str(tmp_path / "hub"), tmp_path / "one", split="test")
    assert written.file.name == "test.jsonl"
    with pytest.raises(DataError, match="--split: expected one of test, train; found val"):
        prepare("gsm8k", str(tmp_path / "hub"), tmp_path / "out", split="val")


def test_an_instruction_of_one_s_own_stands_after_each_problem(tmp_path):
    source = published(tmp_path / "train.jsonl", GSM8K)
    for instruction, text in (("Go.", "How many are 3 and 4?\n\nGo."), ("", "How many are 3 and 4?")):
        prompts, _ = prompts_of("gsm8k", source, tmp_path / "out", instruction=instruction)
        assert prompts[0].messages[0]["content"] == text


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("gsm8k", MATH[0], "gsm8k has the columns question and answer; found level, problem, solution, type"),
        ("math", GSM8K[0], "math has the columns problem and solution; found answer, question"),
        ("dapo-17k", {"prompt": "x"}, "dapo-17k has the columns prompt and reward_model.ground_truth; found prompt"),
        ("code", GSM8K[0], "code has the columns text and test_list or prompt and test_list or task_id and prompt"),
    ],
)
def test_another_schema_is_refused_with_the_columns_expected_and_found(tmp_path, capsys, name, row, expected):
    source = published(tmp_path / "train.jsonl", [row])
    assert main(["data", "prepare", name, "--from", str(source), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"data: {source}:1: {expected}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out/train.jsonl").exists()


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path):
    source = published(tmp_path / "train.jsonl", GSM8K)
    prepare("gsm8k", str(source), tmp_path / "out")
    before = (tmp_path / "out/train.jsonl").read_text()
    source.write_text(source.read_text() + '{"question": "cut')
    with pytest.raises(DataError, match=r"train.jsonl:4: expected a JSON object"):
        prepare("gsm8k", str(source), tmp_path / "out")
    assert (tmp_path / "out/train.jsonl").read_text() == before
    published(source, GSM8K[2:])
    with pytest.raises(DataError, match="1 rows read, 0 kept; dropped: 1 no answer after ####; expected a prompt"):
        prepare("gsm8k", str(source), tmp_path / "out")
    assert (tmp_path / "out/train.jsonl").read_text() == before


@pytest.mark.parametrize("source", ["nowhere.jsonl", "some/nowhere.parquet", "just_a_name"])
def test_a_source_that_is_no_file_and_no_hub_id_is_refused(tmp_path, source):
    with pytest.raises(DataError, match="--from: expected a file, a folder, or owner/name of a data set on the hub"):
        prepare("gsm8k", source, tmp_path)


def test_a_hub_id_needs_the_hub_s_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="`pip install huggingface_hub` adds it"):
        prepare("gsm8k", "openai/gsm8k", tmp_path)


def test_a_hub_id_may_name_a_folder(tmp_path, monkeypatch):
    import huggingface_hub

    def snapshot_download(repo, repo_type, allow_patterns):
        assert (repo, repo_type) == ("openai/gsm8k", "dataset")
        assert allow_patterns == ["main/*.jsonl", "main/*.parquet"]
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    published(tmp_path / "hub/main/train.jsonl", GSM8K)
    published(tmp_path / "hub/socratic/train.jsonl", MATH)
    prompts, _ = prompts_of("gsm8k", "openai/gsm8k/main", tmp_path / "out")
    assert len(prompts) == 2


def test_what_the_hub_says_is_passed_on_in_one_line(tmp_path, monkeypatch):
    import huggingface_hub

    def snapshot_download(*args, **kwargs):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(DataError, match="openai/gsm8k is no file here, and the hub says: no network"):
        prepare("gsm8k", "openai/gsm8k", tmp_path)


def test_parts_of_a_data_set_with_the_same_ids_make_one_file_of_prompts(tmp_path):
    published(tmp_path / "mbpp/full/train.jsonl", [CODE["mbpp"][0]])
    published(tmp_path / "mbpp/sanitized/train.jsonl", [CODE["mbpp, sanitized"][0]])
    (done,) = prepare("code", str(tmp_path / "mbpp"), tmp_path / "out")
    assert done.kept == 2
    assert len(load_prompts([done.file], DataConfig())) == 2


def test_what_cannot_be_prepared_leaves_no_file_behind(tmp_path):
    published(tmp_path / "mbpp.jsonl", [CODE["mbpp"][0] | {"test_list": "notalist"}])
    with pytest.raises(DataError, match="1 tests that cannot be read; expected a prompt"):
        prepare("code", str(tmp_path / "mbpp.jsonl"), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(DataError, match=r"--out: expected a folder that can be written, found .*mbpp.jsonl"):
        prepare("code", str(tmp_path / "mbpp.jsonl"), tmp_path / "mbpp.jsonl")


def test_the_commands_of_the_docs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    published(tmp_path / "downloads/gsm8k/main/train-00000-of-00001.parquet", GSM8K)
    published(tmp_path / "downloads/math/test.jsonl", MATH)
    published(tmp_path / "downloads/dapo-math-17k.parquet", [DAPO])
    published(tmp_path / "downloads/mbpp/train.jsonl", [CODE["mbpp"][0]])
    for _, _, module, *arguments in commands(DOCS / "data.md"):
        assert importlib.import_module(module).main(arguments) == 0
    made = ("gsm8k/train", "math/test", "dapo-17k/dapo-math-17k", "code/train")
    assert len(load_prompts([tmp_path / f"data/{name}.jsonl" for name in made], DataConfig())) == 5


def test_the_options_of_the_docs_are_valid():
    blocks = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "data.md").read_text(), re.MULTILINE | re.DOTALL)
    generated, rewards = map(yaml.safe_load, blocks)
    assert DataConfig(**generated["data"]).validates
    assert import_problem(RewardConfig(**rewards["reward"])) is None
