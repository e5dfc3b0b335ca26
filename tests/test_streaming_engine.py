"""Ends of requests that another process generates, whatever that process reports and whenever they are aborted."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.config.schema import Config, EngineConfig, ModelConfig, RolloutConfig
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engines.base import Scheduling
from asyncrl.rollouter.engines.streaming import FINISH, StreamedRequest, StreamingEngine
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion
from tests.support.engine_replica import add, request

STOP = 7
DRAWN = [3, 4, 5, 6, STOP, 8, 9, 10]  # by an engine that ignores stop tokens
VERSION = PolicyVersion(0, 1)


class Scripted(StreamingEngine[StreamedRequest]):
    """Reports scripted pieces of tokens for each request, then its finish reason; notes whether to abort it."""

    title = "script"
    request_type = StreamedRequest

    def __init__(self, config, pieces, finish):
        super().__init__(config, "cpu", Recorder("replica/0"), 1024, 4096, None)
        self._pieces, self._finish = pieces, finish
        self.aborted = False

    async def _stream(self, running):
        reported = 0
        for i, piece in enumerate(self._pieces):
            reported += len(piece)
            last = i == len(self._pieces) - 1
            finish = FINISH.get(self._finish, FinishReason.ERROR) if last else None
            spans = [(str(VERSION), reported)] if last else []
            over = self._received(running, piece, [-0.5] * len(piece), finish, spans, "why" if last else "")
            self.aborted |= bool(over)

    async def _done(self, *args):
        pass

    _abort = _stop = _continue = _set_version = _release_kv = _restore_kv = _flush_kv = _free_bytes = _done


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return Config(name="test", model=ModelConfig(path=str(make_checkpoint(tmp_path_factory.mktemp("m"), 0, 0))))


async def answered(config, pieces, finish, **options):
    engine, answers, ends = Scripted(config, pieces, finish), {}, 0
    await engine.resume(VERSION)
    await engine.submit([request("r", [1, 2], 100, **options)])
    while not ends:
        batch = await engine.events()
        add(answers, batch)
        ends += sum(f is not None for f in batch.finish)
    assert ends == 1
    assert engine.paused is False
    return answers["r"], engine


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("finish", ["abort", "stop", "length"])
async def test_nothing_follows_a_stop_token_and_a_request_that_ends_in_one_has_stopped(config, size, finish):
    """Whatever the size of the engine's reports, and whether it ends before, at or beyond the stop token."""
    for end in range(1, len(DRAWN) + 1):
        pieces = [DRAWN[i : min(i + size, end)] for i in range(0, end, size)]
        answer, engine = await answered(config, pieces, finish, stop_token_ids=(STOP,))
        own = DRAWN[: min(end, DRAWN.index(STOP) + 1)]
        assert answer.tokens == own
        assert len(answer.logprobs) == len(own)
        assert answer.finish is (FinishReason.STOP if own[-1] == STOP else FINISH[finish])
        assert engine.aborted == (sum(map(len, pieces[:-1])) > DRAWN.index(STOP))  # unless it ends by itself
        assert engine._recorder.drain().counters["rollout/tokens"] == len(own)


async def test_an_error_at_a_stop_token_counts_but_not_after_it(config):
    answer, _ = await answered(config, [[3], [STOP]], "error", stop_token_ids=(STOP,))
    assert (answer.finish, answer.error) == (FinishReason.ERROR, "why")
    answer, _ = await answered(config, [[3, STOP], [4]], "error", stop_token_ids=(STOP,))
    assert (answer.finish, answer.tokens, answer.error) == (FinishReason.STOP, [3, STOP], "")


class Unabortable(Scripted):
    """Fails as soon as a request is over: when it is to be aborted, or after the engine ended it."""

    def _received(self, running, *args):
        over = super()._received(running, *args)
        if over or running.request.id not in self._running:
            raise RuntimeError("refused")
        return over


@pytest.mark.parametrize(
    ("pieces", "finish"), [([[3, STOP], [4]], FinishReason.STOP), ([[3], [4]], FinishReason.LENGTH)]
)
async def test_a_request_that_is_over_has_one_end_even_if_the_engine_fails_then(config, pieces, finish):
    engine = Unabortable(config, pieces, "length")
    await engine.resume(VERSION)
    await engine.submit([request("r", [1, 2], 100, stop_token_ids=(STOP,))])
    batch = await engine.events()
    assert batch.tokens.tolist() == pieces[0][:2] + ([] if finish is FinishReason.STOP else pieces[1])
    assert [f for f in batch.finish if f is not None] == [finish]
    assert not engine._running
    assert engine._recorder.drain().counters["rollout/tokens"] == 2


class Gated(Scripted):
    """Generates until the test opens a request's gate; ``begun``: requests in the order in which they arrived."""

    def __init__(self, config):
        super().__init__(config, [[3]], "length")
        self.begun, self.gates = [], {}

    def request_type(self, request, version, slot):
        self.begun.append(request.id)
        self.gates[request.id] = asyncio.Event()
        return StreamedRequest(request, version, slot)

    async def _stream(self, running):
        await self.gates[running.request.id].wait()
        await super()._stream(running)

    async def end(self, id):
        self.gates[id].set()
        while id in self._running:
            await asyncio.sleep(0)


async def test_training_is_held_back_while_validation_waits_in_the_engine_and_comes_first(config):
    """The engine itself would serve training first. Its two slots always have a request."""
    engine = Gated(Config(name="test", model=config.model, rollout=RolloutConfig(engine=EngineConfig(slots=2))))
    training = [request(f"t{i}", [1, 2], 100) for i in range(7)]
    v0, v1 = (request(id, [1, 2], 100)._replace(priority=1) for id in ("v0", "v1"))
    await engine.resume(VERSION)
    await engine.submit([*training[:2], v0])
    await engine.set_scheduling(Scheduling(validation_first=True))
    await engine.submit([*training[2:], v1])
    assert engine.begun == ["t0", "t1", "v0", "v1"]
    await engine.end("t0")
    await engine.end("t1")
    assert engine.begun[4:] == []  # both slots have validation
    await engine.end("v0")
    assert engine.begun[4:] == ["t2"]
    await engine.end("v1")
    assert engine.begun[4:] == ["t2", "t3"]
    await engine.set_scheduling(Scheduling())
    assert engine.begun[4:] == ["t2", "t3", "t4", "t5", "t6"]


async def test_a_pause_that_is_cancelled_is_taken_back(config):
    class Stopping(Scripted):
        continued = 0

        async def _stop(self, mode, running):
            await asyncio.Event().wait()

        async def _continue(self):
            self.continued += 1

    engine = Stopping(config, [DRAWN[:4]], "length")
    await engine.resume(VERSION)
    pausing = asyncio.create_task(engine.pause("abort", 60))
    await asyncio.sleep(0)
    assert engine.paused
    await engine.submit([request("r", [1, 2], 4)])
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert (engine.paused, engine.continued) == (False, 2)
    while "r" not in (batch := await asyncio.wait_for(engine.events(), 10)).ids:
        pass
    assert batch.finish[0] is FinishReason.LENGTH
