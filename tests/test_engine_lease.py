"""Lease of a real engine: one holder at a time, and nothing of an earlier holder reaches the next."""

import asyncio

import numpy as np
import pytest

from asyncrl.config.schema import EngineConfig
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.rollouter.engine_lease import EngineLease
from asyncrl.rollouter.engines.base import EngineError, Request, SamplingParams, Scheduling
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

FIRST, SECOND = 1, 2  # fencing tokens of two rollouters


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


def request(id: str, tokens: int) -> Request:
    return Request(id, "g", np.array([5, 6, 7], np.int32), 3, 1, 0, tokens, SamplingParams())


async def test_a_new_holder_finds_an_empty_engine_and_gets_only_its_own_events(engine):
    lease = EngineLease(engine)
    await lease.attach(FIRST)
    await lease.submit(FIRST, [request(str(i), 200) for i in range(6)])  # more than slots
    assert len(await lease.events(FIRST)) > 0
    pending = asyncio.create_task(lease.events(FIRST))
    await asyncio.sleep(0)
    await asyncio.wait_for(lease.attach(SECOND), 30)
    with pytest.raises(EngineError, match="found token 1; the engine is held under token 2"):
        await pending
    assert engine._core.active == 0

    await lease.submit(SECOND, [request("0", 3)])  # an id that the first holder used too
    batches = []
    while not batches or batches[-1].finish == [None]:  # on a busy machine tokens arrive one by one
        batches.append(await asyncio.wait_for(lease.events(SECOND), 30))
        assert batches[-1].ids == ["0"]
    assert sum(len(batch.tokens) for batch in batches) == 3
    assert batches[-1].finish == [FinishReason.LENGTH]


async def test_a_new_holder_finds_the_default_scheduling(engine):
    lease = EngineLease(engine)
    await lease.attach(FIRST)
    await lease.set_scheduling(FIRST, Scheduling(max_running_requests=1))
    await lease.submit(FIRST, [request(str(i), 200) for i in range(3)])
    assert engine._core.running <= 1
    await lease.attach(SECOND)
    await lease.submit(SECOND, [request(str(i), 200) for i in range(3)])
    assert len(set((await lease.events(SECOND)).ids)) == 3
    with pytest.raises(EngineError, match="found token 1; the engine is held under token 2"):
        await lease.set_scheduling(FIRST, Scheduling(max_running_requests=1))


async def test_calls_without_the_lease_are_refused(engine):
    lease = EngineLease(engine)
    with pytest.raises(EngineError, match="found token 1; the engine is held by nobody yet: attach first"):
        await lease.submit(FIRST, [request("0", 3)])
    await lease.attach(FIRST)
    await lease.attach(SECOND)
    for call in (lease.submit(FIRST, [request("0", 3)]), lease.events(FIRST), lease.abort(FIRST, ["0"])):
        with pytest.raises(EngineError, match="found token 1; the engine is held under token 2"):
            await call
    assert engine._core.running == 0


async def test_a_stale_rollouter_cannot_take_the_lease_back(engine):
    lease = EngineLease(engine)
    await lease.attach(SECOND)
    await lease.submit(SECOND, [request("0", 3)])
    with pytest.raises(EngineError, match="found token 1; the engine is held under token 2"):
        await lease.attach(FIRST)  # a call that was in flight when its rollouter was replaced
    assert (await asyncio.wait_for(lease.events(SECOND), 30)).ids == ["0"]


async def test_a_paused_engine_can_be_taken_over(engine):
    lease = EngineLease(engine)
    await lease.attach(FIRST)
    await engine.pause("keep", 10)
    await lease.submit(FIRST, [request("0", 50)])
    await asyncio.wait_for(lease.attach(SECOND), 30)
    assert engine._core.active == 0


async def test_a_cancelled_wait_for_events_loses_none(engine):
    lease = EngineLease(engine)
    await lease.attach(FIRST)
    waiting = asyncio.create_task(lease.events(FIRST))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await lease.submit(FIRST, [request("0", 3)])
    assert (await asyncio.wait_for(lease.events(FIRST), 30)).ids == ["0"]


async def test_a_request_that_ends_before_its_submission_returns_does_not_block_the_next_holder(engine, monkeypatch):
    lease = EngineLease(engine)
    await lease.attach(FIRST)
    submit, ended = engine.submit, asyncio.Event()

    async def submit_slowly(requests):
        await submit(requests)
        await ended.wait()

    monkeypatch.setattr(engine, "submit", submit_slowly)
    submitting = asyncio.create_task(lease.submit(FIRST, [request("0", 3)]))
    finish = None
    while finish is None:
        finish = (await asyncio.wait_for(lease.events(FIRST), 30)).finish[-1]
    ended.set()
    await submitting
    await asyncio.wait_for(lease.attach(SECOND), 5)


async def test_attaching_to_a_closed_engine_raises(engine):
    lease = EngineLease(engine)
    await lease.attach(FIRST)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await lease.attach(SECOND)
