"""Lease of a real engine: one holder at a time, and nothing of an earlier holder reaches the next."""

import asyncio

import numpy as np
import pytest

from asyncrl.config.schema import EngineConfig
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.rollouter.engine_lease import EngineLease, LeasedEngine
from asyncrl.rollouter.engines.base import EngineError, Request, SamplingParams, Scheduling
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    make_checkpoint(folder, seed=0, warm_start_steps=0)
    return folder


@pytest.fixture
async def engine(checkpoint):
    engine = NativeEngine(checkpoint, EngineConfig(slots=4, max_context_tokens=256))
    await engine.resume(PolicyVersion(0, 0))
    yield engine
    await engine.close()


@pytest.fixture
def lease(engine):
    return EngineLease(engine)


@pytest.fixture
def first(lease):
    return LeasedEngine(lease, 1)


@pytest.fixture
def second(lease):
    """A rollouter that was started later."""
    return LeasedEngine(lease, 2)


def request(id: str, tokens: int) -> Request:
    return Request(id, "g", np.array([5, 6, 7], np.int32), 3, 1, 0, tokens, SamplingParams())


async def test_a_new_holder_finds_an_empty_engine_and_gets_only_its_own_events(engine, first, second):
    await first.attach()
    await first.submit([request(str(i), 200) for i in range(6)])  # more than slots
    assert len(await first.events()) > 0
    pending = asyncio.create_task(first.events())
    await asyncio.sleep(0)
    await asyncio.wait_for(second.attach(), 30)
    with pytest.raises(EngineError, match="found token 1; the engine is held under token 2"):
        await pending
    assert engine._core.active == 0

    await second.submit([request("0", 3)])  # an id that the first holder used too
    batches = []
    while not batches or batches[-1].finish == [None]:  # on a busy machine tokens arrive one by one
        batches.append(await asyncio.wait_for(second.events(), 30))
        assert batches[-1].ids == ["0"]
    assert sum(len(batch.tokens) for batch in batches) == 3
    assert batches[-1].finish == [FinishReason.LENGTH]


async def test_a_new_holder_finds_the_default_scheduling(engine, first, second):
    await first.attach()
    await first.set_scheduling(Scheduling(max_running_requests=1))
    await first.submit([request(str(i), 200) for i in range(3)])
    assert engine._core.running <= 1
    await second.attach()
    await second.submit([request(str(i), 200) for i in range(3)])
    assert len(set((await second.events()).ids)) == 3
    with pytest.raises(EngineError, match="found token 1; the engine is held under token 2"):
        await first.set_scheduling(Scheduling(max_running_requests=1))


async def test_calls_without_the_lease_are_refused(engine, first, second):
    with pytest.raises(EngineError, match="found token 1; the engine is held by nobody yet: attach first"):
        await first.submit([request("0", 3)])
    await first.attach()
    await second.attach()
    for call in (first.submit([request("0", 3)]), first.events(), first.abort(["0"])):
        with pytest.raises(EngineError, match="found token 1; the engine is held under token 2"):
            await call
    assert engine._core.running == 0


async def test_a_stale_rollouter_cannot_take_the_lease_back(engine, first, second):
    await second.attach()
    await second.submit([request("0", 3)])
    with pytest.raises(EngineError, match="found token 1; the engine is held under token 2"):
        await first.attach()  # a call that was in flight when its rollouter was replaced
    assert (await asyncio.wait_for(second.events(), 30)).ids == ["0"]


async def test_a_paused_engine_can_be_taken_over(engine, first, second):
    await first.attach()
    await engine.pause("keep", 10)
    await first.submit([request("0", 50)])
    await asyncio.wait_for(second.attach(), 30)
    assert engine._core.active == 0


async def test_a_cancelled_wait_for_events_loses_none(engine, first, second):
    await first.attach()
    waiting = asyncio.create_task(first.events())
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await first.submit([request("0", 3)])
    assert (await asyncio.wait_for(first.events(), 30)).ids == ["0"]


async def test_a_request_that_ends_before_its_submission_returns_does_not_block_the_next_holder(
    engine, first, second, monkeypatch
):
    await first.attach()
    submit, ended = engine.submit, asyncio.Event()

    async def submit_slowly(requests):
        await submit(requests)
        await ended.wait()

    monkeypatch.setattr(engine, "submit", submit_slowly)
    submitting = asyncio.create_task(first.submit([request("0", 3)]))
    finish = None
    while finish is None:
        finish = (await asyncio.wait_for(first.events(), 30)).finish[-1]
    ended.set()
    await submitting
    await asyncio.wait_for(second.attach(), 5)


async def test_attaching_to_a_closed_engine_raises(engine, first, second):
    await first.attach()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await second.attach()


async def test_a_call_that_comes_twice_does_its_work_once(engine, lease, monkeypatch):
    await lease.attach(1, 0)
    asked = request("0", 3)
    for _ in range(2):
        await lease.submit(1, 0, [asked])
    found = [(await asyncio.wait_for(lease.events(1, 0), 30)).ids for _ in range(2)]
    assert found == [["0"]] * 2  # the same batch
    number = 1
    while "0" in lease._unfinished:
        await asyncio.wait_for(lease.events(1, number), 30)
        number += 1
    await lease.submit(1, 0, [asked])  # late, when it has ended
    assert engine._core.active == 0
    set_scheduling = engine.set_scheduling
    applied = []

    async def apply(scheduling):
        applied.append(scheduling.max_running_requests)
        await set_scheduling(scheduling)

    monkeypatch.setattr(engine, "set_scheduling", apply)
    await lease.set_scheduling(1, 2, Scheduling(max_running_requests=2))
    await lease.set_scheduling(1, 1, Scheduling(max_running_requests=1))  # the one before, late
    assert applied == [2]


async def test_two_calls_for_a_batch_that_wait_get_the_same_one(lease):
    await lease.attach(1, 0)
    waiting = [asyncio.create_task(lease.events(1, 0)) for _ in range(2)]
    await asyncio.sleep(0)
    await lease.submit(1, 0, [request("0", 3)])
    found = await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert found[0] is found[1]


async def test_a_batch_that_was_passed_is_refused(lease):
    await lease.attach(1, 0)
    await lease.submit(1, 0, [request("0", 200)])
    for number in range(2):
        await asyncio.wait_for(lease.events(1, number), 30)
    for number in (0, 3):
        with pytest.raises(EngineError, match=f"expected a call for batch 2, or again the one before; found {number}"):
            await lease.events(1, number)


async def test_a_late_command_of_an_earlier_client_with_the_same_token_does_nothing(engine, lease, first):
    await first.attach()
    again = LeasedEngine(lease, 1)
    pending = asyncio.create_task(first.events())
    await asyncio.sleep(0)
    await again.attach()
    with pytest.raises(EngineError, match="attached again meanwhile"):
        await pending
    await first.submit([request("0", 200)])  # through a relay that was slow
    assert engine._core.active == 0
    await again.submit([request("1", 3)])
    assert (await asyncio.wait_for(again.events(), 30)).ids == ["1"]
