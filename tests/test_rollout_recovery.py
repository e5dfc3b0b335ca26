"""Deaths of replicas and rollouters with real engines: no group is lost, and samples keep their tokens."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest

from asyncrl.config.checks import derive
from asyncrl.config.load import load_config
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import DataError
from asyncrl.rollouter.agents.single_turn import SingleTurn
from asyncrl.rollouter.engine_lease import EngineLease, LeasedEngine
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.loop import RolloutLoop
from asyncrl.rollouter.partial import PartialSample, pack, unpack
from asyncrl.rollouter.validation import ROUNDS
from asyncrl.sample_queue.messages import Drop, InFlight, Recovery, Snapshot, Ticket
from asyncrl.sample_queue.records import IN_FLIGHT
from asyncrl.simulation.records import InMemoryRecords
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion, VersionSpan
from tests.support.rollout import System, fine
from tests.support.scripted import Death
from tests.support.tiny import overrides

EPOCH = ("data.epochs=1", "async_training.staleness_threshold=50")
OFTEN = "rollout.snapshot_every_s=0.02"
DETERMINISTIC = "rollout.engine.deterministic=true"


def judge(prompt, i):
    return fine(float(i))


@contextlib.asynccontextmanager
async def engines(inputs, count, *more, step_s=0.0):
    """Running engines whose steps take ``step_s`` longer, so that a death happens during one."""
    config = load_config(None, [*overrides(inputs, inputs / "run"), *more])
    made = [NativeEngine(config.model.path, config.rollout.engine) for _ in range(count)]
    for engine in made:
        slow_down(engine, step_s)
        await engine.resume(PolicyVersion(0, 0))
    yield made
    for engine in made:
        await engine.close()


def leased(engine: NativeEngine) -> LeasedEngine:
    return LeasedEngine(EngineLease(engine), 1)


def slow_down(engine: NativeEngine, step_s: float) -> None:
    step = engine._core.step

    def slow() -> None:
        time.sleep(step_s)
        step()

    engine._core.step = slow  # type: ignore[method-assign]


def gated(engine: NativeEngine) -> threading.Event:
    """Its next step waits while the event is not set."""
    gate, step = threading.Event(), engine._core.step
    gate.set()

    def wait() -> None:
        if not gate.wait(60):
            raise TimeoutError("the gate stayed closed")
        step()

    engine._core.step = wait  # type: ignore[method-assign]
    return gate


class Mortal(LeasedEngine):
    """A replica whose process can be killed."""

    def __init__(self, lease: EngineLease, token: int) -> None:
        super().__init__(lease, token)
        self.killed = asyncio.Event()

    async def events(self):
        events, killed = asyncio.ensure_future(super().events()), asyncio.ensure_future(self.killed.wait())
        try:
            await asyncio.wait([events, killed], return_when=asyncio.FIRST_COMPLETED)
            if self.killed.is_set():
                raise Death("killed")
            return events.result()
        finally:
            events.cancel()
            killed.cancel()


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def tokens_in_flight(records) -> int:
    """In the snapshots of groups that are not finished."""
    in_flight = {group.uid: group.attempt for group in records.recover().groups if group.state == IN_FLIGHT}
    return sum(s.token_count for parts in records.snapshots(in_flight).values() for s in unpack(parts))


async def until_quiet(taken: list) -> None:
    """Wait until nothing has been added for several intervals of `OFTEN`."""
    async with asyncio.timeout(60):
        while taken:
            taken.clear()
            await asyncio.sleep(0.2)


async def everything(system: System) -> dict[str, Group]:
    """Wait for the end of the prompts; returns every group by its uid."""
    await asyncio.wait_for(system.tasks[1], 120)
    return {g.uid: g for g in await system.groups(system.queue.balance()["queued"])}


def assert_equal_bits(found: dict[str, Group], expected: dict[str, Group]) -> None:
    assert found.keys() == expected.keys()
    for uid, group in expected.items():
        for column in ("prompt_tokens", "offsets", "tokens", "logprobs", "finish"):
            np.testing.assert_array_equal(getattr(found[uid], column), getattr(group, column), err_msg=uid)
        for span in ("span_number", "span_lineage", "span_mixed_kv"):  # spans also end where the replica changes
            of_tokens = [g.per_token(getattr(g, span)) for g in (found[uid], group)]
            np.testing.assert_array_equal(*of_tokens, err_msg=uid)


@pytest.fixture(scope="module")
def undisturbed(inputs):
    """All groups of an epoch, in deterministic mode."""

    async def run():
        async with System(inputs, judge, *EPOCH, DETERMINISTIC) as system:
            return await everything(system)

    return asyncio.run(run())


async def test_samples_of_a_dead_replica_equal_those_of_an_undisturbed_run_bit_for_bit(inputs, undisturbed):
    async with engines(inputs, 2, DETERMINISTIC, step_s=0.002) as (a, b):
        mortal = Mortal(EngineLease(a), 1)
        replicas = {"a": mortal, "b": leased(b)}
        async with System(inputs, judge, *EPOCH, DETERMINISTIC, replicas=replicas) as system:
            await until(lambda: (system.router.outstanding_tokens["a"] < 150) and a._core.generated_tokens > 40)
            mortal.killed.set()
            assert_equal_bits(await everything(system), undisturbed)
            assert system.router.lost == {"a": "killed"}
            assert system.recorder.drain().counters.get("rollout/restarted_samples", 0) == 0


async def test_a_killed_rollouter_loses_no_group_and_its_samples_keep_their_tokens(inputs):
    records = InMemoryRecords()
    async with engines(inputs, 1, step_s=0.01) as (engine,):
        lease, gate = EngineLease(engine), gated(engine)
        async with System(
            inputs, judge, *EPOCH, OFTEN, replicas={"r": LeasedEngine(lease, 1)}, records=records
        ) as first:
            while gate.is_set() or tokens_in_flight(records) == 0:  # a group may end before the engine stops
                gate.set()
                await until(lambda: first.queue.balance()["queued"] >= 2 and tokens_in_flight(records) > 0)
                gate.clear()
                await asyncio.sleep(0.2)
        recovery = await first.queue.recover()
        had = {i.uid: unpack(i.snapshot) for i in recovery.in_flight if i.snapshot}
        tokens = tokens_in_flight(records)
        gate.set()
        assert tokens > 0

        async with System(
            inputs, judge, *EPOCH, OFTEN, replicas={"r": LeasedEngine(lease, 2)}, records=records
        ) as second:
            groups = await everything(second)
            counters = second.recorder.drain().counters
    assert len(groups) == len(second.prompts)  # each of the epoch's prompts once
    assert {g.prompt_id for g in groups.values()} == {p.prompt_id for p in second.prompts}
    assert counters["rollout/recovered_groups"] == len(recovery.in_flight)
    assert counters["rollout/recovered_tokens"] == tokens
    for uid, samples in had.items():
        for index, sample in enumerate(samples):
            for call in sample.calls:
                kept, whole = call.output.completion(FinishReason.STOP), groups[uid].response(index)
                n = len(kept.tokens)
                assert groups[uid].tokens[whole][:n].tolist() == kept.tokens.tolist()
                assert groups[uid].logprobs[whole][:n].tolist() == kept.logprobs.tolist()


async def test_in_deterministic_mode_a_killed_rollouter_changes_no_bit(inputs, undisturbed):
    records, more = InMemoryRecords(), (*EPOCH, OFTEN, DETERMINISTIC)
    async with engines(inputs, 1, DETERMINISTIC, step_s=0.005) as (engine,):
        lease = EngineLease(engine)
        async with System(inputs, judge, *more, replicas={"r": LeasedEngine(lease, 1)}, records=records) as first:
            await until(lambda: first.queue.balance()["queued"] >= 2 and engine._core.active > 2)
        assert not records.snapshots()  # they would not be used
        left = PartialSample()
        left.begin(context=1, start=2, limits=0).output.add(
            np.ones(3, np.int32), -np.ones(3, np.float32), PolicyVersion(0, 0), False
        )
        uid = (await first.queue.recover()).in_flight[0].uid
        data = pack(uid, [left, *(PartialSample() for _ in range(3))])
        await first.queue.snapshot([Snapshot(uid, 0, 0, data)])
        async with System(inputs, judge, *more, replicas={"r": LeasedEngine(lease, 2)}, records=records) as second:
            assert_equal_bits(await everything(second), undisturbed)
            counters = second.recorder.drain().counters
            assert (counters["rollout/restarted_samples"], counters["rollout/recovered_tokens"]) == (1, 0)


class Gated(LeasedEngine):
    """A replica whose scheduling calls wait for a gate."""

    def __init__(self, lease: EngineLease, token: int) -> None:
        super().__init__(lease, token)
        self.gate = asyncio.Event()
        self.gate.set()

    async def set_scheduling(self, scheduling):
        await self.gate.wait()
        await super().set_scheduling(scheduling)


async def test_a_restarted_loop_does_not_collide_with_its_old_requests_on_a_replica(inputs):
    async with engines(inputs, 1, step_s=0.01) as (engine,):
        replica = Gated(EngineLease(engine), 1)
        async with System(inputs, judge, *EPOCH, replicas={"r": replica}) as system:
            await until(lambda: engine._core.running >= 8)
            replica.gate.clear()
            system.router.set_max_running_requests(8)
            await asyncio.sleep(0)  # later calls wait behind this one
            old = system.loop
            await old.park()
            system.tasks[1].cancel()
            await asyncio.wait(system.tasks[1:])
            order = PromptOrder(system.prompts, seed=0, epochs=1)
            system.loop = RolloutLoop(
                system.config, derive(system.config).slots, order, old._maker, system.queue, system.recorder
            )
            system.tasks[1] = asyncio.create_task(system.loop.run(await system.queue.recover()))
            await until(lambda: len(system.router._replicas["r"].requests) >= 8)
            replica.gate.set()
            await asyncio.wait(system.tasks, return_when=asyncio.FIRST_COMPLETED)
            assert not system.tasks[0].done()  # the router: ids must be unique among unfinished requests
            assert len(await everything(system)) == len(system.prompts)


async def test_only_changed_in_flight_groups_are_snapshotted(inputs):
    taken: list[list[str]] = []
    async with engines(inputs, 1, step_s=0.01) as (engine,):
        system = System(
            inputs,
            judge,
            *EPOCH,
            OFTEN,
            "rollout.max_concurrent_groups=2",
            replicas={"r": leased(engine)},
        )
        keep = system.queue.snapshot

        async def snapshot(parts):
            uids = [part.uid for part in parts]
            taken.append(uids)
            assert len(set(uids)) == len(uids)
            await keep(parts)

        system.queue.snapshot = snapshot
        async with system:
            await until(lambda: len(taken) >= 3)
            await engine.pause("keep", 10)
            await until_quiet(taken)
            await engine.resume(PolicyVersion(0, 0))
            await everything(system)
            await until_quiet(taken)


async def test_an_interrupted_snapshot_is_repeated(inputs):
    async with engines(inputs, 1, step_s=0.01) as (engine,):
        system = System(
            inputs,
            judge,
            *EPOCH,
            "rollout.snapshot_every_s=1000",
            replicas={"r": leased(engine)},
        )
        keep, calls = system.queue.snapshot, []

        async def snapshot(parts):
            calls.append({part.uid for part in parts})
            await (asyncio.Event().wait() if len(calls) == 1 else keep(parts))

        system.queue.snapshot = snapshot
        async with system:
            await until(lambda: engine._core.generated_tokens > 40)
            await engine.pause("keep", 10)
            await until(lambda: not engine._core.has_events)
            storing = asyncio.create_task(system.loop.snapshotter.store_changed())
            await until(lambda: calls)
            storing.cancel()
            await system.loop.park()
            assert calls[0]
            assert calls[0] <= calls[-1]
            assert len(calls) == 2


class FirstOneHangs(SingleTurn):
    """In a tool that does not even end when it is cancelled once."""

    async def run(self, prompt, index, generate):
        sample = await super().run(prompt, index, generate)
        if index == 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()
        return sample


async def test_an_agent_loop_that_hangs_in_a_tool_fails_its_sample_alone(inputs):
    """One that only generates for long does not."""
    short = "rollout.agent_timeout_s=0.2"
    async with (
        engines(inputs, 1, step_s=0.05) as (engine,),
        System(inputs, judge, short, agent_loop=FirstOneHangs, replicas={"r": leased(engine)}) as system,
    ):
        (group, _) = await system.groups(2)
        assert group.sample_index.tolist() == [1, 2, 3]
        assert system.recorder.drain().counters["rollout/failed_samples/agent_timeout"] >= 2


async def test_overdue_groups_are_cancelled_and_neither_put_nor_dropped(inputs):
    async with engines(inputs, 1, step_s=0.01) as (engine,):
        system = System(inputs, judge, *EPOCH, replicas={"r": leased(engine)})
        overdue: asyncio.Queue[list[str]] = asyncio.Queue()
        reported: list[str] = []
        put, drop = system.queue.put_and_issue, system.queue.drop

        async def noted_put(groups, *more):  # `put` calls it, too
            reported.extend(Group.from_buffer(g).uid for g in groups)
            return await put(groups, *more)

        async def noted_drop(drops):
            reported.extend(drop.uid for drop in drops)
            await drop(drops)

        system.queue.overdue, system.queue.put_and_issue, system.queue.drop = overdue.get, noted_put, noted_drop
        async with system:
            await until(lambda: engine._core.running >= 8)
            uids = list(system.loop.in_flight)[:2]
            await drop([Drop(uid, "overdue") for uid in uids])  # as the queue does before it reports them
            overdue.put_nowait([*uids, "e0-000024-long-gone"])
            await until(lambda: not set(uids) & set(system.loop.in_flight))
            await until(lambda: not any(id.split("/")[0] in uids for id in engine._core._scheduler.by_id))
            overdue.put_nowait([])
            await asyncio.wait_for(system.tasks[1], 120)
            assert len(reported) == len(system.prompts) - 2
            assert not set(reported) & set(uids)
            assert system.recorder.drain().counters["rollout/cancelled_groups"] == 2


async def test_groups_of_other_prompt_files_are_refused(inputs):
    async with System(inputs, judge, *EPOCH) as system:
        with pytest.raises(DataError, match=r"e0-000003 was issued for prompt elsewhere:7, .* the first run"):
            await system.loop.run(Recovery(0, None, [InFlight(Ticket("e0-000003", "elsewhere:7", 0, 0), [])]))


@pytest.mark.parametrize("lineage", [0, 1])
async def test_a_validation_keeps_its_answers_over_a_sync_and_repeats_them_after_a_restore(inputs, lineage):
    async with System(inputs, judge, "validation.samples=2") as system:
        slow_down(system.engine, 0.005)
        validating = asyncio.create_task(system.validation.run(system.prompts[:6]))
        await until(lambda: len([c for c in system.rewards.calls if len(c) == 2]) >= 2)  # some are answered
        await system.engine.pause("abort", 10)
        await system.engine.resume(PolicyVersion(lineage, 4))
        values = await asyncio.wait_for(validating, 60)
        assert (values["validation/lineage"], values["validation/version"]) == (lineage, 4)
        answered = [c[0] for c in system.rewards.calls if len(c) == 2]
        assert set(answered) == {p.uid for p in system.prompts[:6]}
        if lineage:  # one version answers all
            assert values["validation/samples"] == 12
            assert len(answered) > 6
        else:  # each is answered once, and both versions are named
            assert values["validation/oldest_version"] == 0
            assert len(answered) == 6


async def test_a_validation_that_never_settles_on_one_lineage_fails(inputs):
    class Restless(SingleTurn):
        number = 0

        async def run(self, prompt, index, generate):
            Restless.number = number = Restless.number + 1
            sample = await super().run(prompt, index, generate)
            sample.sequences[0].spans[:] = [VersionSpan(0, PolicyVersion(number, 0))]
            return sample

    async with System(inputs, judge, agent_loop=Restless, total=0) as system:
        with pytest.raises(RuntimeError, match=rf"after {ROUNDS} rounds 1 of 2 prompts .* restored faster"):
            await system.validation.run(system.prompts[:2])
