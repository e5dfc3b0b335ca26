"""The bounded queue between the pools and the life of every group in it.

    issue ──► in flight ──put──► queued ──lease──► leased ──trained──► trained
                 └──────drop(reason)                 └──release──► queued
                                    queued ◄──────── rollback(step) ───── trained after that step

The rollouter calls `issue`, `put`, `drop`; the trainer `lease`, `trained`, `release`, `publish`, and `rollback` when it
goes back to a checkpoint. Whoever must wait waits on one condition. The queue is bounded where groups start, not where
they end: `issue` admits no group beyond the staleness budget, so a finished group always has its place and a full queue
cannot shut out the very group that the trainer waits for.

All of its state is in its records: built anew over them, after its process was killed, it is where it was. Whoever had
no answer then asks again: every call may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from asyncrl.sample import Group, PolicyVersion
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.ledger import Recovered
from asyncrl.sample_queue.life import (
    DROPPED,
    IN_FLIGHT,
    TRAINED,
    Closed,
    Covered,
    Dropped,
    Event,
    Finished,
    GroupRecord,
    Issued,
    Leased,
    Partial,
    Published,
    Released,
    Retired,
    Trained,
)
from asyncrl.sample_queue.messages import InFlight, Lease, LeasedGroup, Recovery, Ticket
from asyncrl.sample_queue.spool import Place

OVERDUE = "overdue"  # the reason of groups that would be trained after their deadline

Order = Literal["fifo", "ready_first"]
Overdue = Literal["wait", "mask", "drop"]


class QueueError(RuntimeError):
    """A caller broke the life cycle above, or the run failed elsewhere; the message says which."""


class ConservationError(QueueError):
    """Groups are not all accounted for: a bug, and a reason to stop at once."""


class State(enum.Enum):
    IN_FLIGHT = "in_flight"
    QUEUED = "queued"
    LEASED = "leased"


@dataclass
class _Entry:
    ticket: Ticket
    seq: int
    state: State
    version: PolicyVersion  # under which it was issued
    payload: bytes | None = None  # None: in flight, or only in the records
    place: Place | None = None
    oldest: PolicyVersion | None = None  # of its trained tokens
    newest: PolicyVersion | None = None
    processing_s: float = 0.0
    queued_s: float = 0.0
    step: int = 0


class Records(Protocol):
    """Where every change is made durable before it is acknowledged: `asyncrl.sample_queue.journal.Journal`."""

    async def write(self, events: Sequence[Event]) -> None: ...
    async def rollback(self, step: int) -> None: ...
    def recover(self) -> Recovered: ...
    def read(self, place: Place) -> bytes: ...
    def states(self, uids: Sequence[str]) -> dict[str, str]: ...


class SampleQueue:
    """The queue's core, for one asyncio loop; `asyncrl.sample_queue.actor` puts it into a Ray actor.

    ``admission`` needs only its constants: the rest is in ``records``. ``order``: ``fifo`` trains in the order of
    issue, ``ready_first`` finished groups first, of those the earliest deadline. ``overdue`` is what happens to a group
    that cannot be trained by its deadline any more: ``wait`` makes the trainer wait for groups in time, so that there
    is none (but for a G that became smaller on resume: such groups are dropped), ``mask`` takes its too old tokens out
    of the loss, ``drop`` drops it.

    A change that takes something (`issue`, `lease`) is made at once, so that nobody takes it twice; one that gives
    something (`put`, `trained`) is seen by others only when it is on disk. Either way the caller is told after that."""

    def __init__(
        self, admission: Admission, records: Records, order: Order = "fifo", overdue: Overdue = "wait"
    ) -> None:
        self._admission, self._records, self._order, self._overdue = admission, records, order, overdue
        self._changed = asyncio.Condition()
        self._dropping: set[str] = set()  # whose drop is on its way to the records
        self._to_cancel: list[str] = []  # dropped while in flight: the rollouter is to give them up
        self._given_up: set[str] = set()  # all of these: it may issue one again before it has heard of it
        self._era = 0  # rollbacks so far
        self._starved_s = 0.0  # that leases waited for groups
        self._waits: list[float] = []  # since when each that waits now does
        self._failed = False
        self._over = False
        self._closed: str | None = None
        self._last_version: PolicyVersion | None = None  # published, in any lineage
        self._load()
        self._reopened = self._admission.issued > 0

    # -- the rollouter's side --------------------------------------------------------------------------------------

    async def recover(self) -> Recovery:
        """What a new rollouter goes on from: the groups in flight, which it is to `issue` again, first and in this
        order, and the group that was issued last."""
        found = self._records.recover()
        in_flight = [
            InFlight(*e.ticket, self._records.read(place) if (place := found.partials.get(e.ticket.uid)) else None)
            for e in self._entries.values()
            if e.state is State.IN_FLIGHT
        ]
        return Recovery(found.last_uid, in_flight)

    async def issue(self, tickets: Sequence[Ticket], version: PolicyVersion | None = None) -> int:
        """Start as many of these groups, from the front, as may start now; wait until it is one at least.

        Groups in flight may be issued again, before new ones: they keep their place, and their deadline if it is the
        earlier one, as they may go on with the tokens that they had. One that was dropped as overdue meanwhile counts
        as started, and stays dropped. ``version`` is what their replica serves; None: the oldest that any serves.
        Returns how many; 0 once the queue is closed, and no further call is needed. Raises QueueError for a group that
        is finished, or if the run failed."""
        if not tickets:
            raise QueueError("issue needs at least one group")
        if self._reopened:  # this queue does not remember what the one before it dropped
            new = [ticket.uid for ticket in tickets if ticket.uid not in self._entries]
            self._given_up.update(uid for uid, state in self._records.states(new).items() if state == DROPPED)
        async with self._changed:
            await self._wait_until(lambda: self._closed is not None or self._startable(tickets, version) > 0)
            if self._closed is not None:
                return 0
            count = self._startable(tickets, version)
            version = self._admission.counted(version)
            events: list[Event] = []
            for ticket in tickets[:count]:
                if ticket.uid in self._given_up:
                    continue  # overdue while it waited here: `overdue` tells of it
                if (entry := self._entries.get(ticket.uid)) is None:
                    self._admission.issued += 1
                    entry = _Entry(ticket, self._admission.issued, State.IN_FLIGHT, version)
                    self._entries[ticket.uid] = entry
                # again: it may go on with tokens of the version that it had
                entry.version = min(entry.version, version, key=lambda v: (v.number, v.lineage))
                events.append(Issued(*ticket, seq=entry.seq, version=entry.version))
        await self._records.write(events)
        return count

    async def put(self, groups: Sequence[bytes], now_s: float) -> None:
        """Hand over finished groups, one buffer each. Returns when they are on disk, which is all that it waits for."""
        if self._over:
            return  # they stay in flight, and are finished if the run is resumed
        decoded = [(buffer, Group.from_buffer(buffer)) for buffer in groups]
        awaited = self._awaited([group.uid for _, group in decoded], "put")
        decoded = [(buffer, group) for buffer, group in decoded if group.uid in awaited]
        finished = [Finished(buffer, group) for buffer, group in decoded]
        if untrainable := [e.measures.uid for e in finished if e.measures.oldest is None]:
            raise QueueError(f"put: group {untrainable[0]} has no trained token; drop it instead")
        await self._records.write(finished)
        async with self._changed:
            for (buffer, group), event in zip(decoded, finished, strict=True):
                if (entry := self._entries.get(group.uid)) is None:
                    continue  # dropped meanwhile
                entry.oldest, entry.newest = event.measures.oldest, event.measures.newest
                entry.payload, entry.queued_s, entry.state = buffer, now_s, State.QUEUED
                entry.processing_s = group.times.get("finished_s", now_s) - group.times.get("issued_s", now_s)
            late = self._drop_late() if self._overdue == "mask" else []  # they were not measured when they became it
            self._changed.notify_all()
        if late:
            await self._records.write(late)

    async def drop(self, drops: Sequence[tuple[str, str]]) -> None:
        """Give up groups in flight: (uid, reason) each. Their places in the budget are free again."""
        if self._over:
            return
        awaited = self._awaited([uid for uid, _ in drops], "drop")
        drops = [(uid, reason) for uid, reason in drops if uid in awaited]
        self._dropping |= {uid for uid, _ in drops}
        try:
            await self._records.write([Dropped(uid, reason) for uid, reason in drops])
        finally:
            self._dropping -= {uid for uid, _ in drops}
        async with self._changed:
            for uid, reason in drops:
                if uid in self._entries:  # not so if a rollback has found it dropped
                    self._drop(uid, reason)
            self._changed.notify_all()

    async def snapshot(self, snapshots: Sequence[tuple[str, bytes]]) -> None:
        """Keep (uid, state) of groups in flight, the newest of each; those that are not in flight are ignored."""
        if not self._over:
            await self._records.write([Partial(uid, state) for uid, state in snapshots])

    async def overdue(self) -> list[str]:
        """Wait for groups in flight that were dropped because they are overdue; empty once the queue is closed."""
        async with self._changed:
            await self._wait_until(lambda: bool(self._to_cancel) or self._closed is not None)
            uids, self._to_cancel = self._to_cancel, []
            return uids

    # -- the trainer's side ----------------------------------------------------------------------------------------

    async def lease(self, step: int, count: int, now_s: float) -> tuple[Lease, list[bytes]]:
        """The next ``count`` groups, once all of them are finished; they belong to ``step``.

        If the queue was closed and they will never be, or a rollback came, the lease is empty and says so."""
        async with self._changed:
            held, era = self._leased_to(step), self._era
            if not held:
                with self._starving():
                    await self._wait_until(
                        lambda: self._next(count) is not None or self._closed is not None or self._era != era
                    )
            found = (held or self._next(count)) if self._era == era else None
            if found is None:
                return Lease((), self._closed or "the trainer went back to a checkpoint"), []
            mask_before = self._mask_before()
            leased: list[LeasedGroup] = []
            for uid in found:
                entry = self._entries[uid]
                entry.state, entry.step = State.LEASED, step
                assert entry.oldest is not None
                leased.append(LeasedGroup(uid, entry.oldest, entry.processing_s, max(0.0, now_s - entry.queued_s)))
            payloads = [self._payload(self._entries[uid]) for uid in found]
        if not held:
            await self._records.write([Leased(found, step)])
        return Lease(tuple(leased), mask_before=mask_before), payloads

    async def trained(self, step: int) -> None:
        """The groups leased to ``step`` are in the weights."""
        uids = self._leased_to(step)
        if not uids:
            found = self._records.recover()
            if step <= found.covered_step or any(g.state == TRAINED and g.step == step for g in found.groups):
                return  # said again
            raise QueueError(f"step {step} has no lease")
        await self._records.write([Trained(uids, step)])
        async with self._changed:
            for uid in uids:
                del self._entries[uid]
            self._admission.trained += len(uids)
            self._changed.notify_all()

    async def covered(self, step: int) -> None:
        """No restore will go back before ``step``: the groups trained up to it are trained for good."""
        await self._records.write([Covered(step)])

    async def release(self, step: int) -> None:
        """The step was abandoned: its groups go back to their places."""
        if not (uids := self._leased_to(step)):
            return
        await self._records.write([Released(uids)])
        async with self._changed:
            for uid in uids:
                self._entries[uid].state = State.QUEUED
            self._changed.notify_all()

    async def rollback(self, step: int) -> PolicyVersion | None:
        """The weights are those after ``step`` again: all that was trained later or is leased is queued, in order, and
        nothing starts before the next `publish`. Returns the last version there was, in any lineage."""
        async with self._changed:  # a group that were issued meanwhile would be missing in what is loaded
            await self._records.rollback(step)
            self._load()
            self._era += 1
            self._changed.notify_all()  # a lease that waits is of a step that will be another one
            return self._last_version

    async def publish(
        self, version: PolicyVersion, trained: int | None = None, rolling: bool = False
    ) -> dict[str, int]:
        """Replicas serve ``version`` from now on, all of them unless ``rolling``. ``trained``: how many groups were
        trained when this version's number was published first, after a `rollback`.

        Groups that are overdue now are dropped. Returns the balance; raises ConservationError if it is off."""
        if self._admission.version == version:
            return self.balance()  # said again
        if self._last_version is not None and version <= self._last_version:
            raise QueueError(f"version {version} was published after {self._last_version}")
        async with self._changed:
            self._last_version = version
            self._admission.publish(version, trained, rolling)
            published = Published(version, self._admission.served[version], rolling)
            late = self._drop_late()
        await self._records.write([published, *late])
        async with self._changed:
            self._changed.notify_all()
            return self.balance()

    async def retire_before(self, version: PolicyVersion) -> None:
        """No replica serves a version before ``version`` any more, after it was published as rolling."""
        async with self._changed:
            older = [served for served in self._admission.served if served < version]
            for served in older:
                self._admission.retire(served)
        if not older:
            return
        await self._records.write([Retired(next(iter(self._admission.served)))])
        async with self._changed:
            self._changed.notify_all()

    # -- both ------------------------------------------------------------------------------------------------------

    async def close(self, reason: str, failed: bool = False) -> None:
        """No group starts any more. With ``failed`` everyone who waits gets a QueueError."""
        if self._closed is None and not failed:
            await self._records.write([Closed(reason)])
        async with self._changed:
            if self._closed is None or failed:
                self._closed = reason
            self._failed |= failed
            self._changed.notify_all()

    async def finish(self) -> dict[str, float]:
        """The run is over. What was not trained stays as it is, for a run that resumes this one. Returns the final
        `stats`."""
        self._over = True
        async with self._changed:
            self._closed = self._closed or "the run is over"
            self._changed.notify_all()
            return await self.stats()

    def balance(self) -> dict[str, int]:
        """issued = trained + queued + leased + in flight + dropped, or ConservationError."""
        states = Counter(e.state.value for e in self._entries.values())
        counts = {
            "issued": self._admission.issued,
            "trained": self._admission.trained,
            "dropped": self._admission.dropped,
        } | {s.value: states[s.value] for s in State}
        accounted = sum(v for k, v in counts.items() if k != "issued")
        if counts["issued"] != accounted or counts["dropped"] != sum(self._dropped.values()):
            raise ConservationError(f"groups do not add up: {counts}, dropped by reason {dict(self._dropped)}")
        return counts

    async def stats(self) -> dict[str, float]:
        """Metrics of the moment, under their public names."""
        counts, version = self.balance(), self._admission.version
        return {
            **({"fully_async/version": version.number} if version is not None else {}),
            "fully_async/queue/depth": counts["queued"],
            "fully_async/queue/starved_s": self._starved_s + sum(time.monotonic() - since for since in self._waits),
            "fully_async/in_flight": counts["in_flight"],
            **{f"fully_async/count/{k}": v for k, v in counts.items()},
            **{f"fully_async/dropped/{reason}": n for reason, n in self._dropped.items()},
        }

    # -- inside ----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Take over what the records hold."""
        found = self._records.recover()
        self._entries: OrderedDict[str, _Entry] = OrderedDict(  # in the order of issue
            (group.uid, _entry(group)) for group in found.groups if group.state != TRAINED
        )
        self._dropped = Counter(found.dropped)
        self._closed = found.closed
        self._admission.issued, self._admission.trained = found.issued, found.trained
        self._admission.dropped = sum(found.dropped.values())
        self._admission.served = dict(found.served)
        self._last_version = found.version

    def _leased_to(self, step: int) -> list[str]:
        leased = [e for e in self._entries.values() if e.state is State.LEASED and e.step == step]
        return [e.ticket.uid for e in self._in_training_order(leased)]

    def _drop(self, uid: str, reason: str) -> None:
        del self._entries[uid]
        self._dropped[reason] += 1
        self._admission.dropped += 1

    def _drop_late(self) -> list[Dropped]:
        late = self._late()
        given_up = [uid for uid in late if self._entries[uid].state is State.IN_FLIGHT]
        self._to_cancel += given_up
        self._given_up.update(given_up)
        for uid in late:
            self._drop(uid, OVERDUE)
        return [Dropped(uid, OVERDUE) for uid in late]

    def _startable(self, tickets: Sequence[Ticket], version: PolicyVersion | None) -> int:
        """How many of the tickets, from the front, may start now."""
        if not self._admission.served:
            return 0
        known = [entry for ticket in tickets if (entry := self._entries.get(ticket.uid)) is not None]
        if finished := [e for e in known if e.state is not State.IN_FLIGHT]:
            raise QueueError(f"group {finished[0].ticket.uid} was issued before and is {finished[0].state.value}")
        again = self._startable_again(known, self._admission.counted(version)) if known else 0
        if again < len(known):
            return tickets.index(known[again].ticket)
        given_up = sum(ticket.uid in self._given_up for ticket in tickets)
        return min(len(tickets), again + given_up + self._admission.available(version))

    def _startable_again(self, entries: Sequence[_Entry], version: PolicyVersion) -> int:
        """How many of these groups in flight, from the front, may start anew."""
        if not self._keeps_deadlines:
            places = {uid: place for place, uid in enumerate(self._entries, start=self._admission.trained + 1)}
            admitted = [self._admission.admits(places[e.ticket.uid], version) for e in entries]
            return admitted.index(False) if False in admitted else len(entries)
        deadlines = sorted(self._admission.deadline(e.version) for e in self._waiting())
        earliest = self._admission.deadline(version)
        for count, entry in enumerate(entries):
            if (deadline := self._admission.deadline(entry.version)) > earliest:
                deadlines.remove(deadline)
                insort(deadlines, earliest)
                if not self._admission.fits(deadlines, self._leased):
                    return count
        return len(entries)

    @property
    def _keeps_deadlines(self) -> bool:
        """Whether the order of training depends on the deadlines, and no group may miss its own."""
        return self._order == "ready_first" and self._overdue == "wait"

    def _waiting(self) -> list[_Entry]:
        return [e for uid, e in self._entries.items() if e.state is not State.LEASED and uid not in self._dropping]

    def _in_training_order(self, entries: Sequence[_Entry]) -> list[_Entry]:
        if self._order == "fifo":
            return sorted(entries, key=lambda e: e.seq)
        return sorted(entries, key=lambda e: (self._admission.deadline(e.version), e.seq))

    def _next(self, count: int) -> list[str] | None:
        """The groups that the next step of ``count`` is to train, if all of them are finished."""
        waiting = self._waiting()  # in the order of issue
        if self._order == "fifo":
            taken = waiting[:count]
        else:
            waiting = self._in_training_order(waiting)
            taken = [e for e in waiting if e.state is State.QUEUED][:count]
        if len(taken) < count or any(e.state is not State.QUEUED for e in taken):
            return None
        if self._keeps_deadlines:
            chosen = {e.seq for e in taken}
            left = [self._admission.deadline(e.version) for e in waiting if e.seq not in chosen]
            if not self._admission.fits(left, count + self._leased):
                return None  # one of those in flight must come first
        return [e.ticket.uid for e in taken]

    @property
    def _leased(self) -> int:
        return sum(e.state is State.LEASED for e in self._entries.values())

    def _mask_before(self) -> int | None:
        version = self._admission.version
        return version.number - self._admission.bound if self._overdue == "mask" and version is not None else None

    def _late(self) -> list[str]:
        """Groups that no step holds and that cannot be trained in time any more."""
        version, bound = self._admission.version, self._admission.bound
        if version is None:
            return []
        waiting = self._in_training_order(self._waiting())
        if self._overdue == "mask":  # groups without a token that is young enough
            late = [e for e in waiting if e.newest is not None and e.newest.number < version.number - bound]
        elif self._overdue == "drop" and self._order == "ready_first":
            late = [e for e in waiting if self._admission.deadline(e.version) < version.number]
        else:
            late = []
            while found := self._admission.late([self._admission.deadline(e.version) for e in waiting]):
                late.append(waiting.pop(found[0]))  # those behind it move up
        return [e.ticket.uid for e in late]

    @contextlib.contextmanager
    def _starving(self) -> Iterator[None]:
        self._waits.append(since := time.monotonic())
        try:
            yield
        finally:
            self._waits.remove(since)
            self._starved_s += time.monotonic() - since

    def _payload(self, entry: _Entry) -> bytes:
        if entry.payload is None:
            assert entry.place is not None
            entry.payload = self._records.read(entry.place)
        return entry.payload

    def _awaited(self, uids: Sequence[str], verb: str) -> set[str]:
        """Those that are in flight. The others were finished or dropped before: a repeated call, or a group that was
        overdue. Raises QueueError for one that was never issued, or that cannot be dropped any more."""
        awaited = {uid for uid in uids if (e := self._entries.get(uid)) is not None and e.state is State.IN_FLIGHT}
        if others := [uid for uid in uids if uid not in awaited]:
            known = self._records.states(others)
            for uid in others:
                # one in flight that is not in the queue is being dropped as overdue at this moment
                if uid not in known or (verb == "drop" and known[uid] not in (DROPPED, IN_FLIGHT)):
                    found = known.get(uid, "unknown")
                    raise QueueError(f"{verb}: group {uid} is {found}, expected {State.IN_FLIGHT.value}")
        return awaited

    async def _wait_until(self, predicate: Callable[[], bool]) -> None:
        await self._changed.wait_for(lambda: self._failed or predicate())
        if self._failed:
            raise QueueError(f"the run failed: {self._closed}")


def _entry(group: GroupRecord) -> _Entry:
    finished_s = group.finished_s or 0.0  # Unix seconds; in the queue they are those of the node's clock
    return _Entry(
        Ticket(group.uid, group.prompt_id, group.epoch),
        group.seq,
        State(group.state),
        group.version,
        place=group.place,
        oldest=group.oldest,
        newest=group.newest,
        processing_s=finished_s - group.issued_s if group.finished_s else 0.0,
        queued_s=finished_s - time.time() + time.monotonic(),
        step=group.step or 0,
    )
