"""Parts of the train loop, with fakes of its interfaces: staleness, rolling updates, validation, monitoring."""

import asyncio
import contextlib
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest

from asyncrl.config.checks import derive
from asyncrl.config.schema import Config, ValidationConfig
from asyncrl.observability.sinks.hub import Hub
from asyncrl.observability.telemetry.clock import ClockOffset, now_s
from asyncrl.observability.telemetry.recorder import Batch, Recorder
from asyncrl.param_sync.coordinator import ParameterSyncCoordinator
from asyncrl.param_sync.errors import ALL_REPLICAS, SyncError
from asyncrl.run.monitor import Monitor
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.sample_queue.messages import Drop, Lease, LeasedGroup, Ticket
from asyncrl.simulation.records import InMemoryRecords
from asyncrl.trainer.checkpoints import CheckpointStore
from asyncrl.trainer.loop import TrainLoop
from asyncrl.trainer.progress import Progress, TrainingState
from asyncrl.trainer.publisher import Publisher
from asyncrl.trainer.rolling_update import RollingUpdate
from asyncrl.trainer.staleness import StalenessError, batch_metrics, check_ages
from asyncrl.trainer.validation import ValidationSchedule
from asyncrl.types.groups import Group
from asyncrl.types.versions import PolicyVersion
from tests.support.in_memory import payload, put

# -- staleness ---------------------------------------------------------------------------------------------------------


def lease_of(*numbers: int, lineage: int = 0, mask_before: int | None = None) -> Lease:
    groups = [LeasedGroup(f"g{n}", PolicyVersion(lineage, n), 1.0, 2.0) for n in numbers]
    return Lease(tuple(groups), mask_before=mask_before)


def test_the_ages_of_a_batch_are_counted_in_versions():
    metrics = batch_metrics(lease_of(5, 6, 6, 7), PolicyVersion(1, 7), bound=2)
    assert [metrics[f"fully_async/staleness/groups_{age}"] for age in range(3)] == [1, 2, 1]
    assert metrics["fully_async/staleness/max"] == 2
    assert metrics["fully_async/staleness/mean"] == 1.0


def test_a_token_older_than_the_bound_is_never_trained():
    with pytest.raises(StalenessError, match=r"group g4 holds tokens of version 0\.4, the trainer is at 1\.7"):
        check_ages(9, lease_of(6, 4), PolicyVersion(1, 7), bound=2)


def test_tokens_that_are_masked_do_not_count_as_stale():
    check_ages(9, lease_of(6, 4, mask_before=5), PolicyVersion(1, 7), bound=2)
    metrics = batch_metrics(lease_of(6, 4, mask_before=5), PolicyVersion(1, 7), bound=2)
    assert metrics["fully_async/staleness/max"] == 2


def test_the_first_reason_to_stop_is_kept():
    state = TrainingState()
    state.stop("SIGTERM")
    state.stop("later")
    assert state.progress.stopped == "SIGTERM"


# -- a step in parts ---------------------------------------------------------------------------------------------------


class Parts:
    """Everything that the train loop drives but the queue: ranks that note the groups of each part, and the rest of it
    as little as possible."""

    def __init__(self) -> None:
        self.parts: list[list[str]] = []
        self.trained, self.goes_on, self.waiting = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.goes_on.set()

    async def train(self, step, payload, mask_before, version, part, parts):
        self.parts.append([Group.from_buffer(data).uid for data in payload])
        self.trained.set()
        await self.goes_on.wait()
        await asyncio.sleep(0.01)  # longer than an answer of the queue
        return {}, []

    async def __call__(self, version, on_sent):
        return {}

    async def someone_to_join(self):
        self.waiting.set()
        await asyncio.Event().wait()

    def stranded(self):
        return False

    async def on_step(self, progress, metrics):
        return metrics

    async def write(self, path):
        path.mkdir()
        (path / "state").touch()

    def __getattr__(self, name):  # calls without an effect here
        async def call(*arguments): ...

        return call


def in_parts(system: Parts, folder: Path) -> tuple[TrainLoop, SampleQueue]:
    """A train loop of up to three steps of four groups, each a part of its own, and its queue."""
    config = Config()
    config.trainer.total_steps, config.trainer.mini_batch_groups = 3, 4
    config.checkpoint.export_hf = "none"
    derived = derive(config)
    assert derived.parts == (1, 1, 1, 1)
    queue, recorder = SampleQueue(Admission(4, Fraction(0), 12), InMemoryRecords()), Recorder("driver")
    store = CheckpointStore(folder / "checkpoints", config.checkpoint)
    return TrainLoop(config, derived, queue, system, system, system, system, system, recorder, store), queue


@pytest.mark.parametrize("end", ["stop", "close"])
async def test_a_step_that_ends_between_its_parts_gives_its_groups_back(end, tmp_path):
    """By a stop, or because the prompts have ended."""
    system = Parts()
    loop, queue = in_parts(system, tmp_path)
    await loop.begin(None)
    running = asyncio.create_task(loop.run())
    await queue.issue([Ticket(uid, uid, 0, place) for place, uid in enumerate("abcd")], 4)
    await put(queue, [payload(uid, 0) for uid in "ac"])
    await asyncio.wait_for(system.trained.wait(), 60)
    await asyncio.sleep(0.05)  # it waits for b
    assert (queue.balance()["leased"], system.parts) == (1, [["a"]])
    if end == "stop":
        loop.stop("SIGINT")
    else:
        await queue.drop([Drop(uid, "none") for uid in "bd"])
        await queue.close("the prompts ended")
    progress = await asyncio.wait_for(running, 60)
    assert (progress.step, progress.stopped) == (0, "SIGINT" if end == "stop" else "the prompts ended")
    left = queue.balance()
    assert (left["queued"], left["leased"], left["trained"]) == (2, 0, 0)


async def _next(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 60)
    event.clear()


async def test_a_step_whose_groups_finish_while_it_trains_ends_after_a_stop(tmp_path):
    system = Parts()
    loop, queue = in_parts(system, tmp_path)
    system.goes_on.clear()
    await loop.begin(None)
    running = asyncio.create_task(loop.run())
    await queue.issue([Ticket(uid, uid, 0, place) for place, uid in enumerate("abcd")], 4)
    await put(queue, [payload("a", 0)])
    await asyncio.wait_for(system.trained.wait(), 60)
    await put(queue, [payload(uid, 0) for uid in "bcd"])
    loop.stop("SIGTERM")
    system.goes_on.set()
    progress = await asyncio.wait_for(running, 60)
    assert (progress.step, progress.stopped, system.parts) == (1, "SIGTERM", [["a"], ["b"], ["c"], ["d"]])


async def test_the_trainer_starves_while_it_waits_for_groups_and_does_not_train(tmp_path, monkeypatch):
    clock, system = [100.0], Parts()
    for module in ("trainer.loop", "sample_queue.core"):
        monkeypatch.setattr(f"asyncrl.{module}.now_s", lambda: clock[0])
    loop, queue = in_parts(system, tmp_path)
    system.goes_on.clear()
    await loop.begin(None)
    running = asyncio.create_task(loop.run())
    await queue.issue([Ticket(uid, uid, 0, place) for place, uid in enumerate("abcd")], 4)
    await _next(system.waiting)
    clock[0] += 3.0  # it waits for a
    await put(queue, [payload("a", 0)])
    await _next(system.trained)
    clock[0] += 10.0  # it trains, and a lease waits for b
    system.goes_on.set()
    await _next(system.waiting)
    clock[0] += 0.5  # it waits for b
    await put(queue, [payload(uid, 0) for uid in "bcd"])
    admitted = await asyncio.wait_for(queue.issue([Ticket("e", "e", 0, 4)], 1), 60)
    assert (admitted.number, admitted.starved_s) == (1, 3.5)
    loop.stop("SIGTERM")
    await asyncio.wait_for(running, 60)


# -- rolling updates ---------------------------------------------------------------------------------------------------


class Rolling:
    """A rolling update over a queue that logs its calls, and a sync whose phases the test ends."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.sent, self.synced = asyncio.Event(), asyncio.Event()
        self.failure: Exception | None = None
        self.update = RollingUpdate(self, self._sync, self._served)

    async def publish(self, version, trained=None, rolling=False, starved_s=0.0):
        self.log.append(f"published {version}{', rolling' if rolling else ''}")
        self.starved_s = starved_s

    async def retire_before(self, version):
        self.log.append(f"retired before {version}")

    async def _sync(self, version, sent):
        await self.sent.wait()
        if self.failure is not None:
            raise self.failure
        sent.set()
        await self.synced.wait()
        if self.failure is not None:
            raise self.failure
        self.log.append(f"synced {version}")
        return True

    async def _served(self, progress):
        self.log.append(f"served {progress.version}")


NEXT = Progress(step=3, version=PolicyVersion(0, 3))


async def test_groups_start_under_a_version_once_its_weights_are_sent_and_the_old_one_retires_after_the_last_replica():
    rolling = Rolling()
    rolling.sent.set()
    await asyncio.wait_for(rolling.update.start(NEXT, 4.0), 10)  # training continues
    assert (rolling.log, rolling.starved_s) == (["published 0.3, rolling"], 4.0)
    rolling.synced.set()
    await asyncio.wait_for(rolling.update.finish(), 10)
    assert rolling.log[1:] == ["synced 0.3", "retired before 0.3", "served 0.3"]
    assert rolling.update.under_way is None


async def test_a_rolling_update_that_fails_before_the_weights_are_sent_fails_at_its_start():
    rolling = Rolling()
    rolling.failure = RuntimeError("no sender")
    rolling.sent.set()
    with pytest.raises(RuntimeError, match="no sender"):
        await asyncio.wait_for(rolling.update.start(NEXT, 4.0), 10)
    assert rolling.log == []


async def test_a_rolling_update_that_fails_later_fails_at_its_finish():
    rolling = Rolling()
    rolling.sent.set()
    await asyncio.wait_for(rolling.update.start(NEXT, 4.0), 10)
    rolling.failure = RuntimeError("no replica")
    rolling.synced.set()
    with pytest.raises(RuntimeError, match="no replica"):
        await asyncio.wait_for(rolling.update.finish(), 10)
    assert rolling.log == ["published 0.3, rolling"]


# -- replicas that rejoin ----------------------------------------------------------------------------------------------


class OnlyReplica:
    """A sync whose one replica is out of service, and stays out when it rejoins."""

    def __init__(self) -> None:
        self.joined, self.renewed = asyncio.Event(), asyncio.Event()

    async def someone_to_join(self):
        await self.joined.wait()

    def joiners_seen(self):
        self.joined.clear()

    async def rejoin(self, version): ...

    async def renew(self):
        self.renewed.set()

    def stranded(self):
        return True


async def test_the_only_replica_is_restarted_if_its_rejoin_fails():
    """No batch would ever come, and so no next sync."""
    sync, state = OnlyReplica(), TrainingState()
    publisher = Publisher(state, None, None, sync, None, None, overlapped=False)
    publisher._served_version = state.progress.version
    leasing = asyncio.create_task(publisher.while_replicas_join(asyncio.Event().wait()))
    sync.joined.set()
    await asyncio.wait_for(sync.renewed.wait(), 10)
    leasing.cancel()


async def test_a_replica_that_joins_at_the_end_of_a_wait_is_not_forgotten():
    sync = ParameterSyncCoordinator(Config().param_sync, {}, {}, None, Recorder("driver"))
    publisher = Publisher(TrainingState(), None, None, sync, None, None, overlapped=False)
    batch = asyncio.get_running_loop().create_future()
    leasing = asyncio.create_task(publisher.while_replicas_join(batch))
    await asyncio.sleep(0.01)
    batch.set_result("a batch")
    sync.join("replica/0", None)
    assert await asyncio.wait_for(leasing, 10) == "a batch"
    await asyncio.wait_for(sync.someone_to_join(), 10)


class LosesItsReplicas:
    """Everything that a publisher drives; the first change-over to ``loses`` fails once ``failing`` is set, after the
    trainer went on. ``synced``: versions, and the groups in the weights that were sent under them."""

    def __init__(self, state: TrainingState, loses: PolicyVersion) -> None:
        self.state, self.loses = state, loses
        self.failing, self.joined = asyncio.Event(), asyncio.Event()
        self.synced: list[tuple[PolicyVersion, int]] = []
        self.published: list[PolicyVersion] = []

    async def __call__(self, version, on_sent):
        sent = self.state.progress.trained
        on_sent()
        if version == self.loses and not self.failing.is_set():
            await self.failing.wait()
            raise SyncError("load", ALL_REPLICAS, version, None, "no replica is left")
        self.synced.append((version, sent))
        return {}

    async def someone_to_join(self):
        await self.joined.wait()

    def joiners_seen(self):
        self.joined.clear()

    async def renew(self):
        self.joined.set()

    def stranded(self):
        return True

    async def publish(self, version, trained, rolling=False, starved_s=0.0):
        self.published.append(version)

    def __getattr__(self, name):  # calls without an effect here
        async def call(*arguments): ...

        return call


@pytest.mark.parametrize("trained", [1, 0])
async def test_weights_are_not_sent_again_under_a_version_that_the_trainer_may_have_left(trained):
    """All replicas fail in a change-over while training goes on: those that come after them get the weights of now as
    a version of their own."""
    state = TrainingState()
    system = LosesItsReplicas(state, loses=PolicyVersion(0, 1))
    publisher = Publisher(state, system, system, system, system, system, overlapped=True)
    await publisher.publish()
    state.next_version()
    await asyncio.wait_for(publisher.publish(), 10)
    leasing = asyncio.create_task(publisher.while_replicas_join(asyncio.Event().wait()))
    if trained:
        state.step_done(1, ["a"])
    system.failing.set()
    while len(system.published) < 3 or len(system.synced) < 2:
        await asyncio.sleep(0)
    assert system.synced == [(PolicyVersion(0, 0), 0), (PolicyVersion(1, 1), trained)]
    assert system.published == [PolicyVersion(0, 0), PolicyVersion(0, 1), PolicyVersion(1, 1)]
    leasing.cancel()
    await publisher.cancel()


# -- validations -------------------------------------------------------------------------------------------------------


class Validating:
    """A schedule over a rollouter whose validations the test ends; ``results``: the reported ones."""

    def __init__(self, tmp_path, **options) -> None:
        config = Config(validation=ValidationConfig(every_versions=2, **options))
        config.data.validation_files = ["some"]
        store = CheckpointStore(tmp_path, config.checkpoint)
        self.answer: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()
        self.first: list[bool] = []  # priorities asked for
        self.results: list[tuple] = []
        self.recorder = Recorder("driver")
        self.schedule = ValidationSchedule(config, self, store, self.recorder, self._report)

    def _report(self, progress, metrics, when):
        self.results.append((progress.version.number, when))

    async def validate(self):
        return await asyncio.shield(self.answer)

    async def set_validation_first(self, first):
        self.first.append(first)


def at(number: int, last: bool = False) -> Progress:
    return Progress(step=number, version=PolicyVersion(0, number), last=last)


async def test_validation_blocks_before_and_after_training_and_is_concurrent_in_between(tmp_path):
    run = Validating(tmp_path)
    first = asyncio.create_task(run.schedule.validate(at(0)))
    await asyncio.sleep(0)
    assert not first.done()
    run.answer.set_result({"validation/reward": 1.0})
    await asyncio.wait_for(first, 10)

    run.answer = asyncio.get_running_loop().create_future()
    await asyncio.wait_for(run.schedule.validate(at(1)), 10)  # not due
    await asyncio.wait_for(run.schedule.validate(at(2)), 10)
    assert run.results == [(0, "before")]
    syncing = asyncio.create_task(run.schedule.finished())
    while not run.first:
        await asyncio.sleep(0)
    assert not syncing.done()
    run.answer.set_result({"validation/reward": 2.0})
    await asyncio.wait_for(syncing, 10)
    await asyncio.wait_for(run.schedule.validate(at(3, last=True)), 10)
    assert run.results == [(0, "before"), (2, None), (3, "after")]
    while run.first[-1]:  # the default order is restored
        await asyncio.sleep(0)


async def test_slow_agents_hold_up_a_sync_for_a_while_only_and_the_next_validation_is_left_out(tmp_path):
    run = Validating(tmp_path, hold_s=0.05)
    run.answer.set_result({"validation/reward": 1.0})
    await run.schedule.validate(at(0))
    run.answer = asyncio.get_running_loop().create_future()
    await run.schedule.validate(at(2))
    await asyncio.wait_for(run.schedule.finished(), 10)  # though it has not ended
    await run.schedule.validate(at(4))
    while run.first[-1]:  # the default order is restored
        await asyncio.sleep(0)
    assert run.recorder.drain().counters["validation/left_out"] == 1
    running = asyncio.create_task(run.schedule.run())
    run.answer.set_result({"validation/reward": 2.0})
    while len(run.results) < 2:
        await asyncio.sleep(0)
    assert run.results == [(0, "before"), (2, None)]
    running.cancel()


async def test_a_failed_concurrent_validation_ends_the_run(tmp_path):
    run = Validating(tmp_path)
    run.answer.set_result({})
    await run.schedule.validate(at(0))
    run.answer = asyncio.get_running_loop().create_future()
    await run.schedule.validate(at(2))
    running = asyncio.create_task(run.schedule.run())
    run.answer.set_exception(RuntimeError("no prompt was answered"))
    with pytest.raises(RuntimeError, match="no prompt was answered"):
        await asyncio.wait_for(running, 10)


# -- monitoring --------------------------------------------------------------------------------------------------------


class System:
    """A system of one rank and one replica, as a monitor sees it; ``drains``: calls that drain their recorders."""

    rank_names, replica_names = ("trainer/0",), ("replica/0",)

    def __init__(self, **drains) -> None:
        self.queue = self.ranks = self
        self._drains = drains
        self.groups = dict.fromkeys(("count/queued", "count/leased", "count/trained", "count/dropped"), 0)

    async def stats(self):
        groups = {f"fully_async/{name}": count for name, count in self.groups.items()}
        return {"fully_async/queue/depth": 0, "fully_async/in_flight": 0, **groups}

    def pool_resources(self):
        return 1.0, 1.0, "CPU"

    def drains(self):
        return self._drains


async def monitored(rank: Recorder, replica: Recorder, clocks: Sequence[float] = (0.0, 0.0), **others) -> Monitor:
    """A monitor of these two actors, at the first version. ``clocks``: how far those of their machines are ahead."""
    config = Config()
    config.reporting.trajectories_per_step = 0

    async def drained(recorder, ahead_s):
        return recorder.drain().shifted(ahead_s)

    system = System(rank=lambda: drained(rank, clocks[0]), replica=lambda: drained(replica, clocks[1]), **others)
    monitor = Monitor(config, Hub([]), Recorder("driver"), system, str, None)
    await monitor.on_version(at(0))
    return monitor


def be_busy(rank: Recorder, replica: Recorder, times: int) -> float:
    """A train step in which the replica's slots are busy ``times`` times; returns for how many seconds in all."""
    busy_s = 0.0
    with rank.span("trainer/step"):
        for _ in range(times):
            start_s, end_s = now_s(), now_s()
            replica.add_span("rollout/half_busy", start_s, end_s)
            busy_s += end_s - start_s
    return busy_s


async def test_a_step_is_reported_with_the_metrics_of_its_window():
    rank, replica = Recorder("trainer/0"), Recorder("replica/0")
    monitor = await monitored(rank, replica)
    with rank.span("trainer/step"), replica.span("rollout/generate"), replica.span("rollout/reward"):
        replica.count("rollout/tokens", 70)
        await asyncio.sleep(0.01)
    values = await monitor.on_step(at(1), {"trainer/trained_tokens": 60.0, "trainer/tokens": 80.0})
    assert values["fully_async/version"] == 1
    assert values["perf/rollout_tokens_per_s"] * values["perf/step_s"] == pytest.approx(70)
    assert 0 < values["perf/fraction_of_ideal"] <= 1
    assert 0 <= values["fully_async/trainer/idle_ratio"] < 1
    assert 0 < values["fully_async/rewarding_ratio"] <= 1


@pytest.mark.parametrize("clocks", [(0.0, 0.0), (3e6, -2e6), (-40.0, 7.0)])
async def test_actors_on_machines_with_other_clocks_are_busy_as_they_were(clocks, monkeypatch):
    rank, replica, written = Recorder("trainer/0"), Recorder("replica/0"), []
    monitor = await monitored(rank, replica, clocks)
    monkeypatch.setattr(monitor._hub, "spans", lambda batch: written.extend(batch.spans))
    for step in range(1, 4):
        began_s = now_s()
        with rank.span("trainer/step"), replica.span("rollout/generate"), replica.span("rollout/half_busy"):
            await asyncio.sleep(0.05)
        values = await monitor.on_step(at(step), {})
        for share in ("fully_async/trainer/idle_ratio", "fully_async/rollouter/idle_ratio"):
            assert values[share] < 0.5
        assert values["fully_async/overlap"] > 0.5
        assert all(began_s - 0.02 < span.start_s < span.end_s < now_s() + 0.02 for span in written)
        written.clear()


async def late(answers: asyncio.Event) -> Batch:
    await answers.wait()
    return Recorder("replica/2").drain()


async def test_groups_that_were_generated_and_dropped_count_as_generation():
    rank, replica = Recorder("trainer/0"), Recorder("replica/0")
    monitor = await monitored(rank, replica)
    with rank.span("trainer/step"), replica.span("rollout/generate"):
        await asyncio.sleep(0.05)
    replica.count("rollout/tokens", 1000)
    # of eight that were generated half are kept
    monitor._system.groups = {"count/queued": 1, "count/leased": 1, "count/trained": 2, "count/dropped": 6}
    monitor._system.groups |= {"dropped/zero_variance": 4, "dropped/prompt_too_long": 2}
    values = await monitor.on_step(at(1), {"trainer/trained_tokens": 100})
    busy = 1 - values["fully_async/rollouter/idle_ratio"]
    assert values["perf/rollout_alone_tokens_per_s"] == pytest.approx(values["perf/rollout_tokens_per_s"] / busy / 2)


async def test_a_removed_replica_leaves_the_sinks(monkeypatch):
    monitor, left = await monitored(Recorder("trainer/0"), Recorder("replica/0")), []
    monkeypatch.setattr(monitor._hub, "left", left.append)
    monitor._system.replica_names = ("replica/0", "replica/1", "replica/2")
    slow = asyncio.Event()
    monitor._system._drains["replica/2"] = lambda: late(slow)
    await monitor.on_step(at(1), {})
    monitor._system.replica_names = ("replica/0",)
    del monitor._system._drains["replica/2"]
    await monitor.on_step(at(2), {})
    assert left == ["replica/1"]
    slow.set()
    for step in (3, 4):
        await monitor.on_step(at(step), {})
    assert left == ["replica/1", "replica/2"]  # after its last answer


async def test_an_actor_that_does_not_answer_makes_no_other_seem_idle():
    rank, replica = Recorder("trainer/0"), Recorder("replica/0")
    monitor = await monitored(rank, replica, stopped=asyncio.Event().wait)
    with rank.span("trainer/step"), replica.span("rollout/generate"):
        for step in (1, 2):
            await asyncio.sleep(0.05)
            values = await monitor.on_step(at(step), {})
            assert values["fully_async/trainer/idle_ratio"] < 0.2
            assert values["fully_async/rollouter/idle_ratio"] < 0.2


def test_a_clock_offset_is_bounded_by_the_calls_that_read_the_clock():
    same = ClockOffset()
    assert same.observe(10.0, 10.4, 11.0) == same.observe(12.0, 12.001, 12.002) == 0.0
    other = ClockOffset()
    assert other.observe(10.0, 510.5, 11.0) == pytest.approx(-499.5)
    assert other.observe(12.0, 512.2, 12.1) == pytest.approx(-500.1)  # of a faster call: -500.2 to -500.1
    assert other.observe(20.0, 520.5, 21.0) == pytest.approx(-500.1)  # nothing new
    assert other.observe(22.0, 522.0, 22.01) == pytest.approx(-500.0)  # the clocks drift
    assert other.observe(30.0, 90.0, 31.0) == pytest.approx(-60.0)  # restarted elsewhere


async def test_a_step_of_several_data_sources_is_reported_by_source():
    rank, replica = Recorder("trainer/0"), Recorder("replica/0")
    monitor = await monitored(rank, replica)
    for step, source in enumerate(("sums", "words", "sums"), start=1):
        for figure, total in (("samples", 4), ("reward", 3.0), ("success", 2), ("response_tokens", 40)):
            replica.count(f"rollout/source/{source}/{figure}", total)
        values = await monitor.on_step(at(step), {})
        found = {name.split("/")[2]: value for name, value in values.items() if name.endswith("/reward")}
        assert found == ({source: 0.75} if step > 1 else {})  # one source says nothing that all samples do not


async def test_the_curriculum_is_reported_with_each_step():
    rank, replica = Recorder("trainer/0"), Recorder("replica/0")
    monitor = await monitored(rank, replica)
    replica.gauge("rollout/curriculum/hard/share", 0.25)
    for step in (1, 2):
        assert (await monitor.on_step(at(step), {}))["rollout/curriculum/hard/share"] == 0.25


async def test_the_overlap_is_that_of_each_step_however_many_spans_it_has():
    rank, replica = Recorder("trainer/0"), Recorder("replica/0")
    monitor = await monitored(rank, replica)
    for step in range(1, 5):
        busy_s = be_busy(rank, replica, times=8_000)
        values = await monitor.on_step(at(step), {})
        assert values["fully_async/overlap"] * values["perf/step_s"] == pytest.approx(busy_s)


async def test_the_monitor_keeps_no_spans_of_earlier_steps():
    rank, replica = Recorder("trainer/0"), Recorder("replica/0")
    monitor = await monitored(rank, replica)

    async def traced_bytes(steps: range) -> int:
        for step in steps:
            be_busy(rank, replica, times=1_000)
            await monitor.on_step(at(step), {})
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = await traced_bytes(range(1, 6))
        assert await traced_bytes(range(6, 16)) < before + 200_000
    finally:
        tracemalloc.stop()


async def test_the_monitor_reports_an_unresponsive_actor_and_does_not_kill_it():
    config = Config()
    config.supervision.answer_s = 0.01
    reported: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

    async def on_unresponsive(name: str, why: str) -> None:
        reported.set_result((name, why))

    monitor = Monitor(config, Hub([]), Recorder("driver"), System(rank=asyncio.Event().wait), str, on_unresponsive)
    running = asyncio.create_task(monitor.run())
    name, why = await asyncio.wait_for(reported, 10)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert name == "rank"
    assert why.startswith("has not answered for 0.01 s")
