"""Partial samples: recorded calls, snapshots, and agent loops that continue in another process."""

import asyncio
from unittest.mock import ANY

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import GenerationFailed
from asyncrl.rollouter.agents.single_turn import SingleTurn
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.rollouter.engines.base import Grammar, SamplingParams
from asyncrl.rollouter.in_flight import InFlightGroup, Snapshotter
from asyncrl.rollouter.limiter import GroupPlaces, InFlightLimiter
from asyncrl.rollouter.partial import PartialSample, SavedCall, pack, unpack
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.samples import GroupTask, SampleMaker
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason
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
    saved = [SavedCall(7, 2**64 - 1, 1, 0, saved_tokens), SavedCall(2**64 - 1, 5, 3, 4, 2)] if saved_tokens else []
    sample = PartialSample(state, saved)
    for number, (context, parts, finish) in enumerate(calls):
        call = sample.begin(context, number, 2**64 - 1 - number)
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
        of_call = call.context, call.start, call.ordinal, call.limits, call.finish, call.output.first_version
        calls.append((*of_call, done.tokens.tolist(), done.logprobs.tolist(), done.spans))
    return sample.state, sample.token_count, sample.saved_calls, calls


@given(st.lists(samples, max_size=4))
def test_unpack_inverts_pack(group):
    before = [built(*sample) for sample in group]
    assert [contents(s) for s in unpack([pack("e0-000000", before)])] == [contents(s) for s in before]


def in_flight(samples) -> InFlightGroup:
    return InFlightGroup(samples, GroupPlaces(InFlightLimiter(8, 0), len(samples)))


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


BEGIN, ADD, ADD_MANY, FINISH, AGAIN, DISCARD, SAVE, RESTART, SNAPSHOT, LOST_ANSWER = range(10)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(BEGIN, LOST_ANSWER), st.integers(0, 9)), max_size=80))
def test_the_parts_of_a_snapshot_together_are_the_group_as_it_was(plan):
    """Agent loops make several calls at once, save, fail and start again; each snapshot has what is new since the one
    before."""
    group = in_flight([PartialSample() for _ in range(3)])
    store = Chains()
    snapshotter = Snapshotter({"g": group}, store, 1.0)
    for i, (index, action, which) in enumerate(plan):
        sample = group.samples[index]
        under_way = [call for call in sample.calls if call.finish is None]
        call = under_way[which % len(under_way)] if under_way else None
        if action == BEGIN:
            sample.begin(which, 1, i)
        elif action in (ADD, ADD_MANY) and call is not None:
            tokens = np.arange(i, i + (3 if action == ADD else 3000), dtype=np.int32)
            call.output.add(tokens, -tokens.astype(np.float32), PolicyVersion(0, i // 5), i % 2 == 0)
        elif action == FINISH and call is not None:
            sample.finish(call, FinishReason.STOP)
        elif action == AGAIN and call is not None:
            sample.start_again(call)
        elif action == DISCARD and call is not None:
            sample.discard(call)
        elif action == SAVE:
            sample.save(b"state %d" % i, [call for call in sample.calls if call.finish is not None])
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
    sample.save(bytes(100_000), [])
    store, call = Chains(), sample.begin(0, 1, 0)
    snapshotter = Snapshotter({"g": in_flight([sample])}, store, 1.0)
    for i in range(1000):
        call.output.add(np.full(100, i, np.int32), np.zeros(100, np.float32), PolicyVersion(0, 0), False)
        await snapshotter.store_changed()
        assert sum(map(len, store.parts["g"])) <= 2 * sample.size + 20_000
    assert contents(unpack(store.parts["g"])[0]) == contents(sample)
    assert store.bytes <= 4 * sample.size


async def test_what_a_cancelled_group_discards_stays_in_its_snapshot():
    """A rollouter that fails cancels its groups; the next one goes on with their tokens."""
    sample, store = PartialSample(), Chains()
    group, call = in_flight([sample]), sample.begin(0, 1, 0)

    async def generate() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            sample.discard(call)
            await snapshotter.store_changed()

    snapshotter = Snapshotter({"g": group}, store, 1.0)
    group.task = asyncio.create_task(generate())
    call.output.add(np.arange(5, dtype=np.int32), np.zeros(5, np.float32), PolicyVersion(0, 0), False)
    await snapshotter.store_changed()
    group.task.cancel()
    await asyncio.wait([group.task])
    assert unpack(store.parts["g"])[0].token_count == 5


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
        turns = TrajectoryBuilder.from_bytes(generate.state) if generate.state else TrajectoryBuilder()
        if generate.state is None:
            turns.append(await generate(turns.response, 4))
            turns.append(self._tool())
            if self._saves:
                generate.save(turns.to_bytes())
        turns.append(await generate(turns.response, 4))
        return turns.sample(index)


#: calls that began again, and their tokens until then
RESTARTED = ("rollout/restarted_calls", "rollout/agent/untrained_tokens/interrupted")


class Rollouter:
    """A router, a sample maker and one sample; `stop` kills it."""

    def __init__(self, agent_loop, one_version=False, config=None) -> None:
        self.replicas = {"a": ScriptedReplica(), "b": ScriptedReplica()}
        self.recorder = Recorder("rollouter")
        router = Router(self.replicas, is_death)
        self._maker = SampleMaker(config or Config(), None, agent_loop, 100, router, None, self.recorder)
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

    def counted(self, *names: str) -> list[float]:
        """Since the last time."""
        counters = self.recorder.drain().counters
        return [counters.get(name, 0) for name in names]


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
    (sequence,) = sample.sequences
    assert sequence.tokens.tolist() == [11, 12, 14]
    assert [(s.start, s.version.number) for s in sequence.spans] == [(0, 0), (2, 1)]
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
    assert (request.tokens.tolist(), request.position) == ([1, 2, 11, 90, 91, 12], 1)  # of this call
    assert request.resumed == 1
    assert len(asked_tool) == (0 if saves else 1)
    second.replicas["a"].emit(request.id, [13], FinishReason.STOP)
    (sample,) = await second.made
    assert sample.sequences[0].tokens.tolist() == [11, 90, 91, 12, 13]
    assert second.counted("rollout/restarted_samples", *RESTARTED) == [0, 0, 0]
    await second.stop()


async def test_a_loop_that_continues_other_tokens_samples_what_the_record_lacks():
    partial = PartialSample()
    first = await Rollouter(TwoTurns(saves=False)).begin(partial)
    first.replicas["a"].emit("e0-000000/0/1#0", [11], FinishReason.STOP)
    await settle()
    data = pack(PROMPT.uid, [partial])
    await first.stop()

    fickle = TwoTurns(saves=False, tool=lambda: TOOL + 1)
    second = await Rollouter(fickle).begin(unpack([data])[0])
    (request,) = second.replicas["a"].requests.values()
    assert (request.tokens.tolist(), request.position) == ([1, 2, 11, 91, 92], 0)
    await second.stop()


async def test_with_one_version_a_call_starts_again_under_the_new_one():
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
    assert (again.tokens.tolist(), again.position, again.max_new_tokens) == ([1, 2, 11, 90, 91], 0, 4)
    b.emit("e0-000000/0/3#0", [22], FinishReason.STOP)
    (sample,) = await rollouter.made
    assert sample.sequences[0].tokens.tolist() == [11, 90, 91, 22]
    assert rollouter.counted(*RESTARTED) == [1, 1]
    await rollouter.stop()


async def test_an_interrupted_call_with_a_grammar_starts_again():
    """On another replica, and in another process."""

    class Constrained(SingleTurn):
        async def run(self, prompt, index, generate):
            turns = TrajectoryBuilder()
            grammar = Grammar("regex", "[0-9]*")
            turns.append((await generate(turns.response, 4, sampling={"grammar": grammar})).tokens)
            turns.append(await generate(turns.response, 4))
            return turns.sample(index)

    partial = PartialSample()
    first = await Rollouter(Constrained(None, 9)).begin(partial)
    a, b = first.replicas.values()
    whole = a.requests["e0-000000/0/1#0"]
    a.emit(whole.id, [11])
    a.die(Death("killed"))
    await settle()
    again = b.requests["e0-000000/0/2#0"]
    b.emit(again.id, [12, 13])
    await settle()
    assert first.counted(*RESTARTED) == [1, 1]
    data = pack(PROMPT.uid, [partial])
    await first.stop()

    second = await Rollouter(Constrained(None, 9)).begin(unpack([data])[0])
    (last,) = second.replicas["a"].requests.values()
    for request in (again, last):
        assert request.tokens.tolist() == whole.tokens.tolist() == [1, 2]
        assert (request.position, request.resumed, request.max_new_tokens) == (0, 0, 4)
        assert (request.key, request.sampling) == (whole.key, whole.sampling)
    second.replicas["a"].emit(last.id, [21, 22], FinishReason.STOP)
    await settle()
    (_, free) = second.replicas["a"].requests.values()
    second.replicas["a"].emit(free.id, [23], FinishReason.STOP)
    (sample,) = await second.made
    assert sample.sequences[0].tokens.tolist() == [21, 22, 23]
    assert sample.sequences[0].loss_mask.tolist() == [False, False, True]
    assert second.counted(*RESTARTED) == [1, 2]
    await second.stop()


@pytest.mark.parametrize("sampling", [{"grammar": Grammar("regex", "a")}, {"logit_bias": ((1, 2.0),)}])
async def test_an_engine_that_serves_no_grammars_and_biases_gets_none(sampling):
    class Constrained(SingleTurn):
        async def run(self, prompt, index, generate):
            with pytest.raises(GenerationFailed, match="toy_engine:ENGINE engine serves neither"):
                await generate(np.empty(0, np.int32), 4, sampling=sampling)
            return await super().run(prompt, index, generate)

    config = Config()
    config.rollout.engine.name = "docs.examples.toy_engine:ENGINE"
    rollouter = await Rollouter(Constrained(None, 9), config=config).begin(PartialSample())
    ((id, request),) = rollouter.replicas["a"].requests.items()
    assert (request.sampling.grammar, request.sampling.logit_bias) == (None, ())
    rollouter.replicas["a"].emit(id, [11], FinishReason.STOP)
    await rollouter.made
    await rollouter.stop()


async def test_with_one_version_two_calls_may_be_of_two():
    rollouter = await Rollouter(TwoTurns(saves=True), one_version=True).begin(PartialSample())
    a = rollouter.replicas["a"]
    a.emit("e0-000000/0/1#0", [11], FinishReason.STOP)
    await settle()
    a.version = PolicyVersion(0, 1)
    a.emit("e0-000000/0/2#0", [12], FinishReason.STOP)
    (sample,) = await rollouter.made
    assert sample.sequences[0].tokens.tolist() == [11, 90, 91, 12]
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


class Fork:
    """Two continuations of the answer at once, in the given order, and a third call equal to the first one."""

    def __init__(self, order=(0, 1)) -> None:
        self._order = order

    async def run(self, prompt, index, generate):
        turns = TrajectoryBuilder()
        turns.append(await generate(turns.response, 4))
        turns.append([30])
        forks = [turns.branch(), turns.branch()]
        forks[1].append([31])

        async def extend(fork):
            fork.append(await generate(fork.response, 4))

        async with asyncio.TaskGroup() as both:
            for i in self._order:
                both.create_task(extend(forks[i]))
        own = turns.start(prefix=1)
        own.append([32])
        own.append(await generate(own.response, 4, own.prefix))
        turns.append(await generate(turns.response, 4))
        return turns.sample(index)


async def forked(order):
    """Requests of a sample that forks, by their tokens, and the sample."""
    rollouter = await Rollouter(Fork(order)).begin(PartialSample())
    a, answered = rollouter.replicas["a"], 0
    while not rollouter.made.done():
        for request in list(a.requests.values())[answered:]:
            a.emit(request.id, [50 + len(request.tokens) % 10], FinishReason.STOP)
            answered += 1
        await settle()
    requests, (sample,) = list(a.requests.values()), await rollouter.made
    await rollouter.stop()
    return sorted((r.tokens.tolist(), r.key, r.shared_prefix) for r in requests), sample


async def test_what_calls_at_once_draw_does_not_depend_on_their_order():
    requests, sample = await forked((0, 1))
    other, same = await forked((1, 0))
    assert requests == other
    assert len({key for _, key, _ in requests}) == len(requests)  # also of the two calls that continue equal tokens
    assert [tokens for tokens, _, _ in requests].count([1, 2, 52, 30]) == 2
    assert requests[0][0] == [1, 2]
    assert next(shared for tokens, _, shared in requests if tokens == [1, 32]) == 1
    assert [q.tokens.tolist() for q in sample.sequences] == [q.tokens.tolist() for q in same.sequences]
    assert [q.loss_mask.sum() for q in sample.sequences] == [2, 1, 1, 1]


async def test_calls_at_once_continue_in_another_process():
    partial = PartialSample()
    first = await Rollouter(Fork()).begin(partial)
    a = first.replicas["a"]
    a.emit("e0-000000/0/1#0", [11], FinishReason.STOP)
    await settle()
    a.emit("e0-000000/0/2#0", [12])
    a.emit("e0-000000/0/3#0", [13], FinishReason.STOP)
    await settle()
    keys = {tuple(r.tokens.tolist()): r.key for r in a.requests.values()}
    data = pack(PROMPT.uid, [partial])
    await first.stop()

    second = await Rollouter(Fork((1, 0))).begin(unpack([data])[0])
    (request,) = second.replicas["a"].requests.values()
    assert (request.tokens.tolist(), request.position) == ([1, 2, 11, 30, 12], 1)
    assert request.key == keys[1, 2, 11, 30]
    await second.stop()


async def test_calls_that_the_loop_leaves_running_end_with_the_sample():
    left = []

    class Leaves(SingleTurn):
        async def run(self, prompt, index, generate):
            left.append(asyncio.create_task(generate(np.array([9], np.int32), 4)))
            sample = await super().run(prompt, index, generate)
            left.append(generate)
            return sample

    rollouter = await Rollouter(Leaves(None, 9)).begin(PartialSample())
    a = rollouter.replicas["a"]
    own, other = sorted(a.requests.values(), key=lambda request: len(request.tokens))
    a.emit(own.id, [11], FinishReason.STOP)
    (sample,) = await rollouter.made
    await settle()
    assert sample.sequences[0].tokens.tolist() == [11]
    assert (left[0].cancelled(), a.aborted) == (True, [other.id])
    with pytest.raises(GenerationFailed, match="after its sample's end"):
        await left[1](np.empty(0, np.int32))
    await rollouter.stop()


async def test_a_state_saved_during_a_call_keeps_the_call():
    class Saves(SingleTurn):
        async def run(self, prompt, index, generate):
            none = np.empty(0, np.int32)
            calls = [asyncio.create_task(generate(none, 4)) for _ in range(2)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            generate.save(b"one")
            await asyncio.wait(calls)

    partial = PartialSample()
    rollouter = await Rollouter(Saves(None, 9)).begin(partial)
    a = rollouter.replicas["a"]
    first, second = a.requests.values()
    assert first.key != second.key
    a.emit(second.id, [12])
    a.emit(first.id, [11], FinishReason.STOP)
    await settle()
    assert (partial.state, partial.token_count) == (b"one", 2)
    (left,) = partial.calls
    assert (left.ordinal, partial.saved_calls) == (1, [(left.context, ANY, 2, 0, 1)])
    assert partial.begin(left.context, 2, left.limits).ordinal == 2
    await rollouter.stop()


def test_no_two_equal_calls_have_one_number_whichever_is_saved_first():
    partial = PartialSample()
    _, second = partial.begin(5, 1, 0), partial.begin(5, 1, 0)
    partial.save(b"", [second])
    (again,) = unpack([pack(PROMPT.uid, [partial])])
    assert [partial.begin(5, 1, 0).ordinal, again.begin(5, 1, 0).ordinal] == [2, 2]


async def test_a_prefix_that_the_prompt_does_not_have_fails_the_sample():
    class TooLong(SingleTurn):
        async def run(self, prompt, index, generate):
            return await generate(np.empty(0, np.int32), 4, prefix=3)

    rollouter = await Rollouter(TooLong(None, 9)).begin(PartialSample())
    (failed,) = await rollouter.made
    assert (failed.reason, "expected 0 to 2 tokens" in failed.message) == ("agent_error", True)
    await rollouter.stop()
