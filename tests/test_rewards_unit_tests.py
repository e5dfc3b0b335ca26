"""The reward of programs: tests run in a sandbox, and what a program tries there counts for nothing."""

import contextlib
import json
from dataclasses import replace

import pytest

from asyncrl.config.schema import Config, RewardConfig, SandboxConfig
from asyncrl.data.programs import main as write_programs
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.rollouter.rewards.base import Answer
from asyncrl.rollouter.rewards.pool import RewardPool
from asyncrl.rollouter.rewards.unit_tests import program_of
from asyncrl.run.preflight import _reward_problems
from asyncrl.sandbox.service import SandboxService
from tests.support.faults import FaultyRun, audit, starting
from tests.support.rewards import PROMPT, import_problem
from tests.support.tiny import make_inputs

DOUBLE = [{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "-3", "stdout": "-6"}]
ADD = [{"code": "assert add(1, 2) == 3"}, {"code": "assert add('a', 'b') == 'ab'"}]


def prompt(tests):
    return replace(PROMPT, extra={"tests": json.dumps(tests)})


def block(code):
    return f"Think.\n```python\n{code}\n```\nThat is it."


@contextlib.asynccontextmanager
async def rewards(**options):
    service = SandboxService(SandboxConfig(memory_mb=128, processes=16))
    options = {"timeout_s": 60.0} | options
    pool = RewardPool(RewardConfig(function="unit_tests", **options), service.address)
    await pool.start()
    assert pool.taken == {"sandboxes", "prompt.tests"}
    await service.start()
    try:
        yield pool
    finally:
        await pool.close()
        await service.close()


@pytest.mark.agents
async def test_programs_are_rewarded_for_passing_all_tests():
    answers = {
        block("print(int(input()) * 2)"): 1.0,
        block("print(4)"): 0.0,  # passes one
        block("n = int(input())\nprint(n + n, '')\nprint()"): 1.0,  # white space at the end does not count
        block("raise SystemExit"): 0.0,
        "print(int(input()) * 2)": 1.0,
        "": 0.0,
        block("print(1)") + block("print(int(input()) * 2)"): 1.0,  # the last one
    }
    async with rewards() as pool:
        results = await pool.score([Answer(prompt(DOUBLE), answer) for answer in answers])
    assert [(result.error, result.reward) for result in results] == [(None, reward) for reward in answers.values()]
    assert [result.metrics["no_code"] for result in results] == [0, 0, 0, 0, 0, 1, 0]


@pytest.mark.agents
async def test_tests_that_expect_more_output_than_is_kept_are_at_fault_not_the_program():
    programs = [block("print('ab' * 50000)"), block("import sys\nprint(1)\nprint('x' * 99999, file=sys.stderr)")]
    long = [{"stdin": "", "stdout": "ab" * 50000}]
    async with rewards() as pool:
        (right, wrong) = await pool.score([Answer(prompt(long), program) for program in programs])
        (loud,) = await pool.score([Answer(prompt([{"stdin": "", "stdout": "1"}]), programs[1])])
        noisy = block("import sys\nprint('ab' * 1000)\nprint('x' * 99999, file=sys.stderr)")
        (noisy_right,) = await pool.score([Answer(prompt([{"stdin": "", "stdout": "ab" * 1000}]), noisy)])
    assert right.error == "reward_error"
    assert "sandbox.output_kb" in right.message
    assert (wrong.error, wrong.reward) == (None, 0.0)
    assert (loud.error, loud.reward) == (None, 1.0)
    assert (noisy_right.error, noisy_right.reward) == (None, 1.0)


@pytest.mark.agents
async def test_a_share_of_the_tests_is_a_share_of_the_reward():
    async with rewards(args={"partial": True, "test_s": 3.0}) as pool:
        results = await pool.score([Answer(prompt(DOUBLE), block(code)) for code in ("print(4)", "while True: pass")])
        half, late = results
        assert (half.reward, half.metrics["accuracy"], half.metrics["tests_passed"]) == (0.5, 0.0, 0.5)
        assert (late.reward, late.metrics["tests_timed_out"]) == (0.0, 1.0)


@pytest.mark.agents
async def test_statements_run_after_the_program_and_the_program_cannot_end_them():
    programs = {
        "def add(a, b):\n    return a + b": 1.0,
        "def add(a, b):\n    return int(a) + int(b)": 0.0,
        "def add(a, b):\n    return 3": 0.0,
        "import sys\nsys.exit(0)": 0.0,
        "import os\nos._exit(0)": 0.0,
        "print('passed')": 0.0,
        "def add(a, b):\n    for i in range(50000):\n        print(i)\n    return a + b": 1.0,
        "import atexit\nadd = lambda a, b: a + b\natexit.register(print, 'done')": 1.0,
        "import builtins\nadd = lambda a, b: a + b\nif __name__ == '__main__':\n    raise SystemExit": 1.0,
        "import os\nos.kill(os.getppid(), 9)": 0.0,
        "open('/sandbox/statements.py', 'w').write('')\ndef add(a, b): return 0": 0.0,
    }
    async with rewards() as pool:
        results = await pool.score([Answer(prompt(ADD), block(program)) for program in programs])
    assert [(result.error, result.reward) for result in results] == [(None, reward) for reward in programs.values()]


@pytest.mark.agents
async def test_it_is_a_part_of_a_weighted_sum():
    functions = {"tests": {"function": "unit_tests", "weight": 0.5}, "text": {"function": "exact_match"}}
    service = SandboxService(SandboxConfig())
    config = RewardConfig(function="weighted", args={"functions": functions}, timeout_s=60.0)
    pool = RewardPool(config, service.address)
    await pool.start()
    assert pool.taken == {"sandboxes", "prompt.tests"}
    await service.start()
    (result,) = await pool.score([Answer(prompt(DOUBLE), block("print(int(input()) * 2)"))])
    await pool.close()
    await service.close()
    assert (result.error, result.reward) == (None, 0.5)


@pytest.mark.agents
@pytest.mark.parametrize(
    "tests", [None, "no JSON", "[]", '[{"stdin": "1"}]', '[{"code": "assert ("}]', '{"code": "1"}']
)
async def test_tests_that_do_not_run_are_a_fault_of_the_data(tests):
    async with rewards() as pool:
        (result,) = await pool.score([Answer(replace(PROMPT, extra={"tests": tests}), block("pass"))])
    assert result.error == "reward_error"
    assert "column tests" in result.message


@pytest.mark.agents
async def test_without_a_sandbox_nothing_is_scored():
    service = SandboxService(SandboxConfig())
    pool = RewardPool(RewardConfig(function="unit_tests"), service.address)
    await pool.start()
    (result,) = await pool.score([Answer(prompt(DOUBLE), block("print(int(input()) * 2)"))])
    await pool.close()
    assert result.error == "reward_error"
    assert "does not answer" in result.message


@pytest.mark.parametrize("args", [{"test_s": 11.0}, {"test_s": 0}, {"partial": 1}, {"nonsense": 1}])
def test_arguments_that_cannot_be_are_refused(args):
    assert "reward.args" in import_problem(RewardConfig(function="unit_tests", args=args))


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("a\n```python\nb\n```\n```\nc\n```", "c\n"),
        ("```py\nb", "b"),
        ("b", "b"),
        ("```python\nx\n```\n```json\n{}\n```", "x\n"),
        ('```python\nx = "```"\n```', 'x = "```"\n'),
    ],
)
def test_the_program_is_the_last_block(text, program):
    assert program_of(text) == program


def test_a_run_that_needs_a_sandbox_is_refused_where_there_is_none(tmp_path, monkeypatch):
    config = Config(reward=RewardConfig(function="unit_tests"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = _reward_problems(config, 2, [])
    assert problem.startswith("sandbox.kind: auto serves no sandbox on this machine")
    assert "apt-get install bubblewrap" in problem
    assert _reward_problems(config, None, []) == []  # a cluster's machines may differ from this one


@pytest.mark.parametrize("function", ["unit_tests", "weighted"])
def test_prompts_without_tests_are_refused_before_the_run_starts(function):
    args = {"functions": {"code": {"function": "unit_tests", "weight": 1.0}}} if function == "weighted" else {}
    config = Config(reward=RewardConfig(function=function, args=args))
    (problem,) = _reward_problems(config, None, [prompt(DOUBLE), PROMPT])
    assert problem == (
        f"reward.function: {function} scores prompts with the columns tests; prompt {PROMPT.prompt_id} has no tests"
    )
    assert _reward_problems(config, None, [prompt(DOUBLE)]) == []


@pytest.mark.agents
@pytest.mark.timeout(400)
def test_a_run_scores_programs_in_sandboxes(tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Print {n}"}],
            "answer": "",
            "tests": json.dumps([{"stdin": "", "stdout": str(n)}]),
        }
        for n in range(8)
    ]
    (inputs / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (
        "reward.function=unit_tests",
        "reward.timeout_s=60",
        "algorithm.filter_zero_variance=false",
        "data.validation_files=[]",
        "trainer.total_steps=2",
        "async_training.staleness_threshold=0",
    )
    with starting(inputs, tmp_path / "run", *options) as start:
        run = start()
        assert run.wait(360) == 0, run.text
    audit(run.folder, [2] * 2, staleness_bound=0)
    assert len(run.column("rollout/tests_passed")) == 2


@pytest.mark.agents
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_code_task_learns(tmp_path):
    make_checkpoint(
        tmp_path / "checkpoint", seed=1, warm_start_steps=400, demonstrations="asyncrl.data.programs:demonstrations"
    )
    write_programs(["--out", str(tmp_path / "data"), "--heldout", "64"])
    run = FaultyRun(
        None,
        tmp_path / "run",
        f"model.path={tmp_path / 'checkpoint'}",
        f"data.train_files=[{tmp_path / 'data/train.jsonl'}]",
        f"data.validation_files=[{tmp_path / 'data/heldout.jsonl'}]",
        "trainer.total_steps=12",
        "reporting.wandb.mode=disabled",
        config="configs/code_cpu.yaml",
    )
    try:
        assert run.wait(900) == 0, run.text
    finally:
        run.close()
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.15
