"""Agents in processes of their own: however they end, each sample has an outcome and nothing is left behind."""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from asyncrl.rollouter.agent_processes import function_host
from asyncrl.rollouter.agent_processes import tree as agent_tree
from asyncrl.rollouter.agent_processes.pool import (
    AgentError,
    AgentFailed,
    AgentOptions,
    AgentOutcome,
    AgentProcesses,
    AgentTask,
)
from tests.support import endpoint_agents as support
from tests.support.scripted import until

LONG_S = 120.0  # what takes less than this on the slowest machine, and far less here
MODULE = support.__name__


def task(text="?", answer="0", **fields):
    return AgentTask(
        **{
            "uid": "e0-000007",
            "index": 1,
            "messages": [{"role": "user", "content": text}],
            "text": text,
            "answer": answer,
            "model": "m",
            "base_url": "http://127.0.0.1:9/v1",
            "anthropic_base_url": "http://127.0.0.1:9",
            "api_key": "key-1",
        }
        | fields
    )


@contextlib.asynccontextmanager
async def running(function=None, **options):
    if function is not None:
        options["path"] = f"{MODULE}:{function.__name__}"
    agents = AgentProcesses(AgentOptions(**options))
    await agents.start()
    try:
        yield agents
    finally:
        await agents.close()


def command(code, **options):
    return running(command=(sys.executable, "-c", code), **options)


async def failure(run):
    with pytest.raises(AgentFailed) as raised:
        await run
    return raised.value


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    return str(path)


def nothing_is_left(lock):
    """What `support.leave_behind` started has ended."""
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


# -- functions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [support.sleeps, support.blocks_its_thread])
async def test_many_samples_run_at_once_in_one_process(function):
    async with running(function) as agents:
        began = time.monotonic()
        outcomes = await asyncio.gather(*(agents.run(task(answer=str(i))) for i in range(50)))
        assert time.monotonic() - began < 9.0  # 10 s one after another
    assert [outcome.reward for outcome in outcomes] == [float(i) for i in range(50)]


async def test_samples_go_to_the_process_with_the_fewest():
    async with running(support.process, processes=3) as agents:
        outcomes = await asyncio.gather(*(agents.run(task()) for _ in range(6)))
        assert len({outcome.metrics["pid"] for outcome in outcomes}) == 3


async def test_a_process_of_agents_has_a_process_group_of_its_own_in_our_session():
    async with running(support.process) as agents:
        pid = int((await agents.run(task())).metrics["pid"])
        assert os.getpgid(pid) == pid
        assert os.getsid(pid) == os.getsid(0)  # Linux may give each session an equal share of a core


async def test_an_agent_returns_nothing_a_number_or_a_dict():
    async with running(support.returns) as agents:
        expected = {
            "none": AgentOutcome(),
            "number": AgentOutcome(2.0),
            "true": AgentOutcome(1.0),
            "of a library": AgentOutcome(0.5),
            "metrics": AgentOutcome(None, {"turns": 3.0}),
            "reward": AgentOutcome(-1.5),
            "both": AgentOutcome(None, {"turns": 0.5}),
        }
        for text, outcome in expected.items():
            assert await agents.run(task(text)) == outcome
        complaints = {
            "text": "returned 'reward' = 'high' (str), expected a number",
            "list": "returned 'reward' = [1.0] (list), expected a number",
            "object": "returned a object that JSON cannot hold (found a object)",
            "keys": "returned {'score': 1.0}, expected None, a number, or a dict",
            "nan": "expected a finite number",
            "long": "returned a str of 100002 bytes of JSON, more than 65536",
            "many": "at most 64 metrics",
        }
        for text, complaint in complaints.items():
            failed = await failure(agents.run(task(text)))
            assert (failed.reason, failed.retry) == ("bad_result", False)
            assert complaint in str(failed)
            assert str(failed).startswith(f"{MODULE}:returns on e0-000007: ")


async def test_an_exception_fails_its_own_sample_only():
    async with running(support.misbehaves) as agents:
        waits = asyncio.create_task(agents.run(task("wait")))
        for text, complaint in (
            ("raise", "KeyError: 'no such unit'"),
            ("exit", "SystemExit: enough"),
            ("cancel", "CancelledError"),
        ):
            failed = await failure(agents.run(task(text)))
            assert (failed.reason, failed.retry) == ("agent_error", False)
            assert complaint in str(failed)
            assert "endpoint_agents.py" in failed.traceback
        assert not waits.done()
        waits.cancel()
    async with running(support.in_thread) as agents:
        assert "SystemExit: enough" in str(await failure(agents.run(task("exit"))))
        assert "StopIteration" in str(await failure(agents.run(task("stop"))))


async def test_an_exception_may_say_that_the_environment_failed():
    async with running(support.misbehaves) as agents:
        failed = await failure(agents.run(task("server")))
        assert (failed.reason, failed.retry) == ("infra", True)
        assert "ServerGone: the server has gone" in str(failed)


async def test_prints_are_not_results():
    async with running(support.prints) as agents:
        outcomes = await asyncio.gather(*(agents.run(task()) for _ in range(3)))
        assert [outcome.reward for outcome in outcomes] == [1.0] * 3


async def test_columns_of_parquet_files_reach_the_agent(tmp_path):
    path = tmp_path / "task.json"
    code = "import os, shutil, sys; shutil.copy(os.environ['ASYNCRL_TASK'], sys.argv[1])"
    async with running(command=(sys.executable, "-c", code, str(path))) as agents:
        await agents.run(task(data={"ids": np.arange(3), "image": b"\xff", "n": np.int64(4)}))
        assert '"data": {"ids": [0, 1, 2], "image": "/w==", "n": 4}' in path.read_text()
        assert "key-1" not in path.read_text()
        failed = await failure(agents.run(task(data={"x": object()})))
    assert "the task has no form in JSON (found a object)" in str(failed)


async def test_cancelling_a_run_cancels_the_coroutine(tmp_path):
    noted, began = tmp_path / "noted", tmp_path / "noted.began"
    async with running(support.notes_its_cancellation, args={"path": str(noted)}) as agents:
        run = asyncio.create_task(agents.run(task()))
        await until(began.exists)
        run.cancel()
        await until(noted.exists)
        assert run.cancelled()


# -- processes that end ------------------------------------------------------------------------------------------------


async def test_a_process_that_ends_fails_its_samples_and_is_replaced():
    async with running(support.misbehaves) as agents:
        waits = asyncio.create_task(failure(agents.run(task("wait"))))
        failed = await failure(agents.run(task("die")))
        for one in (failed, await waits):
            assert (one.reason, one.retry) == ("agent_exited", True)
            assert "its process ended with exit code 7: about to die" in str(one)
        assert (await agents.run(task("fine"))).reward == 1.0


async def test_a_blocked_event_loop_is_killed():
    async with running(support.misbehaves, unresponsive_s=1.0) as agents:
        failed = await failure(agents.run(task("block")))
        assert (failed.reason, failed.retry) == ("agent_blocked", True)
        assert "rollout.agent.unresponsive_s = 1 s" in str(failed)
        assert (await agents.run(task("fine"))).reward == 1.0


async def test_too_much_memory_is_killed_with_all_that_was_started(lock):
    async with running(support.misbehaves, args={"lock": lock}, memory_mb=300) as agents:
        failed = await failure(agents.run(task("hog")))
        assert (failed.reason, failed.retry) == ("agent_memory", True)
        assert re.search(r"used \d+ MiB of memory with all .*, more than rollout.agent.memory_mb = 300", str(failed))
        assert nothing_is_left(lock)


async def test_garbage_on_its_socket_ends_a_process():
    async with running(support.misbehaves) as agents:
        failed = await failure(agents.run(task("write to every descriptor")))
        assert (failed.reason, failed.retry) == ("agent_exited", True)
        assert "sent something that is no frame" in str(failed)
        assert (await agents.run(task("fine"))).reward == 1.0


async def test_a_daemon_lives_as_long_as_its_process(lock):
    async with running(support.misbehaves, args={"lock": lock}) as agents:
        await agents.run(task("leave"))
        assert not nothing_is_left(lock)
    assert nothing_is_left(lock)


async def test_closing_ends_samples_under_way():
    async with running(support.misbehaves) as agents:
        waits = asyncio.create_task(agents.run(task("wait")))
        await asyncio.sleep(0.1)
    with pytest.raises(AgentError, match="agents are closed"):
        await waits
    with pytest.raises(AgentError, match="agents are closed"):
        await agents.run(task())


async def test_a_process_that_cannot_be_replaced_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("once.py").write_text(
        f"import os\nif os.path.exists({str(tmp_path / 'loaded')!r}): os._exit(3)\n"
        f"open({str(tmp_path / 'loaded')!r}, 'w').close()\ndef run(task): os._exit(7)\n"
    )
    async with running(path="once:run") as agents:
        assert (await failure(agents.run(task()))).reason == "agent_exited"
        with pytest.raises(AgentError, match=r"^rollout\.agent\.path: once:run ended with exit code 3 on import$"):
            await agents.run(task())


# -- starting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("nonsense", "expected an import path such as package.module:function, found 'nonsense'"),
        ("no_such_module:run", "module no_such_module does not import (ModuleNotFoundError"),
        (f"{MODULE}:nothing", f"module {MODULE} has no nothing"),
        (f"{MODULE}:RETURNS", "is a dict, not a function"),
        (f"{MODULE}:Number", "is a class, not a function"),
        (f"{MODULE}:notes_its_cancellation", "cannot be called with a task and the arguments []"),
    ],
)
async def test_a_function_that_does_not_load_is_one_line(path, complaint):
    with pytest.raises(AgentError) as raised:
        await AgentProcesses(AgentOptions(path=path)).start()
    assert str(raised.value).startswith("rollout.agent.path: ")
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_an_import_that_takes_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(function_host, "START_TIMEOUT_S", 1.0)
    Path("slow.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(AgentError, match=r"rollout\.agent\.path: the start of slow:run did not end within 1 s"):
        await AgentProcesses(AgentOptions(path="slow:run")).start()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"command": ("no-such-program",)}, "rollout.agent.command: expected a program on PATH"),
        ({"path": "x:y", "python": "no-such-python"}, "rollout.agent.python: expected a program on PATH"),
        ({"path": "x:y", "secrets": ("NO_SUCH_KEY",)}, "rollout.agent.secrets: expected the environment variable NO_"),
    ],
)
async def test_what_is_missing_is_named_at_the_start(options, complaint):
    with pytest.raises(AgentError, match=re.escape(complaint)):
        await AgentProcesses(AgentOptions(**options)).start()


async def test_an_interpreter_without_asyncrl_finds_the_working_directory(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv/bin/python")
    (tmp_path / "agents_here.py").write_text(Path(support.__file__).read_text())
    with contextlib.chdir(tmp_path):
        async with running(path="agents_here:process", python=python) as agents:
            assert (await agents.run(task())).metrics["asyncrl"] == 0.0
        code = "import json, os, sys, agents_here; json.dump(1.5, open(os.environ['ASYNCRL_RESULT'], 'w'))"
        async with running(command=("python", "-c", code), python=python) as agents:
            assert (await agents.run(task())).reward == 1.5


async def test_processes_have_the_named_secrets_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k1")
    monkeypatch.setenv("OTHER_KEY", "k2")
    async with running(support.environment, args={"path": str(tmp_path / "v")}, secrets=("JUDGE_KEY",)) as agents:
        await agents.run(task())
    found = (tmp_path / "v").read_text()
    assert "JUDGE_KEY=k1" in found
    assert "OTHER_KEY" not in found
    assert f"HOME={os.environ['HOME']}\n" not in found


# -- commands ----------------------------------------------------------------------------------------------------------

VARIABLES = (
    "ANTHROPIC_API_KEY ANTHROPIC_BASE_URL ASYNCRL_MODEL ASYNCRL_RESULT ASYNCRL_TASK HOME OPENAI_API_KEY "
    "OPENAI_BASE_URL PATH TMPDIR"
).split()


async def test_a_command_has_the_task_in_its_environment(tmp_path):
    code = (
        "import json, os\n"
        f"open({str(tmp_path / 'found')!r}, 'w').write(json.dumps([dict(os.environ), os.getcwd()]))\n"
        "task = json.load(open(os.environ['ASYNCRL_TASK']))\n"
        "json.dump({'reward': float(task['answer']), 'metrics': {'index': task['index']}}, "
        "open(os.environ['ASYNCRL_RESULT'], 'w'))\n"
    )
    async with command(code) as agents:
        assert await agents.run(task(answer="4")) == AgentOutcome(4.0, {"index": 1.0})
    variables, folder = json.loads((tmp_path / "found").read_text())
    assert set(VARIABLES) <= set(variables)
    assert (variables["OPENAI_BASE_URL"], variables["ANTHROPIC_API_KEY"]) == ("http://127.0.0.1:9/v1", "key-1")
    assert variables["HOME"] == variables["TMPDIR"] == folder
    assert not Path(folder).exists()


async def test_what_a_command_comes_to():
    result = "open(__import__('os').environ['ASYNCRL_RESULT'], 'w').write"
    async with command("pass") as agents:
        assert await agents.run(task()) == AgentOutcome()
    for code, reason, complaint in (
        (
            "import sys; print('out'); sys.exit('no money left')",
            "agent_exited",
            "ended with exit code 1: no money left",
        ),
        ("import os; os.kill(os.getpid(), 11)", "agent_exited", "ended with exit code 139 (SIGSEGV)"),
        (f"{result}('nonsense')", "bad_result", "wrote a result that is not JSON"),
        (f"{result}('1' * 100000)", "bad_result", "wrote a result that is not JSON of at most 65536 bytes"),
        (f"{result}('\"text\"')", "bad_result", "expected a number"),
        ("import os; os.mkfifo(os.environ['ASYNCRL_RESULT'])", "bad_result", "wrote a result that is not JSON"),
    ):
        async with command(code) as agents:
            failed = await failure(agents.run(task()))
            assert (failed.reason, failed.retry) == (reason, reason == "agent_exited")
            assert complaint in str(failed)


async def test_a_command_that_prints_a_lot_is_not_held_up():
    async with command("import sys; print('x' * 3_000_000); sys.exit('y' * 3_000_000)") as agents:
        failed = await failure(agents.run(task()))
    assert len(str(failed)) <= 2000


async def test_commands_run_at_once():
    async with command("import time; time.sleep(1)") as agents:
        began = time.monotonic()
        await asyncio.gather(*(agents.run(task()) for _ in range(8)))
        assert time.monotonic() - began < 7.0


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "cancelled"])
async def test_a_command_leaves_nothing_behind(lock, ends):
    code = f"import {MODULE} as support; support.leave_behind({lock!r}); " + ("" if ends else support.SLEEPS)
    async with command(code) as agents:
        run = asyncio.create_task(agents.run(task()))
        if ends:
            await run
        else:
            await until(lambda: not nothing_is_left(lock))
            run.cancel()
            await asyncio.wait({run})
        assert nothing_is_left(lock)


async def test_a_command_that_is_cancelled_as_it_starts_leaves_nothing_behind(lock, monkeypatch):
    real = asyncio.create_subprocess_exec

    async def slow(*words, **options):
        process = await real(*words, **options)
        await until(lambda: not nothing_is_left(lock))
        run.cancel()
        await asyncio.sleep(0.1)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    async with command(f"import {MODULE} as support; support.leave_behind({lock!r}); {support.SLEEPS}") as agents:
        run = asyncio.create_task(agents.run(task()))
        await asyncio.wait({run})
        assert run.cancelled()
        assert nothing_is_left(lock)


async def test_a_command_with_too_much_memory_is_killed():
    async with command(f"x = 'x' * (600 << 20); {support.SLEEPS}", memory_mb=300) as agents:
        assert (await failure(agents.run(task()))).reason == "agent_memory"


async def test_closing_kills_commands(lock):
    async with command(f"import {MODULE} as support; support.leave_behind({lock!r}); {support.SLEEPS}") as agents:
        run = asyncio.create_task(agents.run(task()))
        await until(lambda: not nothing_is_left(lock))
    assert nothing_is_left(lock)
    with pytest.raises(AgentError, match="agents are closed"):
        await run


# -- keepers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=lambda by: by.name)
async def test_nothing_is_left_when_a_keeper_is_killed_or_stopped(lock, monkeypatch, by):
    monkeypatch.setattr(agent_tree, "KILL_TIMEOUT_S", 2.0)
    async with running(support.misbehaves, args={"lock": lock}) as agents:
        await agents.run(task("leave"))
        killed = agents._hosts[0]
        os.kill(killed._tree._keeper.pid, by)
        if by == signal.SIGKILL:
            await until(lambda: nothing_is_left(lock) and not killed.ready)
            assert (await agents.run(task("fine"))).reward == 1.0
    await until(lambda: nothing_is_left(lock))


@pytest.mark.parametrize("mode", ["function", "command"])
def test_nothing_is_left_when_the_parent_is_killed(lock, mode):
    script = (
        f"from {__name__} import *\n"
        "async def main(lock):\n"
        f"    code = f'import {{MODULE}} as support; support.leave_behind({{lock!r}}); {{support.SLEEPS}}'\n"
        f"    function = {mode == 'function'}\n"
        "    async with running(support.misbehaves, args={'lock': lock}) if function else command(code) as agents:\n"
        "        run = asyncio.create_task(agents.run(task('leave')))\n"
        "        await until(lambda: not nothing_is_left(lock))\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main(sys.argv[1]))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-c", script, lock], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout.readline() == b"ready\n"
        (keeper,) = psutil.Process(parent.pid).children()
        parent.kill()
    keeper.wait(LONG_S)
    assert nothing_is_left(lock)
