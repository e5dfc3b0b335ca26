"""The rollouter actor's calls, on the class inside the Ray actor: run, reset, validate and alive."""

import asyncio
import contextlib
from fractions import Fraction

import pytest

from asyncrl.config.checks import derive
from asyncrl.config.load import load_config
from asyncrl.models.config import ModelConfig
from asyncrl.rollouter.actors import RollouterActor
from asyncrl.rollouter.engine_lease import EngineLease, LeasedEngine
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.sample_queue.group_state import QueueError
from asyncrl.sample_queue.messages import Holder
from asyncrl.simulation.records import InMemoryRecords
from asyncrl.types.versions import PolicyVersion
from tests.support.scripted import ScriptedReplica
from tests.support.tiny import overrides

PROMPTS = 25
EPOCH = ("data.epochs=1", "async_training.staleness_threshold=50", "rollout.pacing=true")


@contextlib.asynccontextmanager
async def rollouter(inputs, monkeypatch, replica=None):
    """A started rollouter and its queue, in this process. Without ``replica`` it has a real engine."""
    monkeypatch.setattr("asyncrl.rollouter.actors.never_interrupt", lambda: None)
    config = load_config(None, [*overrides(inputs, inputs / "run"), *EPOCH])
    derived, engine = derive(config), None
    if replica is None:
        engine = NativeEngine(config.model.path, config.rollout.engine)
        await engine.resume(PolicyVersion(0, 0))
        replica = LeasedEngine(EngineLease(engine), 1)
    queue = SampleQueue(
        Admission(derived.groups_per_version, Fraction(50), 100),
        InMemoryRecords(),
        vocab_size=ModelConfig.load(config.model.path).vocab_size,
    )
    actor = RollouterActor.__ray_metadata__.modified_class(
        config, "rollouter", PromptTokenizer.of(config), 40, None, {}, Holder(token=1)
    )
    actor._queue, actor._replicas = queue, {"replica": replica}
    await actor.start()
    try:
        yield actor, queue
    finally:
        actor._serving.cancel()
        await asyncio.wait([actor._serving])
        await actor.close()
        if engine is not None:
            await engine.close()


@contextlib.asynccontextmanager
async def running(actor):
    """Runs the actor's `run` in the background, and checks that it does not end by itself."""
    task = asyncio.create_task(actor.run())
    yield
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


async def test_validation_is_served_after_the_prompts_ended(inputs, monkeypatch):
    async with rollouter(inputs, monkeypatch) as (actor, queue), running(actor):
        await queue.publish(PolicyVersion(0, 0))
        assert (await lease(queue, 1)).closed == "the prompts ended"
        assert (await asyncio.wait_for(actor.validate(), 60)).samples == 6


async def test_a_queue_that_a_rollback_reopened_is_closed_again(inputs, monkeypatch):
    """Otherwise the trainer would wait forever for groups of prompts that ended."""
    async with rollouter(inputs, monkeypatch) as (actor, queue), running(actor):
        await queue.publish(PolicyVersion(0, 0))
        assert (await lease(queue, 1)).closed == "the prompts ended"
        await queue.rollback(0)
        await actor.reset()
        await queue.publish(PolicyVersion(1, 0), 0)
        assert (await lease(queue, 1)).closed == "the prompts ended"
        assert queue.balance()["queued"] == PROMPTS


async def lease(queue, step):
    """The answer to a lease of more groups than there will be."""
    lease, _ = await asyncio.wait_for(queue.lease(step, PROMPTS + 1), 120)
    return lease


async def test_a_reset_does_not_wait_for_an_agent_loop_that_ignores_its_cancellation(inputs, monkeypatch):
    async def stubborn():
        while not ended:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    ended: list[int] = []
    monkeypatch.setattr("asyncrl.rollouter.actors._UNWINDING_S", 0.1)
    monkeypatch.setattr("os._exit", ended.append)
    async with rollouter(inputs, monkeypatch) as (actor, queue), running(actor):
        await queue.publish(PolicyVersion(0, 0))
        await lease(queue, 1)
        rolling_out, actor._rolling_out = actor._rolling_out, asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        await actor.reset()
        assert ended == [1]
        for task in (rolling_out, actor._rolling_out):
            task.cancel()
        await asyncio.wait([rolling_out, actor._rolling_out])
        actor._rolling_out = None


class Outliving:
    """A queue whose calls outlive their cancelled callers, as those of another process do."""

    def __init__(self, queue) -> None:
        self._queue, self.calls = queue, []

    def __getattr__(self, name):
        async def call(*args):
            self.calls.append((name, task := asyncio.ensure_future(getattr(self._queue, name)(*args))))
            return await asyncio.shield(task)

        return call


async def test_a_call_that_a_reset_leaves_at_the_queue_starts_nothing(inputs, monkeypatch):
    async with rollouter(inputs, monkeypatch) as (actor, queue):
        actor._queue = outliving = Outliving(queue)
        async with running(actor):
            issued = lambda: [task for name, task in outliving.calls if name == "issue"]
            while not issued():
                await asyncio.sleep(0.01)
            (left,) = issued()
            await actor.reset()
            while len(issued()) < 2:
                await asyncio.sleep(0.01)
            await queue.publish(PolicyVersion(0, 0))
            with pytest.raises(QueueError, match="had taken over"):
                await left
            assert (await lease(queue, 1)).closed == "the prompts ended"
            balance = queue.balance()
            assert (balance["issued"], balance["in_flight"]) == (PROMPTS, 0)


async def test_run_survives_a_reset_without_losing_a_group(inputs, monkeypatch):
    async with rollouter(inputs, monkeypatch) as (actor, queue), running(actor):
        await queue.publish(PolicyVersion(0, 0))
        async with asyncio.timeout(60):
            while queue.balance()["queued"] < 2:
                await asyncio.sleep(0.005)
        before = actor._loop
        await actor.reset()
        assert (await lease(queue, 1)).closed == "the prompts ended"
        assert actor._loop is not before
        assert queue.balance()["queued"] == PROMPTS


async def test_a_replica_that_answers_with_errors_is_reported(inputs, monkeypatch):
    replica = ScriptedReplica()
    async with rollouter(inputs, monkeypatch, replica) as (actor, _):
        replica.die(ValueError("out of memory"))
        async with asyncio.timeout(30):
            while not (unfit := await actor.unfit(None)):
                await asyncio.sleep(0.01)
        assert list(unfit.values()) == ["answers with errors (ValueError: out of memory)"]
