"""Partial samples: recorded calls, snapshots, and agent loops that continue in another process."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import SampleRestarts
from asyncrl.rollouter.agents.single_turn import SingleTurn
from asyncrl.rollouter.engines.base import SamplingParams
from asyncrl.rollouter.in_flight import InFlightGroup, Snapshotter
from asyncrl.rollouter.partial import PartialSample, pack, unpack
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.samples import GroupTask, SampleMaker
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion
from tests.support.scripted import Death, ScriptedReplica, is_death, settle

PROMPT = Prompt("e0-000000", "row:0", (), "", text="?")
TOKENS = np.array([1, 2], np.int32)
TOOL = np.array([90, 91], np.int32)

spans = st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans())
calls = st.tuples(
    st.integers(0, 2**64 - 1), st.lists(st.tuples(st.integers(1, 4), spans), max_size=4), st.sampled_from([None, 0, 1])
)
samples = st.tuples(st.none() | st.binary(max_size=20), st.integers(0, 99), st.lists(calls, max_size=4))


def built(state, saved_tokens, calls) -> PartialSample:
    sample = PartialSample(state, saved_tokens, PolicyVersion(0, 7) if saved_tokens else None)
    for number, (arguments, parts, finish) in enumerate(calls):
        call = sample.begin(arguments)
        for length, (lineage, version, mixed) in parts:
            tokens = np.arange(length, dtype=np.int32) + 10 * number
            call.output.add(tokens, -tokens.astype(np.float32), PolicyVersion(lineage, version), mixed)
        if finish is not None:
            sample.finish(call, FinishReason(finish))
    return sample


def contents(sample: PartialSample):
    calls = []
    for call in sample.calls:
        done = call.output.completion(FinishReason.STOP)
        calls.append((call.arguments, done.tokens.tolist(), done.logprobs.tolist(), done.spans, call.finish))
    versions = [call.output.first_version for call in sample.calls]
    return sample.state, sample.saved_tokens, sample.token_count, sample.saved_version, versions, calls


@given(st.lists(samples, max_size=4))
def test_unpack_inverts_pack(group):
    before = [built(*sample) for sample in group]
    assert [contents(s) for s in unpack([pack("e0-000000", before)])] == [contents(s) for s in before]


class Chains:
    """The queue's store of snapshots, in memory."""

    def __init__(self) -> None:
        self.parts: dict[str, list[bytes]] = {}
        self.bytes = 0

    async def snapshot(self, parts) -> None:
        for part in parts:
            before = self.parts[part.uid][: part.part] if part.part else []
            assert len(before) == part.part
            self.parts[part.uid] = [*before, part.data]
            self.bytes += len(part.data)


BEGIN, ADD, ADD_MANY, FINISH, DISCARD, SAVE, RESTART, SNAPSHOT, LOST_ANSWER = range(9)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(BEGIN, LOST_ANSWER)), max_size=80))
def test_the_parts_of_a_snapshot_together_are_the_group_as_it_was(plan):
    """Agent loops call, save, fail and start again; each snapshot has what is new since the one before."""
    group = InFlightGroup([PartialSample() for _ in range(3)])
    store = Chains()
    snapshotter = Snapshotter({"g": group}, store, 1.0)
    for i, (index, action) in enumerate(plan):
        sample = group.samples[index]
        call = sample.calls[-1] if sample.calls and sample.calls[-1].finish is None else None
        if action == BEGIN and call is None:
            sample.begin(i)
        elif action in (ADD, ADD_MANY) and call is not None:
            tokens = np.arange(i, i + (3 if action == ADD else 3000), dtype=np.int32)
            call.output.add(tokens, -tokens.astype(np.float32), PolicyVersion(0, i // 5), i % 2 == 0)
        elif action == FINISH and call is not None:
            sample.finish(call, FinishReason.STOP)
        elif action == DISCARD and call is not None:
            sample.discard(call)
        elif action == SAVE and call is None:
            sample.save(b"state %d" % i, len(sample.calls))
        elif action == RESTART:
            group.restart(group.samples[0].attempt + 1)
        elif action == SNAPSHOT:
            asyncio.run(snapshotter.store_changed())
        elif action == LOST_ANSWER and group.positions != group.stored.positions:
            asyncio.run(store.snapshot([group.next_part("g")]))
    asyncio.run(snapshotter.store_changed())
    if "g" in store.parts:
        restored = unpack(store.parts["g"])
        assert [contents(s) for s in restored] == [contents(s) for s in group.samples]
        assert {s.attempt for s in restored} == {group.samples[0].attempt}
    else:
        assert not any(s.started or s.calls for s in group.samples)


async def test_the_snapshots_of_a_long_sample_cost_what_it_grows():
    """The state that it saved is stored once, and a chain of many small parts is replaced by a whole snapshot."""
    sample = PartialSample()
    sample.save(bytes(100_000), 0)
    store, call = Chains(), sample.begin(0)
    snapshotter = Snapshotter({"g": InFlightGroup([sample])}, store, 1.0)
    for i in range(1000):
        call.output.add(np.full(100, i, np.int32), np.zeros(100, np.float32), PolicyVersion(0, 0), False)
        await snapshotter.store_changed()
        assert sum(map(len, store.parts["g"])) <= 2 * sample.size + 20_000
    assert contents(unpack(store.parts["g"])[0]) == contents(sample)
    assert store.bytes <= 4 * sample.size


def test_buffers_that_are_not_snapshots_are_refused():
    data = pack("e0-000000", [built(b"state", 0, [(1, [(4, (0, 0, False))], None)])])
    with pytest.raises(ValueError, match="cut short"):
        unpack([data[:-64]])
    with pytest.raises(ValueError, match="not a snapshot"):
        unpack([b"ARLG" + data[4:]])


class TwoTurns:
    """Answers, calls a tool, answers again. With ``saves`` it calls the tool only once."""

    def __init__(self, saves: bool, tool=lambda: TOOL) -> None:
        self._saves, self._tool = saves, tool

    async def run(self, prompt, index, generate):
        none = np.empty(0, np.int32)
        if generate.state is None:
            first = await generate(none, 4)
            so_far = np.concatenate([first.tokens, self._tool()])
            if self._saves:
                generate.save(so_far.tobytes())
        else:
            so_far = np.frombuffer(generate.state, np.int32)
        last = await generate(so_far, 4)
        tokens = np.concatenate([so_far, last.tokens])
        logprobs = np.zeros(len(tokens), np.float32)
        return Sample.single(index, tokens, logprobs, np.ones(len(tokens), bool), last.spans, last.finish)


class Rollouter:
    """A router, a sample maker and one sample; `stop` kills it."""

    def __init__(self, agent_loop, one_version=False) -> None:
        self.replicas = {"a": ScriptedReplica(), "b": ScriptedReplica()}
        self.recorder = Recorder("rollouter")
        router = Router(self.replicas, is_death)
        self._maker = SampleMaker(Config(), None, agent_loop, 100, router, None, self.recorder)
        self._task = GroupTask(PROMPT, TOKENS, SamplingParams(), PROMPT.uid, PROMPT.uid, one_version)
        self._running = asyncio.create_task(router.run())

    async def begin(self, partial: PartialSample):
        self.made = asyncio.create_task(self._maker.make(self._task, [partial]))
        await settle()
        return self

    async def stop(self) -> None:
        for task in (self.made, self._running):
            task.cancel()
        await asyncio.wait([self.made, self._running])

    def counter(self, name: str) -> float:
        return self.recorder.drain().counters.get(name, 0)


async def test_a_sample_continues_in_another_process_with_its_tokens():
    partial = PartialSample()
    first = await Rollouter(SingleTurn(None, 9)).begin(partial)
    a = first.replicas["a"]
    a.emit("e0-000000/0/1#0", [11, 12])
    await settle()
    position = partial.position
    data = pack(PROMPT.uid, [partial])
    a.emit("e0-000000/0/1#0", [13])  # after the snapshot
    await settle()
    assert partial.position != position
    await first.stop()

    second = await Rollouter(SingleTurn(None, 9)).begin(unpack([data])[0])
    a = second.replicas["a"]
    (request,) = a.requests.values()
    assert (request.tokens.tolist(), request.position, request.max_new_tokens) == ([1, 2, 11, 12], 2, 7)
    a.version = PolicyVersion(0, 1)
    a.emit(request.id, [14], FinishReason.STOP)
    (sample,) = await second.made
    assert sample.tokens.tolist() == [11, 12, 14]
    assert [(s.start, s.version.number) for s in sample.spans] == [(0, 0), (2, 1)]
    await second.stop()


@pytest.mark.parametrize("saves", [False, True])
async def test_earlier_calls_are_replayed(saves):
    partial = PartialSample()
    first = await Rollouter(TwoTurns(saves)).begin(partial)
    first.replicas["a"].emit("e0-000000/0/1#0", [11], FinishReason.STOP)
    await settle()
    first.replicas["a"].emit("e0-000000/0/2#0", [12])
    await settle()
    data = pack(PROMPT.uid, [partial])
    await first.stop()

    asked_tool = []
    loop = TwoTurns(saves, tool=lambda: asked_tool.append(1) or TOOL)
    second = await Rollouter(loop).begin(unpack([data])[0])
    (request,) = second.replicas["a"].requests.values()
    assert (request.tokens.tolist(), request.position) == ([1, 2, 11, 90, 91, 12], 2)  # two tokens were sampled
    assert request.resumed == 1  # one of them in this turn
    assert len(asked_tool) == (0 if saves else 1)
    second.replicas["a"].emit(request.id, [13], FinishReason.STOP)
    (sample,) = await second.made
    assert sample.tokens.tolist() == [11, 90, 91, 12, 13]
    assert second.counter("rollout/restarted_samples") == 0
    await second.stop()


async def test_a_loop_that_calls_generate_with_other_arguments_restarts_its_sample():
    partial = PartialSample()
    first = await Rollouter(TwoTurns(saves=False)).begin(partial)
    first.replicas["a"].emit("e0-000000/0/1#0", [11], FinishReason.STOP)
    await settle()
    data = pack(PROMPT.uid, [partial])
    await first.stop()

    fickle = TwoTurns(saves=False, tool=lambda: TOOL + 1)
    second = await Rollouter(fickle).begin(unpack([data])[0])
    (request,) = second.replicas["a"].requests.values()
    assert (request.tokens.tolist(), request.position) == ([1, 2], 0)
    assert second.counter("rollout/restarted_samples") == 1
    await second.stop()


async def test_with_one_version_a_sample_restarts_under_the_new_one():
    rollouter = await Rollouter(TwoTurns(saves=True), one_version=True).begin(PartialSample())
    a, b = rollouter.replicas.values()
    a.emit("e0-000000/0/1#0", [11], FinishReason.STOP)
    await settle()
    a.emit("e0-000000/0/2#0", [12])
    a.die(Death("killed"))
    b.version = PolicyVersion(0, 1)
    await settle()
    b.emit("e0-000000/0/2#1", [13])
    await settle()
    again = b.requests["e0-000000/0/3#0"]
    assert (again.tokens.tolist(), again.position, again.max_new_tokens) == ([1, 2], 0, 4)
    b.emit("e0-000000/0/3#0", [21], FinishReason.STOP)
    await settle()
    b.emit("e0-000000/0/4#0", [22], FinishReason.STOP)
    (sample,) = await rollouter.made
    assert sample.tokens.tolist() == [21, 90, 91, 22]
    assert rollouter.counter("rollout/restarted_samples") == 1
    await rollouter.stop()


async def test_with_one_version_a_sample_restarts_between_two_calls_too():
    rollouter = await Rollouter(TwoTurns(saves=True), one_version=True).begin(PartialSample())
    a = rollouter.replicas["a"]
    a.emit("e0-000000/0/1#0", [11], FinishReason.STOP)
    await settle()
    a.version = PolicyVersion(0, 1)
    a.emit("e0-000000/0/2#0", [12], FinishReason.STOP)
    await settle()
    assert a.requests["e0-000000/0/3#0"].tokens.tolist() == [1, 2]
    await rollouter.stop()


async def test_an_agent_loop_that_catches_exceptions_does_not_catch_a_restart():
    class Careless(SingleTurn):
        async def run(self, prompt, index, generate):
            try:
                return await super().run(prompt, index, generate)
            except Exception:
                return None

    assert not issubclass(SampleRestarts, Exception)
    rollouter = await Rollouter(Careless(None, 9), one_version=True).begin(PartialSample())
    a = rollouter.replicas["a"]
    a.emit("e0-000000/0/1#0", [11])
    await settle()
    a.version = PolicyVersion(0, 1)
    a.emit("e0-000000/0/1#0", [12])
    await settle()
    assert a.requests["e0-000000/0/2#0"].position == 0
    await rollouter.stop()


async def test_a_call_that_the_loop_cancelled_is_discarded():
    class Impatient(SingleTurn):
        async def run(self, prompt, index, generate):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(generate(np.empty(0, np.int32), 50), 0.01)
            return await super().run(prompt, index, generate)

    rollouter = await Rollouter(Impatient(None, 9)).begin(PartialSample())
    a = rollouter.replicas["a"]
    async with asyncio.timeout(10):
        while "e0-000000/0/2#0" not in a.requests or not a.aborted:
            await asyncio.sleep(0.001)
    assert a.aborted == ["e0-000000/0/1#0"]
    assert a.requests["e0-000000/0/2#0"].max_new_tokens == 9
    await rollouter.stop()


async def test_two_calls_at_once_are_refused():
    class Hasty(SingleTurn):
        async def run(self, prompt, index, generate):
            call = asyncio.create_task(super().run(prompt, index, generate))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="one after another"):
                generate.save(b"")
            with pytest.raises(RuntimeError, match="one after another"):
                await super().run(prompt, index, generate)
            return await call

    rollouter = await Rollouter(Hasty(None, 9)).begin(PartialSample())
    rollouter.replicas["a"].emit("e0-000000/0/1#0", [11], FinishReason.STOP)
    (sample,) = await rollouter.made
    assert sample.tokens.tolist() == [11]
    await rollouter.stop()
