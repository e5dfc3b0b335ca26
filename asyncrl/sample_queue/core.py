"""Bounded queue between the rollouter and the trainer: waiting, durability, and the calls of both sides.

    rollouter                                                trainer
    recover, room, issue, put_and_issue, drop, snapshot,     lease, trained, release, covered, rollback,
    overdue, end                                             announce, publish, retire_before

Group states are in `asyncrl.sample_queue.group_state`, policy in `asyncrl.sample_queue.schedule`, files in
`asyncrl.sample_queue.journal`. A call applies its transitions at once, wakes the calls that waited for them, and
returns when the changed rows are on disk. The journal writes in the order of the calls, so a call that builds on
another one is never durable before it.

The queue is bounded where groups start, not where they end: `issue` admits no group beyond the staleness budget, so
there is always room for a finished group, and a full queue cannot block the group that the trainer waits for.

All state is durable: after a crash the queue is rebuilt from the journal, and callers repeat unanswered calls. Every
call is safe to repeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.sample_queue.acceptance import defect
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.group_state import GroupTable, QueueError
from asyncrl.sample_queue.messages import (
    DROPPED_METRICS,
    ONLY,
    OVERDUE,
    POISON,
    SKIPPED,
    Admitted,
    Drop,
    Holder,
    InFlight,
    Issued,
    Lease,
    LeasedGroup,
    Recovery,
    Refusal,
    Snapshot,
    Ticket,
)
from asyncrl.sample_queue.records import (
    DROPPED,
    HOLDER_KEY,
    IN_FLIGHT,
    QUEUED,
    TRAINED,
    Changes,
    GroupRecord,
    JournalError,
    Recovered,
)
from asyncrl.sample_queue.schedule import Order, Overdue, Schedule
from asyncrl.sample_queue.versions import VersionTable
from asyncrl.types.groups import Group
from asyncrl.types.versions import PolicyVersion

_OTHERS_ASK_S = 0.05  # for all shards to ask for the groups that may start


class Records(Protocol):
    """Durable storage of the queue's state: `asyncrl.sample_queue.journal.Journal`."""

    @property
    def failed(self) -> bool:
        """A write failed, so the caller's state is ahead of the disk: no more writes before the next `recover`."""
        ...

    def write(self, changes: Changes) -> Awaitable[None]:
        """Queues ``changes`` at once; the result is done when they and all earlier ones are on disk."""
        ...

    def recover(self) -> Recovered: ...
    def read(self, uid: str) -> bytes | None: ...
    async def snapshot(self, parts: Sequence[Snapshot]) -> None: ...
    def snapshots(self, in_flight: Mapping[str, int]) -> dict[str, list[bytes]]: ...
    def states(self, uids: Sequence[str]) -> dict[str, str]: ...
    def history(self) -> list[Issued]: ...


class SampleQueue:
    """The queue's core, for one asyncio loop; `asyncrl.sample_queue.actor` wraps it in a Ray actor.

    ``order`` and ``overdue``: see `Schedule`. ``vocab_size``: token ids are below it. A group that fails
    `asyncrl.sample_queue.acceptance` is sampled up to ``max_attempts`` times. ``shards``: rollouters, which take the
    prompts of one order, each as many as it can make."""

    def __init__(
        self,
        admission: Admission,
        records: Records,
        order: Order = "fifo",
        overdue: Overdue = "wait",
        vocab_size: int = 2**31,
        max_attempts: int = 3,
        shards: int = 1,
    ) -> None:
        self._shards = shards
        self._admission, self._records, self._order, self._overdue = admission, records, order, overdue
        self._vocab_size, self._max_attempts = vocab_size, max_attempts
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}  # calls, and what each waits for
        self._payloads: dict[str, bytes] = {}  # of queued and leased groups; after a restart they are read from disk
        self._to_cancel: defaultdict[int, list[str]] = defaultdict(list)  # shard → dropped as overdue, not reported yet
        self._asking = 0  # calls that ask for the groups that may start
        self._recovered: set[int] = set()  # shards
        self._sharing: asyncio.TimerHandle | None = None  # since groups may start
        self._others_asked = False  # or had time to
        self._abandoned = 0  # steps, by a rollback or a release, which end waiting leases
        self._starved_s = 0.0  # as the trainer last reported
        self._closed: str | None = None
        self._over = False
        self._load()

    # -- the rollouter's side --------------------------------------------------------------------------------------

    # ``holder`` is the calling rollouter; of each shard the queue serves the one with the highest token.

    async def recover(self, holder: Holder = ONLY, history: bool = False) -> Recovery:
        """State for a new rollouter, which holds its shard from now on: the last group issued, and its groups in
        flight, which it must `issue` again, in this order and before any others; with ``history`` all groups.

        Raises QueueError, like all calls of this side, if a newer rollouter holds the shard."""
        self._check_holder(holder)
        self._holders[holder.shard] = self._changes.meta[f"{HOLDER_KEY}{holder.shard}"] = holder.token
        if holder.shard not in self._recovered:  # it is about to ask for its share
            self._recovered.add(holder.shard)
            self._forget_room()
        # as of now: what other shards change during the commit may be on disk later than it
        issued, last_uid = self._table.issued, self._table.last_uid
        in_flight = [group for group in self._table.in_state(IN_FLIGHT) if self._shard_of(group) == holder.shard]
        await self._commit()  # also wakes calls of the previous holder, which fail
        snapshots = self._records.snapshots({group.uid: group.attempt for group in in_flight})
        return Recovery(
            issued,
            last_uid,
            [InFlight(_ticket(group), snapshots.get(group.uid, []), group.attempt) for group in in_flight],
            self._records.history() if history else [],
        )

    async def room(self, count: int, holder: Holder = ONLY) -> tuple[int, int]:
        """How many new groups may start now, of ``count``, and the number of the version under which `issue` would
        start them; waits until at least one may. (0, 0) once the queue is closed."""
        await self._wait_until(lambda: self._outdated(holder) or self._closed is not None or self._schedule.room() > 0)
        self._check_holder(holder)
        oldest = self._versions.oldest
        if self._closed is not None or oldest is None:
            return 0, 0
        return min(count, self._schedule.room()), oldest.number

    async def issue(self, tickets: Sequence[Ticket], count: int, holder: Holder = ONLY) -> Admitted:
        """Starts as many of these groups, in this order and up to ``count``, as may start now; waits until one may, or
        none ever will. A shard gets more than its share of what may be in flight only if the others leave it.

        Groups in flight may be issued again, before new ones: they keep their place and the earlier deadline, since
        they may continue their tokens. New ones have consecutive places, the first few of which may be taken. Raises
        QueueError for a place that is too high."""
        if not tickets:
            raise QueueError("issue: expected at least one group, found none")

        looked, restarts = -1, False

        def answerable() -> bool:
            nonlocal looked, restarts
            if looked != self._table.issued:  # by a call that this one repeats, perhaps
                looked = self._table.issued
                found = (self._table.open[uid] for uid, *_ in tickets if uid in self._table.open)
                restarts = any(self._may_restart(group, holder.shard) for group in found)
            if not restarts and not self._schedule.room() and tickets[-1].place >= self._table.issued:
                return False  # asked after each change of the queue: without a look at all tickets
            start, passed = self._startable(tickets, count, holder.shard)
            return bool(start) or len(passed) == len(tickets)

        with self._counted_as_asking():
            await self._wait_until(lambda: self._outdated(holder) or self._closed is not None or answerable())
            self._check_holder(holder)
            admitted = self._start(tickets, count, holder.shard)
        if admitted.started or admitted.passed:  # by another call, whose changes may not be on disk yet
            await self._commit()
        return admitted

    async def put_and_issue(
        self, groups: Sequence[bytes], tickets: Sequence[Ticket], count: int, holder: Holder = ONLY
    ) -> tuple[list[Refusal], Admitted]:
        """Queues finished groups, one buffer each, and starts those of ``tickets`` that may start now, as `issue` does,
        if any: it does not wait.

        A finished group that must not be trained is refused: it stays in flight, in its place, to be sampled again;
        after the last attempt it is dropped as poison."""
        if self._over:
            return [], self._admitted([], [])  # they stay in flight, for a run that resumes this one
        self._check_holder(holder)
        refusals = self._accept(groups)
        with self._counted_as_asking():
            admitted = self._start(tickets, count, holder.shard)
        await self._commit()
        return refusals, admitted

    async def drop(self, drops: Sequence[Drop], holder: Holder = ONLY) -> None:
        """Drops groups in flight, and frees their places in the staleness budget."""
        if self._over:
            return
        self._check_holder(holder)
        expected = self._in_flight("drop", [drop.uid for drop in drops])
        for drop in drops:
            if drop.uid in expected:
                self._table.drop(*drop)
        await self._commit()

    async def snapshot(self, parts: Sequence[Snapshot], holder: Holder = ONLY) -> None:
        """Stores parts of the snapshots of groups in flight; those of other groups and attempts are ignored."""
        if self._over:
            return
        self._check_holder(holder)
        known = ((part, self._table.open.get(part.uid)) for part in parts)
        if parts := [p for p, g in known if g is not None and (g.state, g.attempt) == (IN_FLIGHT, p.attempt)]:
            await self._records.snapshot(parts)

    async def overdue(self, holder: Holder = ONLY) -> list[str]:
        """Waits for groups of this rollouter in flight that were dropped as overdue; empty once the queue is closed."""
        shard = holder.shard
        await self._wait_until(
            lambda: self._outdated(holder) or bool(self._to_cancel[shard]) or self._closed is not None
        )
        self._check_holder(holder)
        uids = self._to_cancel.pop(shard, [])
        if uids:
            await self._commit()  # the drops are durable before the rollouter cancels the groups
        return uids

    # -- the trainer's side ----------------------------------------------------------------------------------------

    async def lease(self, step: int, count: int, having: Sequence[str] = ()) -> tuple[Lease, list[bytes]]:
        """Leases the next ``count`` groups to ``step`` once all of them are finished, beside those that it leased
        before, ``having``. Returns them and their payloads.

        The lease is empty, with the reason, after a rollback or a release, or if the queue was closed and they cannot
        finish."""
        had, since_s = frozenset(having), now_s()
        abandoned = self._abandoned
        if not self._leased_to(step, had):
            await self._wait_until(
                lambda: (
                    self._schedule.next_batch(count) is not None
                    or bool(self._leased_to(step, had))  # by a repeated call
                    or self._closed is not None
                    or self._abandoned != abandoned
                )
            )
        if self._abandoned != abandoned:
            return Lease((), self._closed or "the trainer gave up this step"), []
        if not self._leased_to(step, had):
            if (batch := self._schedule.next_batch(count)) is None:
                return Lease((), self._closed), []
            self._table.lease([group.uid for group in batch], step)
        groups, mask_before = self._leased_to(step, had), self._schedule.mask_before()
        lease = Lease(tuple(map(_leased, groups)), mask_before=mask_before, waited_s=now_s() - since_s)
        await self._commit()
        return lease, [self._payload(group.uid) for group in groups]

    async def trained(self, step: int) -> None:
        """Records that the groups leased to ``step`` are in the weights."""
        groups = self._leased_to(step)
        if not groups and not self._table.has_trained(step):
            raise QueueError(f"trained: step {step} has no lease")
        if groups:
            self._table.train(step, self._versions.latest)
        await self._commit()
        for group in groups:
            self._payloads.pop(group.uid, None)

    async def covered(self, step: int) -> None:
        """Declares that no restore goes back before ``step``: groups trained up to it become final."""
        self._table.cover(step)
        await self._commit()

    async def release(self, step: int) -> None:
        """Returns the groups of an abandoned step to their places, and ends its waiting lease."""
        self._table.release(step)
        self._abandoned += 1
        await self._commit()

    async def rollback(self, step: int, total_groups: int | None = None) -> PolicyVersion | None:
        """Goes back to the state after ``step``: groups leased, or trained later, are queued in order, and no group
        starts before the next `publish`. Returns the last version announced, in any lineage. ``total_groups``: that the
        run trains from now on, if they are not as many as before: steps may have had another size before ``step``."""
        self._table.roll_back(step)
        if total_groups is not None and total_groups != self._admission.total_groups:
            self._changes.meta["total_groups"] = total_groups
            self._admit(total_groups)
        self._versions.withdraw()
        self._close_because(None)
        self._abandoned += 1
        await self._commit()
        return max(self._versions.announced, default=None)

    async def skip(self, uids: Sequence[str]) -> None:
        """Drops groups in flight or queued, at the user's request; those that have ended are ignored."""
        for uid in uids:
            if self._table.state(uid) in (IN_FLIGHT, QUEUED):
                self._table.drop(uid, SKIPPED)
                self._payloads.pop(uid, None)
        await self._commit()

    async def announce(self, version: PolicyVersion) -> None:
        """Accepts groups with tokens of ``version`` from now on, as replicas may soon serve it. A version is never
        reused for other weights."""
        self._versions.announce(version)
        await self._commit()

    async def publish(
        self, version: PolicyVersion, trained: int | None = None, rolling: bool = False, starved_s: float = 0.0
    ) -> dict[str, int]:
        """Declares that replicas serve ``version`` from now on; all of them, unless ``rolling``. ``trained``: number of
        groups trained when this version's number was first published; needed after a `rollback`. ``starved_s``: see
        `Admitted`.

        Drops groups that are overdue now. Returns the balance; raises ConservationError if it is off."""
        current, self._starved_s = self._versions.current, starved_s
        if version != current:
            if trained is None:
                if current is not None and current.number == version.number:
                    trained = self._versions.served[current]
                else:
                    trained = self._table.trained
            self._versions.publish(version, trained, rolling)
            self._drop_overdue(self._schedule.overdue())
        await self._commit()
        return self.balance()

    async def retire_before(self, version: PolicyVersion) -> None:
        """Declares, after a rolling `publish`, that no replica serves a version before ``version`` any more."""
        self._versions.retire_before(version)
        await self._commit()

    # -- both sides ------------------------------------------------------------------------------------------------

    async def end(self, reason: str, holder: Holder = ONLY) -> None:
        """Stops issuing groups once none is in flight, in any rollouter."""
        await self._wait_until(
            lambda: self._outdated(holder) or self._closed is not None or not self._table.in_flight.total()
        )
        self._check_holder(holder)
        await self.close(reason)

    async def close(self, reason: str) -> None:
        """Stops issuing groups; the first reason is kept."""
        if self._over:
            return
        if self._closed is None:
            self._close_because(reason)
        await self._commit()

    async def finish(self) -> dict[str, float]:
        """Ends the run and returns the final `stats`. Untrained groups stay as they are, for a run that resumes."""
        self._over = True
        self._closed = self._closed or "the run is over"
        self._wake()
        return await self.stats()

    def balance(self) -> dict[str, int]:
        """See `GroupTable.balance`."""
        return self._table.balance()

    async def stats(self) -> dict[str, float]:
        """Current metrics, under their public names."""
        counts, version = self.balance(), self._versions.current
        return {
            **({"fully_async/version": version.number} if version is not None else {}),
            "fully_async/queue/depth": counts["queued"],
            "fully_async/in_flight": counts["in_flight"],
            **{f"fully_async/count/{name}": count for name, count in counts.items()},
            **{f"{DROPPED_METRICS}{reason}": count for reason, count in self._table.dropped.items()},
        }

    # -- inside ----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Loads the durable state."""
        found = self._records.recover()
        self._changes = Changes()
        self._table = GroupTable(found, self._changes)
        self._versions = VersionTable(found, self._changes)
        self._admit(self._admission.total_groups if found.total_groups is None else found.total_groups)
        self._closed, self._holders = found.closed, found.holders

    def _admit(self, total_groups: int) -> None:
        """Start no more than so many groups that are not dropped."""
        self._admission = replace(self._admission, total_groups=total_groups)
        self._schedule = Schedule(self._table, self._versions, self._admission, self._order, self._overdue)

    async def _commit(self) -> None:
        """Returns once all changes so far, of this call and of earlier ones, are on disk. Calls that waited for them
        continue at once."""
        try:
            durable = self._records.write(self._changes.take())
            self._wake()
            await durable
        except JournalError:
            if self._records.failed:  # the first failed call reloads the state from disk
                self._load()
                self._wake()
            raise

    def _wake(self) -> None:
        """Wake the calls whose wait is over, and no others: waking one costs much more than asking for it."""
        self._note_room()
        for woken, predicate in self._waiting.items():
            if not woken.done() and _holds(predicate):
                woken.set_result(None)

    async def _wait_until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():  # asked again when woken: another call may have come first
            self._waiting[woken := asyncio.get_running_loop().create_future()] = predicate
            try:
                await woken
            finally:
                del self._waiting[woken]

    def _outdated(self, holder: Holder) -> bool:
        return holder.token < self._holders.get(holder.shard, 0)

    def _check_holder(self, holder: Holder) -> None:
        if self._outdated(holder):
            newer = self._holders[holder.shard]
            raise QueueError(f"a call of rollouter {holder.token} came after rollouter {newer} had taken over")

    def _room_for(self, shard: int) -> int:
        """New groups that this shard may start now. Others may be about to ask for as many: at first it gets no more
        than its share of all that may be in flight, and always no more than others that wait get."""
        room, in_flight = self._schedule.room(), self._table.in_flight
        may_be_in_flight = room + in_flight.total()
        own = sum(count for of, count in in_flight.items() if of % self._shards == shard)
        left = max(0, math.ceil(may_be_in_flight / self._shards) - own)
        return min(math.ceil(room / self._asking), room if self._others_asked else left)

    def _note_room(self) -> None:
        """Give the other shards time to ask, once from when groups may start."""
        if self._shards == 1 or not self._schedule.room():
            self._forget_room()
        elif self._sharing is None:
            self._sharing = asyncio.get_running_loop().call_later(_OTHERS_ASK_S, self._share_no_longer)

    def _share_no_longer(self) -> None:
        self._others_asked = True
        self._wake()

    def _forget_room(self) -> None:
        if self._sharing is not None:
            self._sharing.cancel()
        self._sharing, self._others_asked = None, False

    def _shard_of(self, group: GroupRecord) -> int:
        """Of the rollouter that makes this group; a resumed run may have fewer of them."""
        return group.shard % self._shards

    def _close_because(self, reason: str | None) -> None:
        self._closed = reason
        self._changes.meta["closed"] = reason or ""

    def _may_restart(self, group: GroupRecord, shard: int) -> bool:
        return group.state == IN_FLIGHT and self._shard_of(group) == shard

    def _startable(self, tickets: Sequence[Ticket], count: int, shard: int) -> tuple[list[Ticket], list[Ticket]]:
        may_restart = functools.partial(self._may_restart, shard=shard)
        return self._schedule.startable(tickets, count, self._room_for(shard), may_restart)

    def _start(self, tickets: Sequence[Ticket], count: int, shard: int) -> Admitted:
        if self._closed is not None or (oldest := self._versions.oldest) is None:
            return self._admitted([], [])
        start, passed = self._startable(tickets, count, shard)
        for uid, prompt_id, epoch, _ in start:
            self._table.issue(uid, prompt_id, epoch, oldest, shard)
        return self._admitted(start, passed)

    @contextlib.contextmanager
    def _counted_as_asking(self) -> Iterator[None]:
        """Counts a call that asks for the groups that may start."""
        self._asking += 1
        self._note_room()
        try:
            yield
        finally:
            self._asking -= 1

    def _admitted(self, start: Sequence[Ticket], passed: Sequence[Ticket]) -> Admitted:
        started, others = [ticket.uid for ticket in start], [ticket.uid for ticket in passed]
        number = current.number if (current := self._versions.current) is not None else None
        return Admitted(started, others, self._table.issued, number, self._starved_s)

    def _accept(self, groups: Sequence[bytes]) -> list[Refusal]:
        decoded = [(Group.from_buffer(buffer), buffer) for buffer in groups]
        expected = self._in_flight("put", [group.uid for group, _ in decoded])
        refusals: list[Refusal] = []
        finished: list[GroupRecord] = []
        for group, buffer in decoded:
            if group.uid not in expected:
                continue
            refused = self._table.open[group.uid]
            if group.attempt < refused.attempt:  # a repeated call
                refusals.append(Refusal(group.uid, refused.refusal or "", refused.attempt))
            elif reason := defect(group, self._vocab_size, self._versions.announced):
                refusals.append(self._refuse(group, reason))
            else:
                self._table.finish(group, buffer)
                self._payloads[group.uid] = buffer
                finished.append(self._table.open[group.uid])
        # tokens may have become too old while the group was in flight
        self._drop_overdue([group for group in finished if self._schedule.all_masked(group)])
        return refusals

    def _refuse(self, group: Group, reason: str) -> Refusal:
        self._table.refuse(group.uid, reason)
        attempt = self._table.open[group.uid].attempt
        if attempt < self._max_attempts:
            return Refusal(group.uid, reason, attempt)
        self._table.drop(group.uid, POISON)
        return Refusal(group.uid, reason, None)

    def _drop_overdue(self, groups: Sequence[GroupRecord]) -> None:
        for group in groups:
            if group.state == IN_FLIGHT:
                self._to_cancel[self._shard_of(group)].append(group.uid)
            self._table.drop(group.uid, OVERDUE)
            self._payloads.pop(group.uid, None)

    def _leased_to(self, step: int, without: frozenset[str] = frozenset()) -> list[GroupRecord]:
        groups = [group for group in self._table.leased_to(step) if group.uid not in without]
        return self._schedule.in_training_order(groups)

    def _payload(self, uid: str) -> bytes:
        if uid not in self._payloads:
            payload = self._records.read(uid)
            assert payload is not None, f"group {uid} is leased and has no payload"
            self._payloads[uid] = payload
        return self._payloads[uid]

    def _in_flight(self, verb: str, uids: Sequence[str]) -> set[str]:
        """The subset of ``uids`` in flight. Groups that have ended are left out: the call is a repeat, or the group was
        overdue. Raises QueueError for a group that was never issued, or can no longer be dropped."""
        found = {uid: self._table.state(uid) for uid in uids}
        ended = self._records.states(gone) if (gone := [uid for uid, state in found.items() if state is None]) else {}
        for uid, state in found.items():
            if state is None and uid in ended:  # a drop not yet on disk still has its earlier state there
                state = TRAINED if ended[uid] == TRAINED else DROPPED
            if state is None or (verb == "drop" and state not in (IN_FLIGHT, DROPPED)):
                raise QueueError(f"{verb}: group {uid} is {state or 'unknown'}, expected {IN_FLIGHT}")
        return {uid for uid, state in found.items() if state == IN_FLIGHT}


def _holds(predicate: Callable[[], bool]) -> bool:
    """True also for a predicate that raises, which its own call must meet."""
    try:
        return predicate()
    except QueueError:
        return True


def _ticket(group: GroupRecord) -> Ticket:
    return Ticket(group.uid, group.prompt_id, group.epoch, group.seq - 1)


def _leased(group: GroupRecord) -> LeasedGroup:
    assert group.oldest is not None
    assert group.finished_s is not None
    assert group.leased_s is not None
    assert group.processing_s is not None
    return LeasedGroup(
        group.uid,
        group.oldest,
        processing_s=group.processing_s,
        in_queue_s=max(0.0, group.leased_s - group.finished_s),
    )
