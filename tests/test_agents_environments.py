"""Environments of verifiers and OpenEnv, unmodified, each in an environment of its own."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from asyncrl.config.schema import DataConfig
from asyncrl.data.prompts import load_prompts
from asyncrl.rollouter.agent_processes.pool import AgentError, AgentOptions, AgentProcesses
from asyncrl.rollouter.samples import FailedSample
from tests.support.endpoint import PROMPT, EndpointSystem, made, make_model, writing
from tests.support.faults import audit, starting
from tests.test_agents_clients import DOCS, OPTIONS, ROOT, interpreter

pytestmark = [pytest.mark.agents, pytest.mark.timeout(400)]

ADAPTER = ROOT / "asyncrl/rollouter/agent_processes/adapters/verifiers.py"
EXAMPLES = DOCS / "examples"
#: as verifiers' users write it: the harness runs on this machine
ENV = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def modules(monkeypatch):
    """``modules(folder)``: agents find the modules of this folder."""
    return monkeypatch.chdir


@contextlib.asynccontextmanager
async def running(path, args=None):
    agents = AgentProcesses(AgentOptions(path=path, python=interpreter(path.partition(":")[0]), args=args or {}))
    await agents.start()
    try:
        yield agents
    finally:
        await agents.close()


@contextlib.asynccontextmanager
async def serving(model, path, writes, args=None, columns=None, **options):
    """The system that serves an environment, with further columns of the prompt's row."""
    async with running(path, args) as agents:
        limits = {"max_response_tokens": 20000, "agent_timeout_s": 120.0} | options
        prompt = dataclasses.replace(PROMPT, extra=columns or {})
        async with EndpointSystem(model, agents, writes, prompt=prompt, **limits) as system:
            yield system


async def refused(path, args=None):
    with pytest.raises(AgentError) as raised:
        async with running(path, args):
            pass
    return str(raised.value)


async def failed(system):
    (sample,) = await system.samples()
    assert isinstance(sample, FailedSample), sample
    return sample


def test_the_examples_are_those_of_the_docs():
    for name in ("sums_v1.py", "guess_env.py"):
        assert (EXAMPLES / name).read_text() in (DOCS / "agents.md").read_text()


# -- verifiers ---------------------------------------------------------------------------------------------------------

SUM = {"task": {"prompt": "Compute 1+2", "answer": 3}}


def write_prompts(taskset, file, *more, folder=EXAMPLES):
    command = [interpreter("verifiers"), ADAPTER, taskset, "--out", file, *more]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True)


@pytest.mark.parametrize("api", ["chat", "generate"])
async def test_a_task_of_verifiers_is_a_sample(model, modules, api):
    modules(EXAMPLES)
    renders = {"type": "train", "renderer_model_name": str(model), "renderer": {"name": "default"}}
    args = {"env": ENV, "client": {"type": "eval"} if api == "chat" else renders}
    async with serving(model, "verifiers:sums-v1", writing("It is 4", "It is 3"), args, SUM) as system:
        sample = await made(system)
        assert (sample.reward, sample.metrics) == (1.0, {"answers": 2.0, "reward/right": 1.0})
        assert len(sample.sequences) == 1
        assert system.counted() == ({"rendered": 1, "bridged": 1} if api == "chat" else {"given": 2})


async def test_the_reward_is_the_weighted_sum_of_the_rewards(model, modules, tmp_path):
    modules(ROOT / "tests/agents/verifiers")
    columns = {"task": {"prompt": "Compute 1+2", "hazard": "", "folder": str(tmp_path)}}
    async with serving(model, "verifiers:hazards-v1", writing("3"), {"env": ENV}, columns) as system:
        sample = await made(system)
        assert (sample.reward, sample.metrics) == (1.25, {"reward/half": 1.0, "reward/quarter": 0.25})


@pytest.mark.slow
async def test_samples_go_on_while_the_servers_of_verifiers_are_replaced(model, modules):
    modules(EXAMPLES)
    n = 80  # more than share one set of servers
    async with serving(model, "verifiers:sums-v1", lambda prompt: "It is 3", {"env": ENV}, SUM, n=n) as system:
        assert [sample.reward for sample in await system.samples()] == [1.0] * n


def test_the_prompt_file_has_the_tasks_of_a_taskset(tmp_path):
    file = tmp_path / "sums.jsonl"
    written = write_prompts("sums-v1", file, "--env", json.dumps({"taskset": {"largest": 1}}))
    assert written.returncode == 0, written.stderr
    prompts = load_prompts([file], DataConfig())
    assert [prompt.extra["task"]["answer"] for prompt in prompts] == [0, 1, 1, 2]
    assert prompts[1].messages == ({"role": "user", "content": "Compute 0+1"},)


@pytest.mark.slow
def test_an_infinite_taskset_is_cut(tmp_path):
    file, folder = tmp_path / "hazards.jsonl", ROOT / "tests/agents/verifiers"
    written = write_prompts("hazards-v1", file, folder=folder)
    assert written.returncode == 2
    assert "hazards-v1 is infinite: say how many --tasks" in written.stderr
    assert write_prompts("hazards-v1", file, "--tasks", "2", folder=folder).returncode == 0
    assert [json.loads(line)["prompt"][0]["role"] for line in file.read_text().splitlines()] == ["system"] * 2


HAZARDS = {
    "harness once": None,
    "harness": ("infra", "HarnessError: harness 'hazards-v1' exited 1: the harness's program was killed"),
    "reward": ("agent_error", "TaskError: task HazardTask scoring: ValueError: a bug in the reward"),
}


@pytest.mark.parametrize("hazard", HAZARDS)
async def test_a_failure_of_the_environment_is_told_from_one_of_the_task(model, modules, tmp_path, hazard):
    modules(ROOT / "tests/agents/verifiers")
    columns = {"task": {"prompt": "Compute 1+2", "hazard": hazard, "folder": str(tmp_path)}}
    async with serving(model, "verifiers:hazards-v1", writing("3", "4"), {"env": ENV}, columns) as system:
        if HAZARDS[hazard] is None:
            sample = await made(system)  # what was recorded before is answered again
            assert sample.reward == 1.25
        else:
            reason, message = HAZARDS[hazard]
            sample = await failed(system)
            assert sample.reason == reason
            assert message in sample.message
        assert system.counted().get("restarted", 0) == (hazard != "reward")


async def test_a_taskset_that_does_not_load_is_refused_when_the_run_starts(modules):
    modules(EXAMPLES)
    begin = "rollout.agent.path: verifiers:"
    assert (await refused("verifiers:nope-v1")).startswith(
        f"{begin}nope-v1: ModuleNotFoundError: taskset 'nope-v1' not"
    )
    assert "largets" in await refused("verifiers:sums-v1", {"env": {"taskset": {"largets": 1}}})
    assert "turns" in await refused("verifiers:sums-v1", {"turns": 1})


async def test_a_row_without_a_task_says_where_tasks_come_from(model, modules):
    modules(EXAMPLES)
    async with serving(model, "verifiers:sums-v1", writing("3"), {"env": ENV}) as system:
        assert (
            "expected a column 'task'; write the prompt file as docs/agents.md says" in (await failed(system)).message
        )


# -- OpenEnv -----------------------------------------------------------------------------------------------------------

HAZARD_SERVER = "openenv:tests.agents.openenv.hazards:app"
SAID = {"action": "word", "fields": {"loud": True}, "observation": "heard"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def server():
    """The path of hazards on a server that runs."""
    port = free_port()
    app = ("tests.agents.openenv.hazards:app", "--port", str(port), "--log-level", "warning")
    process = subprocess.Popen([interpreter("openenv"), "-m", "uvicorn", *app], cwd=ROOT)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"openenv:http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def test_an_episode_of_openenv_is_a_sample(model, modules):
    modules(EXAMPLES)
    texts = ('I say {"number": 9}', "nine", '{"guess": 9}', '{"number": 3}')
    args = {"observation": "hint"}
    async with serving(model, "openenv:guess_env:app", writing(*texts), args, {"seed": 1}) as system:
        sample = await made(system)
        assert (sample.reward, sample.metrics) == (1.0, {"steps": 2.0, "malformed_actions": 2.0, "done": 1.0})
        assert len(sample.sequences) == 1
        assert system.counted() == {"rendered": 1, "bridged": 3}
        text = system.tokenizer.hf.decode(sample.sequences[0].tokens.tolist())
        assert re.findall("user\n(.*?)<", text) == [
            "It is smaller.",
            "Expected an action, a JSON object.",
            "This is no action of the environment.",
        ]


@pytest.mark.slow
async def test_all_samples_of_a_prompt_play_the_same_episode(model, modules):
    modules(EXAMPLES)
    writes = lambda prompt: '{"number": 5}'
    async with serving(model, "openenv:guess_env:app", writes, {"turns": 2}, n=12) as system:
        await system.samples()
        assert len({prompt for prompt, _ in system.policy.log}) <= 2  # the first, and one with a hint


@pytest.mark.parametrize(("reward", "expected"), [("sum", 1.0), ("last", 0.5)])
async def test_an_answer_is_a_field_of_the_action(model, server, tmp_path, reward, expected):
    columns, texts = {"reset": {"folder": str(tmp_path)}}, ("hello", "stop")
    async with serving(model, server, writing(*texts), SAID | {"reward": reward}, columns) as system:
        sample = await made(system)
        assert (sample.reward, sample.metrics["done"]) == (expected, 1.0)


async def test_an_episode_ends_at_the_limit_of_turns(model, server, tmp_path):
    columns = {"reset": {"folder": str(tmp_path)}}
    async with serving(model, server, writing(), SAID | {"turns": 3}, columns) as system:
        sample = await made(system)
        assert (sample.reward, sample.metrics["steps"], sample.metrics["done"]) == (1.5, 3.0, 0.0)


async def test_an_episode_that_outgrows_the_context_keeps_its_rewards(model, server, tmp_path):
    columns = {"reset": {"folder": str(tmp_path)}, "seed": None}
    async with serving(model, server, writing(), SAID | {"turns": 500}, columns, max_response_tokens=60) as system:
        sample = await made(system)
        assert 0 < sample.metrics["steps"] < 500
        assert (sample.reward, sample.metrics["done"]) == (0.5 * sample.metrics["steps"], 0.0)


async def test_answers_of_which_none_is_an_action_earn_nothing(model, server, tmp_path):
    columns = {"reset": {"folder": str(tmp_path)}}
    async with serving(model, server, writing("hm", '{"w": 1}'), {"turns": 2}, columns) as system:
        sample = await made(system)
        assert (sample.reward, sample.metrics["steps"], sample.metrics["malformed_actions"]) == (0.0, 0.0, 2.0)


@pytest.mark.slow
async def test_samples_wait_for_a_server_that_serves_one_at_a_time(model, server, tmp_path):
    columns = {"reset": {"folder": str(tmp_path)}}
    async with serving(model, server, lambda prompt: "stop", SAID, columns, n=3) as system:
        assert [sample.reward for sample in await system.samples()] == [0.5] * 3


async def test_a_sample_whose_server_dies_in_a_step_is_started_again(model, tmp_path):
    columns = {"reset": {"folder": str(tmp_path)}}
    async with serving(model, HAZARD_SERVER, writing("hello", "die once", "stop"), SAID, columns) as system:
        sample = await made(system)  # what was recorded before is answered again
        assert (sample.reward, sample.metrics["steps"]) == (1.5, 3.0)
        assert system.counted()["restarted"] == 1


@pytest.mark.slow
async def test_a_sample_whose_server_dies_between_two_steps_is_started_again(model, tmp_path):
    """The next step would begin in an environment that was not reset."""
    texts = iter(("hello", "again", "stop"))

    def writes(prompt):
        if (text := next(texts)) == "again":
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        return text

    async with serving(model, HAZARD_SERVER, writes, SAID, {"reset": {"folder": str(tmp_path)}}) as system:
        sample = await made(system)
        assert (sample.reward, sample.metrics["steps"]) == (1.5, 3.0)
        assert system.counted()["restarted"] == 1


@pytest.mark.slow
async def test_a_sample_fails_if_its_server_dies_again(model, tmp_path):
    columns = {"reset": {"folder": str(tmp_path)}}
    async with serving(model, HAZARD_SERVER, lambda prompt: "die", SAID, columns) as system:
        sample = await failed(system)
        assert sample.reason == "infra"
        assert "EnvironmentFailed: the server does not answer" in sample.message
        assert system.counted()["restarted"] == 1


async def test_an_error_of_the_environment_fails_its_sample_at_once(model, server, tmp_path):
    async with serving(model, server, writing("raise"), SAID, {"reset": {"folder": str(tmp_path)}}) as system:
        sample = await failed(system)
        assert sample.reason == "agent_error"
        assert "a bug in the environment" in sample.message
        assert "restarted" not in system.counted()


async def test_a_server_that_does_not_start_says_its_last_line():
    found = await refused("openenv:tests.agents.openenv.broken:app")
    assert found == (
        "rollout.agent.path: openenv:tests.agents.openenv.broken:app: RuntimeError: the server ended with exit code 1: "
        "the licence has expired"
    )
    address = f"http://127.0.0.1:{free_port()}"
    assert f"no OpenEnv server answers at {address}" in await refused(f"openenv:{address}")
    assert "reward: expected sum or last, found 'mean'" in await refused(f"openenv:{address}", {"reward": "mean"})


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", ["verifiers:sums-v1", "openenv:docs.examples.guess_env:app"])
def test_a_run_trains_in_an_environment_to_the_end(inputs, tmp_path, path):
    python = interpreter(path.partition(":")[0])
    if path.startswith("verifiers"):
        python = within(EXAMPLES, python, tmp_path)
        args = {"env": ENV, "sampling": {"max_tokens": 12}}
        assert write_prompts("sums-v1", tmp_path / "train.jsonl").returncode == 0
        more = (f"data.train_files=[{tmp_path / 'train.jsonl'}]",)
    else:
        args, more = {"observation": "hint", "turns": 2, "chat": {"max_tokens": 12}}, ()
    agent = (f"rollout.agent.path={path}", f"rollout.agent.python={python}", f"rollout.agent.args={json.dumps(args)}")
    with starting(inputs, tmp_path / "run", *OPTIONS, *agent, *more) as start:
        run = start()
        assert run.wait(360) == 0, run.text
    audit(run.folder, [2] * 3, staleness_bound=0)
    assert max(run.column("mismatch/fresh_kl")) < 1e-4
    answers = ("answers",) if path.startswith("verifiers") else ("steps", "malformed_actions")
    assert [sum(step) for step in zip(*(run.column(f"rollout/{name}") for name in answers))] == [2] * 3


def within(folder: Path, python: str, here: Path) -> str:
    """An interpreter that finds the modules of a folder, as if they were installed."""
    script = here / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec "{python}" "$@"\n')
    script.chmod(0o755)
    return str(script)
