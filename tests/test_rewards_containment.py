"""Reward code is not trusted: whatever it does, the pool answers, learns only numbers, and leaves nothing behind."""

import asyncio
import fcntl
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl.config.schema import RewardConfig
from asyncrl.processes.isolation import landlock_version
from asyncrl.rollouter.rewards import pool as pool_module
from asyncrl.rollouter.rewards.base import Answer
from asyncrl.rollouter.rewards.limits import MAX_PROCESSES
from asyncrl.rollouter.rewards.pool import RewardError, RewardPool
from asyncrl.rollouter.rewards.replies import MAX_MESSAGE, BadReply, checked, decode
from tests.support import reward_attacks as attacks
from tests.support.rewards import PROMPT, pool_of

LONG_S = 120.0  # what takes less than this on the slowest machine, and far less here


async def scored(pool: RewardPool, *responses: str):
    return await pool.score([Answer(PROMPT, response) for response in responses])


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    return path


def nothing_is_left(lock: Path) -> bool:
    """No process that `tests.support.reward_attacks` has left behind still lives."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


async def everything_has_ended(lock: Path) -> None:
    """Wait for it."""
    with lock.open() as file:
        await asyncio.wait_for(asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX), LONG_S)


# -- environment -------------------------------------------------------------------------------------------------------


async def test_a_worker_has_the_named_secrets_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k1")
    monkeypatch.setenv("OTHER_KEY", "k2")
    async with pool_of(attacks.environment, secrets=["JUDGE_KEY"]) as pool:
        (result,) = await scored(pool, str(tmp_path / "found"))
    found = json.loads((tmp_path / "found").read_text())
    assert found["JUDGE_KEY"] == "k1"
    assert "OTHER_KEY" not in found
    assert found["PATH"] == os.environ["PATH"]
    assert result.metrics["folders"] == 1  # home, temporary files and working directory
    assert found["HOME"] != os.environ["HOME"]
    assert not Path(found["HOME"]).exists()  # removed with the worker


@pytest.mark.skipif(landlock_version() < 2, reason="this kernel has no Landlock")
async def test_a_worker_cannot_read_the_environment_of_another_process():
    async with pool_of(attacks.reads_environment_of) as pool:
        with subprocess.Popen(["sleep", "600"], env={**os.environ, "OTHER_KEY": "k2"}) as other:
            try:
                (result,) = await scored(pool, str(other.pid))
            finally:
                other.kill()
    assert result.reward == -1.0


async def test_a_worker_inherits_no_descriptor(tmp_path):
    secret = tmp_path / "secret"
    with secret.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        async with pool_of(attacks.has_open) as pool:
            (result,) = await scored(pool, str(secret))
    assert (result.error, result.reward) == (None, 0.0)


async def test_a_secret_that_is_not_set_is_refused_at_the_start(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(RewardError, match=r"reward\.secrets: expected the environment variable JUDGE_KEY, found none"):
        async with pool_of(attacks.environment, secrets=["PATH", "JUDGE_KEY"]):
            pass


async def test_a_function_in_the_working_directory_of_the_run_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_rewards.py").write_text("import my_words\ndef score(prompt, response): return my_words.WORTH\n")
    Path("my_words.py").write_text("WORTH = 3.0\n")
    pool = RewardPool(RewardConfig(function="my_rewards:score"))
    await pool.start()
    (result,) = await scored(pool, "x")
    await pool.close()
    assert result.reward == 3.0


# -- replies -----------------------------------------------------------------------------------------------------------

GIANT = "sent a reply of 1099511627776 bytes, more than the 65536 that it may have"


async def test_anything_but_a_reply_is_an_error_and_ends_the_worker(tmp_path):
    unpickled = tmp_path / "unpickled"
    async with pool_of(attacks.forges_replies, args={"path": str(unpickled)}, timeout_s=LONG_S) as pool:
        for response, complaint in (("pickle", "not JSON"), ("empty", "not a list of 1 outcome(s)"), ("giant", GIANT)):
            (result,) = await scored(pool, response)
            assert result.error == "reward_error"
            assert complaint in result.message
            assert "reward_attacks:forges_replies" in result.message
        assert [r.reward for r in await scored(pool, "fine")] == [1.0]
    assert not unpickled.exists()
    pickle.loads(pickle.dumps(attacks.Unpickled(str(unpickled))))
    assert unpickled.exists()  # the attack itself works


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"\xff\xfe\xfd", "a reply that is not JSON"),
        (b"[" * 50_000, "a reply that is not JSON"),
        (b'[{"reward": 1}, {"reward": 1}]', "a reply that is not a list of 1 outcome(s)"),
        (b'{"reward": 1}', "a reply that is not a list of 1 outcome(s)"),
        (b"[1.0]", "an outcome that is neither numbers nor a text"),
        (b'[{"accuracy": 1}]', "without 'reward'"),
        (b'[{"reward": NaN}]', "expected a finite number"),
        (b'[{"reward": 1' + b"0" * 400 + b"}]", "int too large"),
        (b'[{"reward": "1"}]', "expected a number"),
        (b'[{"reward": 1, "x": [[]]}]', "expected a number"),
        (b'[{"reward": 1, "x\\u001b[2J": 1}]', "printable characters"),
        (json.dumps([{"reward": 1, **{f"m{i}": i for i in range(1000)}}]).encode(), "at most 64 metrics"),
    ],
)
def test_each_field_of_a_reply_is_checked(payload, complaint):
    with pytest.raises(BadReply, match=re.escape(complaint)):
        decode(payload, 1)


async def test_metrics_beyond_their_limits_are_errors_that_say_so():
    async with pool_of(attacks.many_metrics) as pool:
        few, many = await scored(pool, "0 64", "0 1000")
    assert (few.error, len(few.metrics)) == (None, 64)
    assert many.error == "reward_error"
    assert "returned 1001 numbers, expected a reward and at most 64 metrics" in many.message
    async with pool_of(attacks.long_name) as pool:
        results = await scored(pool, "x" * 64, "x" * 65, "", "line\nbreak")
    assert [r.error for r in results] == [None, *["reward_error"] * 3]
    assert all("expected a name of 1 to 64 printable characters" in r.message for r in results[1:])


def test_numbers_fit_the_precision_in_which_samples_hold_them():
    assert checked({"reward": True, "x": 3}) == {"reward": 1.0, "x": 3.0}
    for value in (1e39, float("inf"), float("nan"), 10**400):
        with pytest.raises((ValueError, OverflowError)):
            checked(value)


def test_a_message_is_one_line_of_bounded_length():
    (message,) = decode(json.dumps(["two\nlines\x1b[2J\ud800" + "x" * 10_000]).encode(), 1)
    assert message.startswith("two lines [2J x")
    assert (len(message), message[-1]) == (MAX_MESSAGE, "…")


# -- processes ---------------------------------------------------------------------------------------------------------


async def test_a_daemon_of_a_call_that_hangs_is_killed(lock):
    async with pool_of(attacks.leaves_behind, args={"lock": str(lock)}, timeout_s=2.0) as pool:
        (result,) = await scored(pool, "hang")
        assert result.error == "reward_timeout"
        assert nothing_is_left(lock)


async def test_a_daemon_of_a_worker_that_ends_is_killed(lock):
    async with pool_of(attacks.leaves_behind, args={"lock": str(lock)}, timeout_s=LONG_S) as pool:
        (result,) = await scored(pool, "end")
        assert result.error == "reward_error"
        assert "exit code 7" in result.message
        assert nothing_is_left(lock)


async def test_a_daemon_of_a_call_that_returns_lives_until_the_pool_closes(lock):
    async with pool_of(attacks.leaves_behind, args={"lock": str(lock)}) as pool:
        assert [r.error for r in await scored(pool, "return")] == [None]
        assert not nothing_is_left(lock)
    assert nothing_is_left(lock)


async def test_a_process_that_forks_and_ends_again_and_again_is_killed(lock):
    async with pool_of(attacks.forks_and_ends_again_and_again, args={"lock": str(lock)}, timeout_s=2.0) as pool:
        assert [r.error for r in await scored(pool, "")] == ["reward_timeout"]
        assert nothing_is_left(lock)


@pytest.mark.parametrize(
    "attack",
    [
        "kill its parent",
        pytest.param(
            "kill all above",
            marks=pytest.mark.skipif(landlock_version() < 6, reason="this kernel does not keep it from that"),
        ),
    ],
)
async def test_a_worker_that_kills_its_keepers_leaves_nothing(lock, attack):
    async with pool_of(attacks.leaves_behind, args={"lock": str(lock)}, timeout_s=LONG_S) as pool:
        (result,) = await scored(pool, attack)
        assert result.error is not None
        assert nothing_is_left(lock)
        assert [r.error for r in await scored(pool, "return")] == [None]


@pytest.mark.parametrize("victim", ["keeper", "stand-in", "worker"])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=lambda by: by.name)
async def test_nothing_is_left_when_one_of_them_is_killed_or_stopped(lock, monkeypatch, victim, by):
    monkeypatch.setattr(pool_module, "KILL_TIMEOUT_S", 3.0 if victim == "keeper" else LONG_S)
    async with pool_of(attacks.leaves_behind, args={"lock": str(lock)}) as pool:
        (result,) = await scored(pool, "return")
        stand_in = psutil.Process(int(result.metrics["parent"]))
        victims = {"worker": int(result.metrics["worker"]), "stand-in": stand_in.pid, "keeper": stand_in.ppid()}
        os.kill(victims[victim], by)
        if by == signal.SIGKILL:
            await everything_has_ended(lock)
            assert [r.error for r in await scored(pool, "return")] == [None]
    await everything_has_ended(lock)


def test_nothing_is_left_when_the_rollouter_is_killed(lock):
    script = (
        f"import asyncio; from {__name__} import *\n"
        "async def main():\n"
        "    options = {'args': {'lock': sys.argv[1]}, 'timeout_s': 600}\n"
        "    async with pool_of(attacks.announces_its_folder_and_hangs, **options) as pool: await scored(pool, '')\n"
        "asyncio.run(main())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", script, lock], stderr=subprocess.PIPE, env=environment) as rollouter:
        folder = Path(rollouter.stderr.readline().decode().strip())
        assert folder.is_dir()
        (keeper,) = psutil.Process(rollouter.pid).children()
        rollouter.kill()
    keeper.wait(LONG_S)
    assert nothing_is_left(lock)
    assert not folder.exists()


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_too_many_processes_are_killed(lock):
    async with pool_of(attacks.forks, args={"lock": str(lock)}, timeout_s=LONG_S) as pool:
        (result,) = await scored(pool, str(MAX_PROCESSES + 10))
        assert result.error == "reward_error"
        assert f"had more than {MAX_PROCESSES} processes" in result.message
        assert nothing_is_left(lock)


@pytest.mark.parametrize("where", ["itself", "children", "shared"])
async def test_too_much_memory_is_an_error_that_names_the_limit(lock, where):
    async with pool_of(attacks.allocates, args={"lock": str(lock)}, timeout_s=LONG_S, memory_mb=400) as pool:
        (result,) = await scored(pool, where)
        assert result.error == "reward_error"
        assert "reward.memory_mb = 400" in result.message
        assert where == "itself" or nothing_is_left(lock)  # a failed allocation does not end the worker


def test_memory_that_forks_share_counts_once():
    script = (
        "import os, signal; from asyncrl.rollouter.rewards.limits import *\n"
        "shared = b'x' * (100 * MIB)\n"
        "pids = [os.fork() or signal.pause() for _ in range(5)]\n"
        "print([Meter(Limits(memory_mb, 1), 0, '.').exceeded()[:4] for memory_mb in (200, 50)])\n"
        "for pid in pids: os.kill(pid, signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    found = subprocess.check_output([sys.executable, "-c", script], text=True, cwd="/proc/self/task", env=environment)
    assert found == "['', 'used']\n"


async def test_a_process_left_behind_has_a_bounded_cpu_time(lock, caplog):
    async with pool_of(attacks.leaves_a_spinner, args={"lock": str(lock)}, timeout_s=3.0) as pool:
        (before,) = await scored(pool, "spin")
        assert before.error is None
        await everything_has_ended(lock)
        await pool._workers[0]._keeper.wait()
        (after,) = await scored(pool, "rest")
        assert after.error is None
        assert after.metrics["worker"] != before.metrics["worker"]
    assert "used more CPU time with all that it started than reward.timeout_s allows" in caplog.text


@pytest.mark.parametrize(
    ("way", "complaint"),
    [
        ("file", "File too large"),
        ("files", "MiB of files in its folder, more than reward.file_mb = 1"),
        ("names", "had more than 10000 files in its folder"),
        ("nested", "had a folder that cannot be measured"),
    ],
)
async def test_too_many_or_too_large_files_are_an_error_and_are_removed(tmp_path, way, complaint):
    most = 16 if way == "nested" else 1  # folders take space, too: those that can be measured must fit
    async with pool_of(attacks.fills_its_folder, timeout_s=LONG_S, file_mb=most) as pool:
        (result,) = await scored(pool, f"{way} {tmp_path / 'folder'}")
        assert result.error == "reward_error"
        assert complaint in result.message
    assert not Path((tmp_path / "folder").read_text()).exists()


async def test_a_folder_closed_to_its_owner_is_removed(tmp_path):
    async with pool_of(attacks.fills_its_folder) as pool:
        assert [r.error for r in await scored(pool, f"closed {tmp_path / 'folder'}")] == [None]
    assert not Path((tmp_path / "folder").read_text()).exists()


async def test_output_is_passed_on_up_to_a_limit_per_call_and_never_blocks(capfd):
    async with pool_of(attacks.prints, timeout_s=LONG_S) as pool:
        assert [r.error for r in await scored(pool, "100")] == [None]
        printed = capfd.readouterr().err
        while printed.count("it begins") < 2:  # the rest of the first call's output may count as a second one's
            assert [r.error for r in await scored(pool, "0")] == [None]
            printed += capfd.readouterr().err
    assert "the rest of this call's output, beyond 65536 bytes, is discarded" in printed
    assert len(printed) < 200_000
