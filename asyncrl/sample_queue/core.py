"""The bounded queue between the pools and the life of every group in it.

    issue ──► in flight ──put──► queued ──lease──► leased ──trained──► trained
                 └──────drop(reason)                 └──release──► queued

The rollouter calls `issue`, `put`, `drop`; the trainer `lease`, `trained`, `release`, `publish`. Whoever must wait
waits on one condition. The queue is bounded where groups start, not where they end: `issue` admits no group beyond the
staleness budget, so a finished group always has its place and a full queue cannot shut out the very
group that the trainer waits for.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from asyncrl.sample import Group, PolicyVersion
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.life import Covered, Dropped, Event, Finished, Issued, Leased, Published, Released, Trained

RUN_ENDED = "run_ended"  # the reason of groups that were left when the run was over


class QueueError(RuntimeError):
    """A caller broke the life cycle above, or the run failed elsewhere; the message says which."""


class ConservationError(QueueError):
    """Groups are not all accounted for: a bug, and a reason to stop at once."""


class State(enum.Enum):
    IN_FLIGHT = "in_flight"
    QUEUED = "queued"
    LEASED = "leased"


@dataclass(frozen=True)
class LeasedGroup:
    """One group of a lease, without its payload. ``oldest``: the version its staleness counts from."""

    uid: str
    oldest: PolicyVersion
    in_queue_s: float


@dataclass(frozen=True)
class Lease:
    """``groups`` in the order of their payloads; empty, with the reason in ``closed``, when there will be none."""

    groups: tuple[LeasedGroup, ...]
    closed: str | None = None


@dataclass
class _Entry:
    state: State
    payload: bytes = b""
    oldest: PolicyVersion | None = None
    queued_s: float = 0.0
    step: int = 0


class Records(Protocol):
    """Where every change is made durable before it is acknowledged: `asyncrl.sample_queue.journal.Journal`."""

    async def write(self, events: Sequence[Event]) -> None: ...


class Ticket(NamedTuple):
    """A group that wants to start."""

    uid: str
    prompt_id: str
    epoch: int


class SampleQueue:
    """The queue's core, for one asyncio loop; `asyncrl.sample_queue.actor` puts it into a Ray actor.

    A change that takes something (`issue`, `lease`) is made at once, so that nobody takes it twice; one that gives
    something (`put`, `trained`) is seen by others only when it is on disk. Either way the caller is told after that."""

    def __init__(self, admission: Admission, records: Records) -> None:
        self._admission, self._records = admission, records
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # in the order of issue
        self._dropped: Counter[str] = Counter()
        self._version: PolicyVersion | None = None
        self._changed = asyncio.Condition()
        self._closed: str | None = None
        self._failed = False
        self._over = False

    # -- the rollouter's side --------------------------------------------------------------------------------------

    async def issue(self, tickets: Sequence[Ticket]) -> int:
        """Start as many of these groups, from the front, as may start now; wait until it is one at least.

        Returns how many; 0 once the queue is closed, and no further call is needed. Raises QueueError for a uid that
        is already under way or if the run failed."""
        if not tickets:
            raise QueueError("issue needs at least one group")
        async with self._changed:
            await self._wait_until(lambda: self._closed is not None or self._admissible() > 0)
            if self._closed is not None:
                return 0
            count = min(len(tickets), self._admissible())
            events: list[Event] = []
            for ticket in tickets[:count]:
                if ticket.uid in self._entries:
                    raise QueueError(
                        f"group {ticket.uid} was issued before and is {self._entries[ticket.uid].state.value}"
                    )
                self._entries[ticket.uid] = _Entry(State.IN_FLIGHT)
                self._admission.issued += 1
                assert self._version is not None
                events.append(Issued(*ticket, seq=self._admission.issued, version=self._version))
        await self._records.write(events)
        return count

    async def put(self, groups: Sequence[bytes], now_s: float) -> None:
        """Hand over finished groups, one buffer each. Returns when they are on disk, which is all that it waits for."""
        if self._over:
            return  # counted as dropped when the run ended
        decoded = [Group.from_buffer(buffer) for buffer in groups]
        for group in decoded:
            self._expect(group.uid, State.IN_FLIGHT, "put")
        await self._records.write([Finished(b, group) for b, group in zip(groups, decoded)])
        async with self._changed:
            for buffer, group in zip(groups, decoded):
                if (entry := self._entries.get(group.uid)) is None:
                    continue  # the run ended meanwhile, and counted it as dropped
                entry.oldest = group.oldest_version()
                entry.payload, entry.queued_s, entry.state = buffer, now_s, State.QUEUED
            self._changed.notify_all()

    async def drop(self, drops: Sequence[tuple[str, str]]) -> None:
        """Give up groups in flight: (uid, reason) each. Their places in the budget are free again."""
        if self._over:
            return
        for uid, _ in drops:
            self._expect(uid, State.IN_FLIGHT, "drop")
        await self._records.write([Dropped(uid, reason) for uid, reason in drops])
        async with self._changed:
            for uid, reason in drops:
                self._drop(uid, reason)
            self._changed.notify_all()

    # -- the trainer's side ----------------------------------------------------------------------------------------

    async def lease(self, step: int, count: int, now_s: float) -> tuple[Lease, list[bytes]]:
        """The next ``count`` groups in the order of issue, once all of them are finished; they belong to ``step``.

        If the queue was closed and they will never be, the lease is empty and says why it was closed."""
        async with self._changed:
            await self._wait_until(lambda: self._front(count) is not None or self._closed is not None)
            front = self._front(count)
            if front is None:
                return Lease((), self._closed), []
            leased: list[LeasedGroup] = []
            for uid in front:
                entry = self._entries[uid]
                entry.state, entry.step = State.LEASED, step
                assert entry.oldest is not None
                leased.append(LeasedGroup(uid, entry.oldest, now_s - entry.queued_s))
            payloads = [self._entries[uid].payload for uid in front]
        await self._records.write([Leased(front, step)])
        return Lease(tuple(leased)), payloads

    async def trained(self, step: int) -> None:
        """The groups leased to ``step`` are in the weights."""
        uids = self._leased_to(step)
        if not uids:
            raise QueueError(f"step {step} has no lease")
        await self._records.write([Trained(uids, step)])
        async with self._changed:
            for uid in uids:
                del self._entries[uid]
            self._admission.trained += len(uids)
            self._changed.notify_all()

    async def covered(self, step: int) -> None:
        """A checkpoint holds everything trained up to ``step``: those groups are trained for good."""
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

    async def publish(self, version: PolicyVersion) -> dict[str, int]:
        """The replicas serve ``version`` from now on. Returns the balance; raises ConservationError if it is off."""
        if self._version is not None and version <= self._version:
            raise QueueError(f"version {version} was published after {self._version}")
        await self._records.write([Published(version, self._admission.trained)])
        async with self._changed:
            self._version = version
            self._admission.publish()
            self._changed.notify_all()
            return self.balance()

    # -- both ------------------------------------------------------------------------------------------------------

    async def close(self, reason: str, failed: bool = False) -> None:
        """No group starts any more. With ``failed`` everyone who waits gets a QueueError."""
        async with self._changed:
            self._closed, self._failed = reason, failed
            self._changed.notify_all()

    async def finish(self) -> dict[str, float]:
        """The run is over: what was not trained is dropped as ``run_ended``. Returns the final `stats`."""
        self._closed, self._over = self._closed or "the run is over", True
        left = list(self._entries)
        await self._records.write([Dropped(uid, RUN_ENDED) for uid in left])
        async with self._changed:
            for uid in left:
                self._drop(uid, RUN_ENDED)
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
        counts = self.balance()
        return {
            "fully_async/queue/depth": counts["queued"],
            "fully_async/in_flight": counts["in_flight"],
            **{f"fully_async/count/{k}": v for k, v in counts.items()},
            **{f"fully_async/dropped/{reason}": n for reason, n in self._dropped.items()},
        }

    def _leased_to(self, step: int) -> list[str]:
        return [uid for uid, e in self._entries.items() if e.state is State.LEASED and e.step == step]

    def _drop(self, uid: str, reason: str) -> None:
        del self._entries[uid]
        self._dropped[reason] += 1
        self._admission.dropped += 1

    def _admissible(self) -> int:
        if self._version is None:
            return 0
        return self._admission.available()

    def _front(self, count: int) -> list[str] | None:
        """The first ``count`` groups that no step holds yet, if all of them are finished."""
        front: list[str] = []
        for uid, entry in self._entries.items():
            if entry.state is State.LEASED:
                continue
            if entry.state is State.IN_FLIGHT:
                return None
            front.append(uid)
            if len(front) == count:
                return front
        return None

    def _expect(self, uid: str, state: State, verb: str) -> _Entry:
        entry = self._entries.get(uid)
        if entry is None or entry.state is not state:
            found = "unknown" if entry is None else entry.state.value
            raise QueueError(f"{verb}: group {uid} is {found}, expected {state.value}")
        return entry

    async def _wait_until(self, predicate) -> None:  # type: ignore[no-untyped-def]
        await self._changed.wait_for(lambda: self._failed or predicate())
        if self._failed:
            raise QueueError(f"the run failed: {self._closed}")
