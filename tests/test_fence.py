"""The fence before a real engine: one owner at a time, and nothing of an earlier one reaches the next."""

import asyncio

import numpy as np
import pytest

from asyncrl.config.schema import EngineConfig
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.rollouter.engine import EngineError, Request, SamplingParams
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.fence import Fence
from asyncrl.sample import FinishReason, PolicyVersion


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


async def test_a_new_owner_finds_an_empty_engine_and_hears_only_of_its_own(engine):
    fence = Fence(engine)
    await fence.attach("first")
    await fence.submit("first", [request(str(i), 200) for i in range(6)])  # more than there are slots
    assert len(await fence.events("first")) > 0
    pending = asyncio.create_task(fence.events("first"))
    await asyncio.sleep(0)
    await asyncio.wait_for(fence.attach("second"), 30)
    with pytest.raises(EngineError, match="serves second, not first"):
        await pending
    stats = await engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)

    await fence.submit("second", [request("0", 3)])  # an id that the first had used too
    batch = await asyncio.wait_for(fence.events("second"), 30)
    assert batch.ids == ["0"]
    assert (len(batch.tokens), batch.finish) == (3, [FinishReason.LENGTH])


async def test_a_new_owner_finds_no_width(engine):
    fence = Fence(engine)
    await fence.attach("first")
    await fence.set_width("first", 1)
    await fence.submit("first", [request(str(i), 200) for i in range(3)])
    assert (await engine.stats()).running <= 1
    await fence.attach("second")
    await fence.submit("second", [request(str(i), 200) for i in range(3)])
    assert len(set((await fence.events("second")).ids)) == 3
    with pytest.raises(EngineError, match="serves second, not first"):
        await fence.set_width("first", 1)


async def test_who_is_not_the_owner_is_refused(engine):
    fence = Fence(engine)
    with pytest.raises(EngineError, match="serves nobody yet, not first: attach first"):
        await fence.submit("first", [request("0", 3)])
    await fence.attach("first")
    await fence.attach("second")
    for call in (fence.submit("first", [request("0", 3)]), fence.events("first"), fence.abort("first", ["0"])):
        with pytest.raises(EngineError, match="serves second, not first"):
            await call
    assert (await engine.stats()).running == 0


async def test_a_paused_engine_is_taken_over_too(engine):
    fence = Fence(engine)
    await fence.attach("first")
    await engine.pause("keep", 10)
    await fence.submit("first", [request("0", 50)])
    await asyncio.wait_for(fence.attach("second"), 30)
    stats = await engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


async def test_a_caller_that_gives_up_waiting_loses_no_event(engine):
    fence = Fence(engine)
    await fence.attach("first")
    waiting = asyncio.create_task(fence.events("first"))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await fence.submit("first", [request("0", 3)])
    assert (await asyncio.wait_for(fence.events("first"), 30)).ids == ["0"]


async def test_an_engine_that_is_over_says_so_to_a_new_owner(engine):
    fence = Fence(engine)
    await fence.attach("first")
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await fence.attach("second")
