"""Reward functions in worker processes: however they misbehave, the pool answers and leaves no process behind.

The workers' functions come first; a worker imports them from this file.
"""

import asyncio
import contextlib
import functools
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from asyncrl.config.schema import RewardConfig
from asyncrl.plugins.registry import UnknownPart
from asyncrl.rollouter.rewards.base import Answer, prepare
from asyncrl.rollouter.rewards.pool import RewardError, RewardPool
from asyncrl.rollouter.rewards.weighted import Weighted, _Part
from asyncrl.types.trajectories import Trajectory, TrajectorySequence
from tests.support.rewards import PROMPT, import_problem, pool_of


def exact(prompt, response, scale=1.0):
    print("a reward may print")
    return {"reward": scale * (response == prompt.answer), "length": len(response)}


def plain_number(prompt, response):
    return int(response)


def reads_the_trajectory(prompt, response, trajectory, scale=1.0):
    tools = sum("tool_calls" in message for message in trajectory.messages)
    sampled = sum(sum(sequence.loss_mask) for sequence in trajectory.sequences)
    return {"reward": scale * (trajectory.reward + tools), "sampled": sampled, "length": len(response)}


def any_arguments(function):
    return functools.wraps(function)(lambda *args, **options: function(*args[:2]))


@any_arguments
def counted(prompt, response):
    return len(response)


async def slow_judge(prompt, response):
    await asyncio.sleep(0.4)
    return 1.0


UNUSABLE = {
    "nan": float("nan"),
    "text": "high",
    "none": None,
    "keys": {"score": 1.0},
    "metric": {"reward": 1, "x": []},
}


def misbehaves(prompt, response):
    """Misbehaves in the way that the response names."""
    if response == "hang":
        re.match(r"(a+)+$", "a" * 64 + "!")  # holds the interpreter practically forever
    if response == "die":
        os._exit(7)
    if response == "raise":
        raise KeyError("no such unit")
    return UNUSABLE.get(response, 1.0)


_tried: set[str] = set()


def fails_at_first(prompt, response):
    if response not in _tried:
        _tried.add(response)
        raise ConnectionError("busy")
    return 1.0


def process_ids(prompt, response):
    child = subprocess.Popen(["sleep", "600"])
    return {"reward": 0.0, "worker": os.getpid(), "child": child.pid}


def loaded_torch(prompt, response):
    return float("torch" in sys.modules or "ray" in sys.modules)


def announce_and_hang(prompt, response):
    print(os.getpid(), flush=True)
    re.match(r"(a+)+$", "a" * 64 + "!")


def has_ended(pid: int, timeout_s: float = 60.0) -> bool:
    """Wait for the end of any process, not necessarily a child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


async def test_a_function_may_take_the_whole_trajectory():
    sequences = [TrajectorySequence("a", [1, 2], [True, False]), TrajectorySequence("bc", [3], [True])]
    messages = [{"role": "assistant", "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "42"}]
    trajectory = Trajectory(sequences, messages, "turns", reward=2.0)
    async with pool_of(reads_the_trajectory, args={"scale": 2.0}) as pool:
        assert pool.takes_trajectories
        (result,) = await pool.score([Answer(PROMPT, "bc", trajectory)])
        assert (result.reward, result.metrics) == (6.0, {"sampled": 2.0, "length": 2.0})
    async with pool_of(plain_number) as pool:
        assert not pool.takes_trajectories


async def test_without_a_function_there_is_no_worker():
    pool = RewardPool(RewardConfig(function="none"))
    await pool.start()
    assert (await pool.score([]), pool.takes_trajectories) == ([], False)
    await pool.close()


async def test_results_come_in_order_with_their_metrics():
    async with pool_of(exact, args={"scale": 0.5}) as pool:
        results = await pool.score([Answer(PROMPT, "42"), Answer(PROMPT, "410"), Answer(PROMPT, "42")])
    assert [r.reward for r in results] == [0.5, 0.0, 0.5]
    assert [r.metrics for r in results] == [{"length": 2.0}, {"length": 3.0}, {"length": 2.0}]
    assert all(r.error is None for r in results)


async def test_a_plain_number_is_a_reward():
    async with pool_of(plain_number) as pool:
        assert [(r.reward, r.metrics) for r in await pool.score([Answer(PROMPT, "3")])] == [(3.0, {})]
        assert await pool.score([]) == []


async def test_async_rewards_of_a_group_run_concurrently():
    async with pool_of(slow_judge, timeout_s=2.0) as pool:
        results = await pool.score([Answer(PROMPT, str(i)) for i in range(16)])  # 6.4 s one after another
    assert [r.error for r in results] == [None] * 16


async def test_a_hanging_reward_is_killed_at_its_limit_and_fails_only_its_own_sample():
    async with pool_of(misbehaves, timeout_s=3.0, workers=2) as pool:
        start = time.monotonic()
        results = await pool.score([Answer(PROMPT, "fine"), Answer(PROMPT, "hang"), Answer(PROMPT, "fine")])
        assert time.monotonic() - start < 30  # two limits and two new workers, on a busy machine
        assert [r.error for r in results] == [None, "reward_timeout", None]
        assert "misbehaves" in results[1].message
        assert "3 s" in results[1].message
        assert [r.reward for r in await pool.score([Answer(PROMPT, "fine")])] == [1.0]


async def test_a_reward_that_ends_its_process_fails_only_its_own_sample():
    async with pool_of(misbehaves) as pool:
        results = await pool.score([Answer(PROMPT, "fine"), Answer(PROMPT, "die"), Answer(PROMPT, "fine")])
        assert [r.error for r in results] == [None, "reward_error", None]
        assert "exit code 7" in results[1].message
        assert [r.reward for r in await pool.score([Answer(PROMPT, "fine")])] == [1.0]


async def test_a_reward_that_raises_is_retried_once():
    async with pool_of(fails_at_first) as pool:
        assert [r.reward for r in await pool.score([Answer(PROMPT, "a"), Answer(PROMPT, "b")])] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        ("raise", "KeyError: 'no such unit'"),
        ("nan", "expected a finite number"),
        ("text", "'high' (str), expected a number"),
        ("none", "None (NoneType), expected a number"),
        ("keys", "without 'reward'"),
        ("metric", "'x' = [] (list), expected a number"),
    ],
)
async def test_an_unusable_reward_is_an_error_that_names_function_and_prompt(response, complaint):
    async with pool_of(misbehaves) as pool:
        good, bad = await pool.score([Answer(PROMPT, "fine"), Answer(PROMPT, response)])
    assert (good.error, bad.error) == (None, "reward_error")
    assert complaint in bad.message
    assert f"{__name__}:misbehaves on prompt row" in bad.message


async def test_groups_are_scored_by_several_workers_at_once():
    async with pool_of(process_ids, workers=2) as pool:
        groups = await asyncio.gather(*(pool.score([Answer(PROMPT, "")]) for _ in range(2)))
    assert len({results[0].metrics["worker"] for results in groups}) == 2


async def test_a_cancelled_call_leaves_no_reply_for_the_next_one():
    async with pool_of(slow_judge) as pool:
        call = asyncio.create_task(pool.score([Answer(PROMPT, "x")]))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(await pool.score([Answer(PROMPT, "x"), Answer(PROMPT, "y")])) == 2


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no_such_package.module:f", "No module named 'no_such_package'"),
        (f"{__name__}:no_such_function", "no_such_function"),
        (f"{__name__}:PROMPT", "reward.function: expected a function, found Prompt"),
        (
            "no_colon",
            "reward.function: expected one of arithmetic, ",
        ),
    ],
)
async def test_a_function_that_cannot_be_imported_fails_at_start(path, complaint):
    with pytest.raises(RewardError, match=re.escape(complaint)):
        await RewardPool(RewardConfig(function=path, workers=2)).start()


async def test_scoring_outside_start_and_close_is_refused():
    pool = RewardPool(RewardConfig(function=f"{__name__}:exact"))
    with pytest.raises(RewardError, match="not open"):
        await pool.score([Answer(PROMPT, "42")])


async def test_close_leaves_neither_workers_nor_their_children():
    async with pool_of(process_ids) as pool:
        (result,) = await pool.score([Answer(PROMPT, "")])
    assert has_ended(int(result.metrics["worker"]))
    assert has_ended(int(result.metrics["child"]))


async def test_close_fails_a_pending_call():
    async with pool_of(misbehaves) as pool:
        call = asyncio.create_task(pool.score([Answer(PROMPT, "hang")]))
        await asyncio.sleep(0.1)
    with pytest.raises(RewardError, match="not open"):
        await call


def test_a_worker_in_a_hanging_call_dies_with_its_parent():
    script = (
        f"import asyncio; from {__name__} import *\n"
        "async def main():\n"
        "    async with pool_of(announce_and_hang, timeout_s=600) as pool: await pool.score([Answer(PROMPT, '')])\n"
        "asyncio.run(main())"
    )
    path = os.pathsep.join(filter(None, sys.path))
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    )
    assert parent.stderr is not None
    worker = int(parent.stderr.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert has_ended(worker)
    parent.stderr.close()


async def test_workers_are_light():
    async with pool_of(loaded_torch) as pool:
        assert [r.reward for r in await pool.score([Answer(PROMPT, "")])] == [0.0]


def of_length(prompt, response, target):
    return {"reward": float(len(response) == target), "length": float(len(response))}


async def of_trajectory(prompt, response, trajectory):
    return {"reward": float(len(trajectory.sequences)), "length": 7.0}


@pytest.mark.parametrize(
    ("function", "args", "problem"),
    [
        (exact, {"scales": 2.0}, "reward.args: got an unexpected keyword argument 'scales'"),
        (of_length, {}, "reward.args: missing a required argument: 'target'"),
        (reads_the_trajectory, {"scale": 2.0}, ""),
        (counted, {"anything": 1}, ""),  # its decorator takes it
    ],
)
def test_arguments_that_a_function_does_not_take_are_refused_before_a_run(function, args, problem):
    with pytest.raises(UnknownPart, match=f"^{problem}$") if problem else contextlib.nullcontext():
        prepare(function, args, 10.0)


def weighted(**functions):
    described = {
        name: {"function": f"tests.test_rewards_pool:{value.pop('of')}", **value} for name, value in functions.items()
    }
    return RewardConfig(function="weighted", args={"functions": described}, workers=1)


async def test_several_functions_are_summed_with_weights():
    parts = {"exact": {"of": "of_length", "args": {"target": 2}}, "turns": {"of": "of_trajectory", "weight": 0.25}}
    pool = RewardPool(weighted(**parts))
    await pool.start()
    try:
        assert pool.takes_trajectories
        trajectory = Trajectory([TrajectorySequence("a"), TrajectorySequence("ab")])
        (result,) = await pool.score([Answer(PROMPT, "ab", trajectory)])
    finally:
        await pool.close()
    assert (result.error, result.reward) == (None, 1.5)
    expected = {"reward_exact": 1.0, "length": 2.0, "reward_turns": 2.0, "turns/length": 7.0}
    assert result.metrics == expected


async def test_no_part_of_a_sum_goes_on_after_another_has_failed():
    ended = []

    async def slow(prompt, response):
        await asyncio.sleep(0.05)
        ended.append(response)
        return 1.0

    async def fails(prompt, response):
        raise ValueError("the judge refuses")

    of = Weighted()
    of._parts = {"fails": _Part(fails, 1.0, {}), "slow": _Part(slow, 1.0, {})}
    with pytest.raises(ValueError, match="the judge refuses"):
        await of(PROMPT, "ab", {})
    assert ended == ["ab"]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({}, "reward.args.functions: expected name: {function: …, weight: …}, found None"),
        ({"functions": {"a": {"weight": 1}}}, "reward.args.functions.a: expected function, and perhaps weight"),
        ({"functions": {"a": {"function": "nowhere:f"}}}, "reward.args.functions.a: reward.function: "),
        (
            {"functions": {"a": {"function": "arithmetic", "weight": "much"}}},
            "a.weight: expected a number, found 'much'",
        ),
        (
            {"functions": {"a": {"function": "exact_match", "args": {"pattern": "("}}}},
            "reward.args.functions.a: reward.args.pattern: expected a regular expression, found '('",
        ),
        ({"functions": {"a": {"function": "weighted"}}}, "reward.args.functions.a: a weighted sum has no sums in it"),
        ({"functions": {"a": {"function": "arithmetic", "args": {"format_share": "${secret:ABSENT}"}}}}, None),
    ],
)
def test_functions_that_cannot_be_summed_are_refused_before_a_run(args, problem):
    found = import_problem(RewardConfig(function="weighted", args=args))
    assert (found is None) == (problem is None)
    assert problem is None or problem in found
