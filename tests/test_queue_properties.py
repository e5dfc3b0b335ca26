"""Admission, queue and ledger over random histories of runs.

After every event all groups are accounted for, none is in the weights twice, and no trained token is too old. From
every state the next batch can be reached."""

import asyncio
import contextlib
import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.sample_queue.group_state import GroupTable, QueueError
from asyncrl.sample_queue.journal import Journal
from asyncrl.sample_queue.messages import Admitted, Drop, Refusal, Snapshot, Ticket
from asyncrl.sample_queue.records import IN_FLIGHT, LEASED, QUEUED, TRAINED, JournalError
from asyncrl.sample_queue.schedule import Schedule
from asyncrl.sample_queue.versions import VersionTable
from asyncrl.simulation.records import InMemoryRecords
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan

EVENTS = 200  # per history, at least


@dataclass(frozen=True)
class Setting:
    """Options of a run; G is ``batch · trigger``."""

    order: str
    overdue: str
    threshold: str
    trigger: int
    batch: int

    @cached_property
    def per_version(self) -> int:
        return self.batch * self.trigger

    @cached_property
    def bound(self) -> int:
        return math.ceil(Fraction(self.threshold))

    @cached_property
    def budget(self) -> Fraction:
        """A group may start under version v while fewer groups than this were issued beyond T(v)."""
        return (1 + Fraction(self.threshold)) * self.per_version


SETTINGS = st.builds(
    Setting,
    st.sampled_from(["fifo", "ready_first"]),
    st.sampled_from(["wait", "mask", "drop"]),
    st.sampled_from(["0", "0.1", "0.5", "1", "1.5", "3"]),
    st.integers(1, 3),
    st.integers(1, 4),
)


NEVER = PolicyVersion(10**6, 0)  # no history reaches it
ATTEMPTS = 3


class WouldWait(AssertionError):
    """Raised instead of waiting; fails a history that does not expect it."""


async def impatient(predicate) -> None:
    """Raises WouldWait instead of waiting."""
    if not predicate():
        raise WouldWait


@lru_cache(100_000)
def payload(uid: str, spans: tuple[tuple[PolicyVersion, bool], ...], attempt: int = 0) -> bytes:
    """A group of one sample with one token per span; the flag is its loss mask."""
    sample = Sample.single(
        0,
        np.ones(len(spans), np.int32),
        np.zeros(len(spans), np.float32),
        np.array([trained for _, trained in spans]),
        [VersionSpan(i, version) for i, (version, _) in enumerate(spans)],
        FinishReason.STOP,
        reward=0.0,
    )
    return Group.from_samples(uid, uid, 0, np.ones(1, np.int32), [sample], attempt=attempt).to_bytes()


@dataclass
class Made:
    """A group in the test's model. ``number``: version number from which its deadline counts."""

    uid: str
    number: int
    spans: list[PolicyVersion]
    tokens: tuple[tuple[PolicyVersion, bool], ...] = ()
    snapshot: list[PolicyVersion] | None = None
    attempt: int = 0

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.uid, self.uid, 0, int(self.uid[1:]))


@dataclass(frozen=True)
class Checkpoint:
    step: int
    number: int
    trained_at_publish: int
    setting: Setting


@dataclass
class History:
    """A run with random pools: its events, the expected answer to each, and an independent model of every group's
    state."""

    setting: Setting
    random: Random
    records: object
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.total = self.setting.batch * self.random.randint(10, 60)
        self.made: dict[str, Made] = {}
        self.live: dict[str, str] = {}  # uid → state of groups neither dropped nor final, in order of issue
        self.dropped: Counter[str] = Counter()
        self.final = 0
        self.weights: list[list[str]] = []  # batch of each step in the weights
        self.replay: dict[int, list[str]] = {}  # batches that a restore removed from the weights
        self.held: list[str] | None = None  # lease of the current step
        self.version = PolicyVersion(0, 0)
        self.served: dict[PolicyVersion, int] = {}  # version → groups trained when it was published
        self.again: list[str] = []  # in flight; must be issued again first
        self.gone: list[str] = []  # dropped as overdue; the rollouter does not know yet
        self.checkpoints = [Checkpoint(0, 0, 0, self.setting)]
        self.changed = False
        self.last = None  # the last call and its answer
        self.start_queue()

    def start_queue(self) -> None:
        s = self.setting
        admission = Admission(s.per_version, Fraction(s.threshold), self.total)
        self.queue = SampleQueue(admission, self.records, s.order, s.overdue, max_attempts=ATTEMPTS)
        self.queue._wait_until = impatient
        self.again = [uid for uid in self.again if uid in self.live]

    async def call(self, method: str, *args):
        answer = await getattr(self.queue, method)(*args)
        self.last = method, args, answer
        return answer

    async def must_wait(self, call) -> None:
        try:
            answer = await call
        except WouldWait:
            return
        raise AssertionError(f"expected the call to wait, found {answer}")

    # -- model of the run ------------------------------------------------------------------------------------------

    @property
    def trained(self) -> int:
        return sum(map(len, self.weights))

    @property
    def consumed(self) -> bool:
        """True if the current version has consumed its groups: the next step needs a sync."""
        return self.trained - self.served[self.version] >= self.setting.per_version

    def uids(self, *states: str) -> list[str]:
        return [uid for uid, state in self.live.items() if state in states]

    @property
    def in_flight(self) -> list[str]:
        return [uid for uid in self.uids(IN_FLIGHT) if uid not in self.again]

    def deadline(self, uid: str) -> int:
        return self.made[uid].number + self.setting.bound

    @property
    def oldest(self) -> PolicyVersion:
        return next(iter(self.served))

    def may_start(self, before: int) -> bool:
        """Admission rule (invariant 4) for a group with ``before`` others ahead of it that are not dropped."""
        trained = self.served[self.oldest]
        return before - trained < self.setting.budget and before < self.total

    def all_in_time(self, numbers) -> bool:
        """True if groups of these versions can be trained by their deadlines in the best order."""
        trained = self.trained + len(self.held or []) - self.served[self.version]
        return all(
            self.version.number + (trained + i) // self.setting.per_version <= number + self.setting.bound
            for i, number in enumerate(sorted(numbers))
        )

    def check(self) -> None:
        """Queue, ledger and model agree."""
        found = self.records.recover()
        assert [(g.uid, g.state) for g in found.groups] == list(self.live.items())
        assert (found.dropped, found.final, found.issued) == (self.dropped, self.final, len(self.made))
        states = Counter(self.live.values())
        assert self.queue.balance() == {
            "issued": len(self.made),
            "trained": states[TRAINED] + self.final,
            "queued": states[QUEUED],
            "leased": states[LEASED],
            "in_flight": states[IN_FLIGHT],
            "dropped": self.dropped.total(),
        }
        trained = found.final + sum(group.state == TRAINED for group in found.groups)
        assert trained == self.trained == states[TRAINED] + self.final

    # -- events: each returns whether it could happen ---------------------------------------------------------------

    async def issue(self, count: int | None = None) -> bool:
        new = len(self.made)
        uids = [*self.again, *(f"g{i}" for i in range(new, new + 4))][: count or self.random.randint(1, 4)]
        places = {uid: i for i, uid in enumerate(self.uids(IN_FLIGHT, QUEUED, LEASED), start=self.trained)}
        front = len(places) + self.trained
        start: list[str] = []
        numbers = {uid: self.made[uid].number for uid in self.uids(IN_FLIGHT, QUEUED)}
        for uid in uids:
            if uid in self.again and uid not in self.live:
                continue
            if uid not in places:
                admitted = self.may_start(front)
                front += 1
            elif (self.setting.order, self.setting.overdue) != ("ready_first", "wait"):
                admitted = self.may_start(places[uid])
            else:
                before, numbers[uid] = numbers[uid], min(numbers[uid], self.oldest.number)
                admitted = numbers[uid] == before or self.all_in_time(numbers.values())
            if not admitted:
                break
            start.append(uid)
        passed = [uid for uid in uids if uid in self.again and uid not in self.live]
        tickets = [Ticket(uid, uid, 0, int(uid[1:])) for uid in uids]
        issued = new + sum(uid not in self.live for uid in start)
        admitted = Admitted(start, passed, issued, self.version.number if self.served else None)
        if not (start or passed):
            await self.must_wait(self.queue.issue(tickets, len(tickets)))
            assert await self.call("put_and_issue", [], tickets, len(tickets)) == ([], admitted)
            return False
        if self.random.random() < 0.5:
            assert await self.call("issue", tickets, len(tickets)) == admitted
        else:
            assert await self.call("put_and_issue", [], tickets, len(tickets)) == ([], admitted)
        self.again = [uid for uid in self.again if uid not in passed]
        for uid in start:
            spans = [self.random.choice(list(self.served))]
            if uid not in self.live:
                self.made[uid], self.live[uid] = Made(uid, self.oldest.number, spans), IN_FLIGHT
                continue
            self.again.remove(uid)
            group = self.made[uid]
            group.number = min(group.number, self.oldest.number)
            group.spans = [*group.snapshot, *spans] if group.snapshot and self.random.random() < 0.5 else spans
        return True

    async def put(self, uids: list[str] | None = None) -> bool:
        in_flight = self.in_flight
        uids = uids or self.random.sample(in_flight, min(len(in_flight), self.random.randint(1, 4)))
        if not uids:
            return False
        late = self.gone[: self.random.randint(0, 1)]  # a group that was cancelled meanwhile changes nothing
        groups = [self.finish(uid) for uid in [*late, *uids]]
        await self.call("put_and_issue", groups, [], 1)
        self.live |= dict.fromkeys(uids, QUEUED)
        await self.notice_overdue()
        return True

    def finish(self, uid: str) -> bytes:
        """Payload with tokens of the group's first version and of some later ones, a few of them not trained."""
        group = self.made[uid]
        first = group.spans[-1]
        since = [v for v in self.served if v > first]
        versions = [*group.spans, *sorted(self.random.sample(since, self.random.randint(0, len(since))))]
        flags = [self.random.random() < 0.8 for _ in versions]
        flags[self.random.randrange(len(flags))] = True
        group.tokens = tuple(zip(versions, flags, strict=True))
        return payload(uid, group.tokens, group.attempt)

    async def refuse(self) -> bool:
        """Put a group of an unknown version: it is refused and keeps its place; the third time it is dropped."""
        if not self.in_flight:
            return False
        group = self.made[self.random.choice(self.in_flight)]
        damaged = payload(group.uid, ((NEVER, True),), group.attempt)
        group.attempt += 1
        poison = group.attempt == ATTEMPTS
        expected = Refusal(group.uid, "unknown_version", None if poison else group.attempt)
        refusals, _ = await self.call("put_and_issue", [damaged], [], 1)
        assert refusals == [expected]
        group.snapshot = None
        if poison:
            del self.live[group.uid]
            self.dropped["poison"] += 1
        return True

    async def drop(self) -> bool:
        if not self.in_flight:
            return False
        uid, reason = self.random.choice(self.in_flight), self.random.choice(["zero_variance", "generation_failed"])
        await self.call("drop", [Drop(uid, reason), *(Drop(uid, "late") for uid in self.gone[:1])])
        del self.live[uid]
        self.dropped[reason] += 1
        return True

    async def snapshot(self) -> bool:
        if not self.in_flight:
            return False
        group = self.made[self.random.choice(self.in_flight)]
        late = [Snapshot(uid, 0, 0, b"late") for uid in self.gone[:1]]
        await self.call("snapshot", [Snapshot(group.uid, group.attempt, 0, b"tokens so far"), *late])
        group.snapshot = list(group.spans)
        return True

    async def lease(self) -> bool:
        """The rest of the step's batch, or a part of it."""
        held = self.held or []
        left = self.setting.batch - len(held)
        if not left or self.consumed or self.trained >= self.total:
            return False
        step, number, count = len(self.weights) + 1, self.version.number, self.random.randint(1, left)
        expected = self.batch(count)
        try:
            lease, payloads = await self.call("lease", step, count, held)
        except WouldWait:
            assert expected is None or (self.setting.order == "ready_first" and self.setting.overdue == "wait")
            return False
        uids = [group.uid for group in lease.groups]
        assert uids == expected
        self.held = held + uids
        if self.setting.order == "fifo" and step in self.replay:
            assert self.held == self.replay[step][: len(self.held)]
            if count == left:
                self.replay.pop(step)
        assert payloads == [payload(uid, self.made[uid].tokens, self.made[uid].attempt) for uid in uids]
        below = lease.mask_before if self.setting.overdue == "mask" else None
        for uid in uids:
            numbers = [version.number for version, trained in self.made[uid].tokens if trained]
            taken = [n for n in numbers if below is None or n >= below]
            assert taken, f"no token of {uid} is left to train"
            assert min(taken) >= number - self.setting.bound
        self.live |= dict.fromkeys(uids, LEASED)
        return True

    def batch(self, count: int) -> list[str] | None:
        """The next groups, if all of them are finished."""
        ready = self.uids(IN_FLIGHT, QUEUED)
        if self.setting.order == "ready_first":
            ready = sorted(self.uids(QUEUED), key=self.deadline)  # stable: equal deadlines in order of issue
        ready = ready[:count]
        whole = len(ready) == count and all(self.live[uid] == QUEUED for uid in ready)
        return ready if whole else None

    async def train(self) -> bool:
        if len(self.held or []) < self.setting.batch:
            return False
        await self.call("trained", len(self.weights) + 1)
        assert not set(self.held) & {uid for batch in self.weights for uid in batch}
        self.weights.append(self.held)
        self.live |= dict.fromkeys(self.held, TRAINED)
        self.held = None
        return True

    async def release(self) -> bool:
        if not self.held:
            return False
        await self.call("release", len(self.weights) + 1)
        self.live |= dict.fromkeys(self.held, QUEUED)
        self.held = None
        return True

    async def publish(self, rolling: bool | None = None) -> bool:
        """Sync after the last groups of a version; a failed sync would change nothing here."""
        if self.held or not self.consumed:
            return False
        rolling = self.random.random() < 0.4 if rolling is None else rolling
        await self.commit(PolicyVersion(self.version.lineage, self.version.number + 1), None, rolling)
        return True

    async def commit(self, version: PolicyVersion, trained: int | None, rolling: bool) -> None:
        await self.call("publish", version, trained, rolling)
        self.version = version
        self.served = {**(self.served if rolling else {}), version: self.trained if trained is None else trained}
        await self.notice_overdue()

    async def notice_overdue(self) -> None:
        """Note groups that the queue dropped as overdue: never under `wait` or fifo while G is unchanged."""
        left = {group.uid for group in self.records.recover().groups}
        if late := [uid for uid in self.live if uid not in left]:
            assert self.changed or (self.setting.order == "ready_first" and self.setting.overdue != "wait")
            self.dropped["overdue"] += len(late)
            cancelled = [uid for uid in late if self.live.pop(uid) == IN_FLIGHT]
            if cancelled:
                assert sorted(await self.queue.overdue()) == sorted(cancelled)
            self.gone += [uid for uid in cancelled if uid not in self.again]
            if self.random.random() < 0.5:  # the rollouter may learn of it too late
                self.again = [uid for uid in self.again if uid in self.live]
            self.replay = {}  # later groups move up

    async def retire(self) -> bool:
        if len(self.served) < 2:
            return False
        await self.call("retire_before", list(self.served)[1])
        del self.served[next(iter(self.served))]
        return True

    async def checkpoint(self) -> bool:
        step = len(self.weights)
        if self.held or step == self.checkpoints[-1].step:
            return False
        taken = Checkpoint(step, self.version.number, self.served[self.version], self.setting)
        self.checkpoints = [self.checkpoints[-1], taken]
        await self.call("covered", self.checkpoints[0].step)
        for uid in [uid for batch in self.weights[: self.checkpoints[0].step] for uid in batch]:
            if self.live.pop(uid, None):
                self.final += 1
        return True

    async def restore(self) -> bool:
        """Restore a checkpoint after the death of a rank or of the run, sometimes with another batch size."""
        back = self.random.choice(self.checkpoints)
        old = self.setting
        if self.random.random() < 0.3:
            self.setting = Setting(
                old.order, old.overdue, old.threshold, self.random.randint(1, 3), self.random.randint(1, 4)
            )
        trained = sum(map(len, self.weights[: back.step]))
        if self.setting is not old or (self.total - trained) % self.setting.batch:
            self.total = trained + self.setting.batch * self.random.randint(5, 40)
            self.start_queue()
        self.checkpoints = self.checkpoints[: self.checkpoints.index(back) + 1]
        last = self.version
        assert await self.call("rollback", back.step) == last
        self.replay = dict(enumerate(self.weights[back.step :], start=back.step + 1))
        for uid in [*(self.held or []), *(uid for batch in self.weights[back.step :] for uid in batch)]:
            self.live[uid] = QUEUED
        self.weights, self.held = self.weights[: back.step], None
        await self.must_wait(self.queue.issue([Ticket("before the next version", "", 0, len(self.made))], 1))
        self.check()
        same = self.setting == back.setting
        self.changed |= not same
        if any(len(uids) != self.setting.batch for uids in self.replay.values()):
            self.replay = {}
        version = PolicyVersion(last.lineage + 1, back.number)
        await self.commit(version, back.trained_at_publish if same else None, rolling=False)
        return await self.restart_rollouter()

    async def restart_rollouter(self) -> bool:
        found = await self.queue.recover()
        self.again, self.gone = self.uids(IN_FLIGHT), []
        assert [(g.uid, bool(g.snapshot)) for g in found.in_flight] == [
            (uid, self.made[uid].snapshot is not None) for uid in self.again
        ]
        assert found.last_uid == (f"g{len(self.made) - 1}" if self.made else None)
        return True

    async def restart_queue(self) -> bool:
        """The process is killed before it answers the last call, which is repeated."""
        self.start_queue()
        method, args, answer = self.last or (None, (), None)
        admitted = answer[1] if method == "put_and_issue" else answer
        if isinstance(admitted, Admitted) and not all(uid in self.live for uid in admitted.started):
            return True  # a group was dropped since; the caller learns of it before it repeats the call
        if method is not None:
            again = await self.call(method, *args)
            if method == "lease":  # its groups' times are not repeated exactly
                (answer, payloads), (lease, same) = answer, again
                assert [g.uid for g in lease.groups] == [g.uid for g in answer.groups]
                assert same == payloads
            elif method == "put_and_issue":  # groups dropped as poison are not reported again
                assert again == ([refusal for refusal in answer[0] if refusal.attempt is not None], admitted)
            else:
                assert again == answer, method
        return True

    # -- a whole history -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        await self.commit(self.version, None, rolling=False)
        weights = {
            self.issue: 5,
            self.put: 9,
            self.lease: 6,
            self.train: 6,
            self.publish: 4,
            self.drop: 1,
            self.refuse: 1,
            self.snapshot: 1,
            self.release: 0.5,
            self.retire: 2,
            self.checkpoint: 1,
            self.restart_rollouter: 0.4,
            self.restart_queue: 0.6,
            self.restore: 0.4,
        }
        events, chances = list(weights), list(accumulate(weights.values()))
        happened = 0
        while happened < EVENTS:
            if self.trained >= self.total:
                self.total += 5 * self.setting.batch  # resumed as a longer run
                self.start_queue()
                self.last = None
            event = self.random.choices(events, cum_weights=chances)[0]
            if await event():
                happened += 1
                self.log.append(event.__name__)
                self.check()
        await self.proceed()

    async def proceed(self) -> None:
        """Check that from any state, if groups in flight finish, the next batches can be leased until none are left."""
        until = min(self.total, self.trained + 3 * self.setting.per_version)
        while self.trained < until:
            if await self.retire() or await self.train() or await self.lease() or await self.publish(rolling=False):
                continue
            moved = await self.issue(4)
            if in_flight := self.in_flight:
                moved |= await self.put(in_flight)
            assert moved, "deadlock: nothing is in flight, nothing may start, and there is no batch"
        self.check()


def step_through(history) -> None:
    """Run a coroutine that never waits, without the cost of an event loop."""
    with contextlib.suppress(StopIteration):
        while True:
            history.send(None)


def everything(histories: int):
    """Run this many histories over all settings. Setting and seed identify a history, so there is no shrinking."""

    def decorate(test):
        health = list(HealthCheck)
        test = given(SETTINGS, st.integers(0, 2**32))(test)
        return settings(
            max_examples=histories, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=health
        )(test)

    return decorate


def in_memory(setting: Setting, seed: int) -> None:
    step_through(History(setting, Random(seed), InMemoryRecords()).run())


@everything(400)
def test_invariants_hold_after_every_event(setting, seed):
    in_memory(setting, seed)


@everything(8)
def test_invariants_hold_with_the_ledger_on_disk(setting, seed):
    async def on_disk(folder: Path) -> None:
        journal = Journal(folder)
        try:
            await History(setting, Random(seed), journal).run()
        finally:
            await journal.close()

    with TemporaryDirectory() as folder:
        asyncio.run(on_disk(Path(folder)))


# -- injected bugs: the histories detect each of them -----------------------------------------------------------------


def budget_too_large(patch) -> None:
    """One group more than the budget may start: <= instead of <."""
    limit = Admission.limit
    patch.setattr(Admission, "limit", lambda self, trained: limit(self, trained) + 1)


def budget_counts_from_now(patch) -> None:
    """T(v) is the number of groups trained by now, not by the time v was published."""

    async def trained(self, step, original=SampleQueue.trained):
        await original(self, step)
        if version := self._versions.current:
            self._versions.served[version] = self._table.trained

    patch.setattr(SampleQueue, "trained", trained)


def drops_keep_their_places(patch) -> None:
    """Dropped groups still count as issued."""
    patch.setattr(GroupTable, "held", property(lambda self: self.issued))


def drops_count_twice(patch) -> None:
    """A dropped group makes room for two."""
    patch.setattr(GroupTable, "held", property(lambda self: self.issued - 2 * self.dropped.total()))


def released_groups_queue_up_again(patch) -> None:
    """An abandoned lease returns to the end of the order."""

    def release(self, step, original=GroupTable.release):
        uids = [group.uid for group in self.leased_to(step)]
        original(self, step)
        for uid in uids:
            group = self.open.pop(uid)
            self.open[uid] = group._replace(seq=group.seq + 1_000_000)

    patch.setattr(GroupTable, "release", release)


def rollback_forgets_leases(patch) -> None:
    """A restore requeues trained groups, but not leased ones."""
    undone = GroupTable._undone_by_rollback
    patch.setattr(
        GroupTable, "_undone_by_rollback", lambda self, step: [g for g in undone(self, step) if g.state != LEASED]
    )


def rollback_keeps_what_was_trained(patch) -> None:
    """A restore leaves provisional groups trained, although they are no longer in the weights."""
    undone = GroupTable._undone_by_rollback
    patch.setattr(
        GroupTable, "_undone_by_rollback", lambda self, step: [g for g in undone(self, step) if g.state != TRAINED]
    )


def restored_version_begins_now(patch) -> None:
    """A restored version's T is the number of groups trained by now, not when its number was first published."""

    async def publish(self, version, trained=None, rolling=False, starved_s=0.0, original=SampleQueue.publish):
        return await original(self, version, None, rolling)

    patch.setattr(SampleQueue, "publish", publish)


def mask_one_version_late(patch) -> None:
    """Tokens that are one version too old are not masked."""
    mask_before = Schedule.mask_before
    patch.setattr(Schedule, "mask_before", lambda self: None if (n := mask_before(self)) is None else n - 1)


def ready_groups_always_fit(patch) -> None:
    """`ready_first` takes finished groups, even if those in flight can then not be trained in time."""
    patch.setattr(Admission, "fits", lambda self, outstanding, number, consumed: True)


def second_starts_are_free(patch) -> None:
    """Groups in flight start again after a restore without admission."""
    patch.setattr(Schedule, "_startable_again", lambda self, groups, oldest: len(groups))


def restart_forgets_old_versions(patch) -> None:
    """A queue restarted during a rolling update forgets older versions that are still served."""

    def initialize(self, *args, original=VersionTable.__init__):
        original(self, *args)
        for version in list(self.served)[:-1]:
            del self.served[version]

    patch.setattr(VersionTable, "__init__", initialize)


BUGS = [
    budget_too_large,
    budget_counts_from_now,
    drops_keep_their_places,
    drops_count_twice,
    released_groups_queue_up_again,
    rollback_forgets_leases,
    rollback_keeps_what_was_trained,
    restored_version_begins_now,
    mask_one_version_late,
    ready_groups_always_fit,
    second_starts_are_free,
    restart_forgets_old_versions,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_histories_detect_an_injected_bug(bug, monkeypatch):
    bug(monkeypatch)
    random = Random(0)
    kinds = [("fifo", "wait"), ("ready_first", "wait"), ("ready_first", "mask"), ("ready_first", "drop")]
    for i in range(200):
        thresholds = random.choice(["0", "0.1", "0.5", "1", "1.5", "3"])
        setting = Setting(*kinds[i % 4], thresholds, random.randint(1, 3), random.randint(1, 4))
        try:
            step_through(History(setting, Random(i), InMemoryRecords()).run())
        except (AssertionError, QueueError, JournalError):
            return
    pytest.fail(f"{bug.__doc__} No history found it")
