"""State machine of a group: the only code that changes a group's state.

                                    ┌─────── release ───────┐
                                    ▼                       │
    issue ──► in flight ──finish──► queued ──lease──► leased ──train──► trained ──cover──► trained, final
               │   ⟲ issue again     │ ▲                │                 │
               │   ⟲ refuse          │ └── roll_back ───┴─────────────────┘
               └────────drop─────────┴──► dropped

`GroupTable` checks and applies a transition, and collects the changed rows, which the journal persists. Pure: no files,
no threads, an injected clock. Groups that are dropped or final leave the table and stay in the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from asyncrl.observability.telemetry.clock import unix_s
from asyncrl.sample_queue.records import DROPPED, IN_FLIGHT, LEASED, QUEUED, TRAINED, Changes, GroupRecord, Recovered
from asyncrl.sample_queue.spool import Buffer, record
from asyncrl.types.groups import Group
from asyncrl.types.versions import PolicyVersion


class QueueError(RuntimeError):
    """An illegal transition, or a run that failed elsewhere; the message says which."""


class ConservationError(QueueError):
    """Groups are unaccounted for: a bug, and the run must stop."""


class GroupTable:
    """All groups that are neither dropped nor final, and counts of the others.

    Each transition either happens as a whole or raises QueueError and changes nothing. ``changes`` collects the rows
    and payloads to persist."""

    def __init__(self, found: Recovered, changes: Changes, clock: Callable[[], float] = unix_s) -> None:
        self._changes, self._clock = changes, clock
        #: groups in flight, queued or leased, in the order of issue
        self.open = {group.uid: group for group in found.groups if group.state != TRAINED}
        self.leased = {group.uid: group for group in found.groups if group.state == LEASED}  #: also in ``open``
        self._trained = {group.uid: group for group in found.groups if group.state == TRAINED}  # provisionally
        self.in_flight = Counter(group.shard for group in found.groups if group.state == IN_FLIGHT)  #: by shard
        #: number of those in each state, by the number of the version under which they started
        self.in_flight_of = Counter(group.number for group in found.groups if group.state == IN_FLIGHT)
        self.queued_of = Counter(group.number for group in found.groups if group.state == QUEUED)
        self._final = found.final
        self.issued, self.last_uid = found.issued, found.last_uid
        self.dropped = Counter(found.dropped)  # by reason
        self.covered_step = found.covered_step

    # -- queries ---------------------------------------------------------------------------------------------------

    @property
    def trained(self) -> int:
        """Groups in the weights, provisionally or for good."""
        return self._final + len(self._trained)

    @property
    def held(self) -> int:
        """Groups issued and not dropped: those that the staleness budget counts."""
        return self.issued - self.dropped.total()

    @property
    def queued(self) -> int:
        """Finished groups that are not leased."""
        return len(self.open) - self.in_flight.total() - len(self.leased)

    def state(self, uid: str) -> str | None:
        """None for a group that was never issued, or that is dropped or final."""
        group = self.open.get(uid) or self._trained.get(uid)
        return group.state if group is not None else None

    def in_state(self, state: str) -> list[GroupRecord]:
        """Open groups in this state, in the order of issue."""
        return [group for group in self.open.values() if group.state == state]

    def waiting(self) -> Iterator[GroupRecord]:
        """Groups in flight or queued, in the order of issue."""
        return (group for group in self.open.values() if group.state != LEASED)

    def leased_to(self, step: int) -> list[GroupRecord]:
        return [group for group in self.leased.values() if group.step == step]

    def has_trained(self, step: int) -> bool:
        """True if the groups of ``step`` are in the weights."""
        return step <= self.covered_step or any(group.step == step for group in self._trained.values())

    def balance(self) -> dict[str, int]:
        """issued = trained + queued + leased + in flight + dropped, or ConservationError."""
        states = Counter(group.state for group in self.open.values())
        counts = {"issued": self.issued, "trained": self.trained, "dropped": self.dropped.total()}
        counts |= {state: states[state] for state in (IN_FLIGHT, QUEUED, LEASED)}
        if counts["issued"] != sum(counts.values()) - counts["issued"]:
            raise ConservationError(f"groups do not add up: {counts}, dropped by reason {dict(self.dropped)}")
        return counts

    # -- the rollouter's transitions -------------------------------------------------------------------------------

    def issue(self, uid: str, prompt_id: str, epoch: int, version: PolicyVersion, shard: int = 0) -> None:
        """Starts a group under ``version``, or restarts one in flight, which keeps its place and the version with the
        lower number: it may continue tokens that it already has. ``shard``: of the rollouter that makes it."""
        if (known := self.open.get(uid)) is not None:
            if known.state != IN_FLIGHT:
                raise QueueError(f"issue: group {uid} is {known.state}, expected a new group or one in flight")
            lineage, number = min(known.version, version, key=lambda v: (v.number, v.lineage))
            self._set(known, lineage=lineage, number=number, shard=shard)
            return
        if uid in self._trained:
            raise QueueError(f"issue: group {uid} is trained, expected a new group or one in flight")
        self.issued, self.last_uid = self.issued + 1, uid
        record = GroupRecord(self.issued, uid, prompt_id, epoch, *version, IN_FLIGHT, self._clock(), shard=shard)
        self._put(record)

    def finish(self, group: Group, payload: Buffer) -> None:
        """Queues a group in flight; ``payload`` is its one buffer."""
        known = self._expect("finish", group.uid, IN_FLIGHT)
        if (versions := group.trained_versions()) is None:
            raise QueueError(f"finish: group {group.uid} has no trained token; drop it instead")
        oldest, newest = versions
        at_s, times = self._clock(), group.times
        # the group's times are on the rollouter's clock: only differences to its end are meaningful here
        ago = {name: times["finished_s"] - then for name, then in times.items()} if "finished_s" in times else {}
        self._changes.payloads[group.uid] = record(payload)
        self._set(
            known,
            state=QUEUED,
            oldest_lineage=oldest.lineage,
            oldest_number=oldest.number,
            newest_lineage=newest.lineage,
            newest_number=newest.number,
            samples=len(group),
            sequences=len(group.prefix),
            tokens=len(group.tokens),
            trained_tokens=int(group.loss_mask.sum()),
            reward=float(group.rewards.mean()),
            success=float(group.succeeded.mean()),
            started_s=at_s - ago["started_s"] if "started_s" in ago else None,
            generated_s=at_s - ago["generated_s"] if "generated_s" in ago else None,
            finished_s=at_s,
            processing_s=ago.get("issued_s", at_s - known.issued_s),
        )

    def refuse(self, uid: str, reason: str) -> None:
        """Counts a failed attempt; the group stays in flight, to be sampled again from its beginning."""
        known = self._expect("refuse", uid, IN_FLIGHT)
        self._set(known, attempt=known.attempt + 1, refusal=reason)

    def drop(self, uid: str, reason: str, success: float | None = None) -> None:
        known = self._expect("drop", uid, IN_FLIGHT, QUEUED)
        self._changes.payloads[uid] = None
        self.dropped[reason] += 1
        success = known.success if success is None else success
        self._set(known, state=DROPPED, reason=reason, success=success, dropped_s=self._clock())

    # -- the trainer's transitions ---------------------------------------------------------------------------------

    def lease(self, uids: Sequence[str], step: int) -> None:
        self._expect_uncovered("lease", step)
        groups = [self._expect("lease", uid, QUEUED) for uid in uids]
        at_s = self._clock()
        for group in groups:
            self._set(group, state=LEASED, step=step, leased_s=at_s)

    def train(self, step: int, version: PolicyVersion | None) -> None:
        """Marks the groups leased to ``step`` as trained; ``version`` was the last one published before."""
        self._expect_uncovered("train", step)
        at_s = self._clock()
        lineage, number = version or (None, None)
        for group in self.leased_to(step):
            self._set(group, state=TRAINED, trained_lineage=lineage, trained_number=number, trained_s=at_s)

    def release(self, step: int) -> None:
        """Queues the groups leased to ``step`` again, each in its place in the order of issue."""
        for group in self.leased_to(step):
            self._requeue(group)

    def cover(self, step: int) -> None:
        """Makes the groups trained up to ``step`` final and deletes their payloads: no restore goes back before it."""
        if step > self.covered_step:
            self.covered_step = self._changes.meta["covered_step"] = step
            self._changes.meta["issued"] = self.issued
        for group in [group for group in self._trained.values() if group.step is not None and group.step <= step]:
            self._changes.payloads[group.uid] = None
            self._set(group, final=1)

    def roll_back(self, step: int) -> None:
        """Goes back to the state after ``step``: groups leased, or trained later, are queued in their places."""
        if step < self.covered_step:
            raise QueueError(
                f"cannot go back to step {step}: the groups trained up to step {self.covered_step} are final "
                "and their payloads may be deleted; cover a step only when no older checkpoint will be restored"
            )
        for group in self._undone_by_rollback(step):
            self._requeue(group)
        self.open = dict(sorted(self.open.items(), key=lambda item: item[1].seq))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _undone_by_rollback(self, step: int) -> list[GroupRecord]:
        later = [group for group in self._trained.values() if group.step is not None and group.step > step]
        return [*self.leased.values(), *later]

    def _requeue(self, group: GroupRecord) -> None:
        self._set(
            group, state=QUEUED, step=None, leased_s=None, trained_lineage=None, trained_number=None, trained_s=None
        )

    def _expect(self, verb: str, uid: str, *states: str) -> GroupRecord:
        found = self.state(uid)
        if found not in states:
            raise QueueError(f"{verb}: group {uid} is {found or 'unknown'}, expected {' or '.join(states)}")
        return self.open[uid]

    def _expect_uncovered(self, verb: str, step: int) -> None:
        if step <= self.covered_step:
            raise QueueError(f"{verb}: step {step} is covered by a checkpoint of step {self.covered_step}")

    def _set(self, group: GroupRecord, **fields: object) -> None:
        self._put(group._replace(**fields))  # type: ignore[arg-type]

    def _put(self, group: GroupRecord) -> None:
        """Stores the record where its state belongs."""
        uid = group.uid
        if (before := self.open.get(uid)) is not None:
            self._count(before, -1)
        self._count(group, 1)
        self._changes.groups[uid] = group
        if group.final:
            del self._trained[uid]
            self._final += 1
        elif group.state == TRAINED:
            del self.open[uid]
            self._trained[uid] = group
        elif group.state == DROPPED:
            del self.open[uid]
        else:
            self._trained.pop(uid, None)
            self.open[uid] = group
        if group.state == LEASED:
            self.leased[uid] = group
        else:
            self.leased.pop(uid, None)

    def _count(self, group: GroupRecord, change: int) -> None:
        if group.state == IN_FLIGHT:
            self.in_flight[group.shard] += change
            _add(self.in_flight_of, group.number, change)
        elif group.state == QUEUED:
            _add(self.queued_of, group.number, change)


def _add(counts: Counter[int], number: int, change: int) -> None:
    counts[number] += change
    if not counts[number]:
        del counts[number]  # numbers grow with the run
