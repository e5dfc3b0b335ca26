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

from asyncrl.sample import Group, PolicyVersion
from asyncrl.sample_queue.admission import Admission


class QueueError(RuntimeError):
    """A caller broke the life cycle above, or the run failed elsewhere; the message says which."""


class ConservationError(QueueError):
    """Groups are not all accounted for: a bug, and a reason to stop at once."""


class State(enum.Enum):
    IN_FLIGHT = "in_flight"
    QUEUED = "queued"
    LEASED = "leased"


@dataclass(frozen=True)
class Leased:
    """One group of a lease, without its payload. ``oldest``: the version its staleness counts from."""

    uid: str
    oldest: PolicyVersion
    in_queue_s: float


@dataclass(frozen=True)
class Lease:
    """``groups`` in the order of their payloads; empty, with the reason in ``closed``, when there will be none."""

    groups: tuple[Leased, ...]
    closed: str | None = None


@dataclass
class _Entry:
    state: State
    payload: bytes = b""
    oldest: PolicyVersion | None = None
    queued_s: float = 0.0
    step: int = 0


class SampleQueue:
    """The queue's core, for one asyncio loop; `asyncrl.sample_queue.actor` puts it into a Ray actor."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # in the order of issue
        self._dropped: Counter[str] = Counter()
        self._version: PolicyVersion | None = None
        self._changed = asyncio.Condition()
        self._closed: str | None = None
        self._failed = False
        self._over = False

    # -- the rollouter's side --------------------------------------------------------------------------------------

    async def issue(self, uids: Sequence[str]) -> int:
        """Start as many of these groups, from the front, as may start now; wait until it is one at least.

        Returns how many; 0 once the queue is closed, and no further call is needed. Raises QueueError for a uid that
        is already under way or if the run failed."""
        if not uids:
            raise QueueError("issue needs at least one group")
        async with self._changed:
            await self._wait_until(lambda: self._closed is not None or self._admissible() > 0)
            if self._closed is not None:
                return 0
            count = min(len(uids), self._admissible())
            for uid in uids[:count]:
                if uid in self._entries:
                    raise QueueError(f"group {uid} was issued before and is {self._entries[uid].state.value}")
                self._entries[uid] = _Entry(State.IN_FLIGHT)
            self._admission.issued += count
            return count

    async def put(self, groups: Sequence[bytes], now_s: float) -> None:
        """Hand over finished groups, one buffer each. Never waits."""
        async with self._changed:
            for buffer in groups:
                group = Group.from_buffer(buffer)
                if self._over:
                    continue  # counted as dropped when the run ended
                entry = self._expect(group.uid, State.IN_FLIGHT, "put")
                entry.oldest = group.oldest_version()
                entry.payload, entry.queued_s, entry.state = buffer, now_s, State.QUEUED
            self._changed.notify_all()

    async def drop(self, drops: Sequence[tuple[str, str]]) -> None:
        """Give up groups in flight: (uid, reason) each. Their places in the budget are free again."""
        async with self._changed:
            for uid, reason in drops:
                if not self._over:
                    self._expect(uid, State.IN_FLIGHT, "drop")
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
            leased = []
            for uid in front:
                entry = self._entries[uid]
                entry.state, entry.step = State.LEASED, step
                assert entry.oldest is not None
                leased.append(Leased(uid, entry.oldest, now_s - entry.queued_s))
            return Lease(tuple(leased)), [self._entries[uid].payload for uid in front]

    async def trained(self, step: int) -> None:
        """The groups leased to ``step`` are in the weights."""
        async with self._changed:
            uids = [uid for uid, e in self._entries.items() if e.state is State.LEASED and e.step == step]
            if not uids:
                raise QueueError(f"step {step} has no lease")
            for uid in uids:
                del self._entries[uid]
            self._admission.trained += len(uids)
            self._changed.notify_all()

    async def release(self, step: int) -> None:
        """The step was abandoned: its groups go back to their places."""
        async with self._changed:
            for entry in self._entries.values():
                if entry.state is State.LEASED and entry.step == step:
                    entry.state = State.QUEUED
            self._changed.notify_all()

    async def publish(self, version: PolicyVersion) -> dict[str, int]:
        """The replicas serve ``version`` from now on. Returns the balance; raises ConservationError if it is off."""
        async with self._changed:
            if self._version is not None and version <= self._version:
                raise QueueError(f"version {version} was published after {self._version}")
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
        async with self._changed:
            self._closed, self._over = self._closed or "the run is over", True
            for uid in list(self._entries):
                self._drop(uid, "run_ended")
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
