"""The life of a group: its record, the events that change it, and which changes are legal.

    Issued ──► in_flight ──Finished──► queued ──Leased──► leased ──Trained──► trained ──Covered──► trained, final
                   │                     ▲ │                 │  ▲                │
                   │                     │ │    Released ────┘  └── RolledBack ──┘ (to queued)
                   └───── Dropped ◄──────┴─┴──── from any of these three

Pure values: no file, no thread, no clock of its own. A group whose life has ended (dropped, or trained for good) is
forgotten here and stays in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asyncrl.sample import Group, PolicyVersion
from asyncrl.sample_queue.spool import KIND_GROUP, KIND_PARTIAL, Buffer, Place, Record, record

IN_FLIGHT, QUEUED, LEASED, TRAINED, DROPPED = STATES = ("in_flight", "queued", "leased", "trained", "dropped")


class JournalError(RuntimeError):
    """An event that the life above does not have, or a write that failed; the message says what to do."""


class GroupRecord(NamedTuple):
    """A row of the ledger's table `groups`, in the order of its columns. Times are Unix seconds."""

    seq: int  # 1, 2, 3, …: the order of issue, without a gap
    uid: str
    prompt_id: str
    epoch: int
    lineage: int  # the version under which it was issued
    number: int
    state: str
    issued_s: float
    reason: str | None = None  # why it was dropped
    step: int | None = None  # that it is leased to or trained by
    final: int = 0  # 1: a checkpoint covers its training
    oldest_lineage: int | None = None  # versions of its trained tokens; None if it has none
    oldest_number: int | None = None
    newest_lineage: int | None = None
    newest_number: int | None = None
    trained_lineage: int | None = None  # the version published last before its training
    trained_number: int | None = None
    samples: int | None = None
    tokens: int | None = None  # response tokens of all samples
    reward: float | None = None  # mean over the samples
    started_s: float | None = None  # its first token was drawn
    generated_s: float | None = None  # all of its samples were; then came their rewards
    finished_s: float | None = None
    leased_s: float | None = None
    trained_s: float | None = None
    dropped_s: float | None = None
    segment: int | None = None  # where the spool holds its payload
    offset: int | None = None
    length: int | None = None

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.lineage, self.number)

    @property
    def oldest(self) -> PolicyVersion | None:
        """The version its staleness counts from."""
        if self.oldest_lineage is None or self.oldest_number is None:
            return None
        return PolicyVersion(self.oldest_lineage, self.oldest_number)

    @property
    def newest(self) -> PolicyVersion | None:
        if self.newest_lineage is None or self.newest_number is None:
            return None
        return PolicyVersion(self.newest_lineage, self.newest_number)

    @property
    def place(self) -> Place | None:
        if self.segment is None or self.offset is None or self.length is None:
            return None
        return Place(self.segment, self.offset, self.length)


# -- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Issued:
    """A group starts under ``version``. Again with the same uid and seq while it is in flight: it starts anew."""

    uid: str
    prompt_id: str
    epoch: int
    seq: int
    version: PolicyVersion


class Measures(NamedTuple):
    """What the ledger keeps of a finished group; ``reward`` is the mean over its samples. Seconds are those before its
    end; None: not told."""

    uid: str
    oldest: PolicyVersion | None
    newest: PolicyVersion | None
    samples: int
    tokens: int
    reward: float | None
    started_ago_s: float | None
    generated_ago_s: float | None

    @classmethod
    def of(cls, group: Group) -> Measures:
        oldest, newest = trained_versions(group) or (None, None)
        reward = float(group.rewards.mean()) if len(group) else None
        end_s = group.times.get("finished_s")
        ago = {name: end_s - at_s for name, at_s in group.times.items()} if end_s is not None else {}
        return cls(
            group.uid,
            oldest,
            newest,
            len(group),
            len(group.tokens),
            reward,
            ago.get("started_s"),
            ago.get("generated_s"),
        )


@dataclass(frozen=True, slots=True, init=False)
class Finished:
    """``payload`` is the group's one buffer; whoever has read it already passes ``group`` too.

    Measuring and hashing happen here, in the caller's thread: in the writer's, each of these short calls would give
    the interpreter lock away and wait for a busy event loop to get it back. Raises ValueError if it is not a group."""

    measures: Measures
    record: Record

    def __init__(self, payload: Buffer, group: Group | None = None) -> None:
        object.__setattr__(self, "measures", Measures.of(group or Group.from_buffer(payload)))
        object.__setattr__(self, "record", record(KIND_GROUP, payload))


@dataclass(frozen=True, slots=True)
class Dropped:
    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class Leased:
    uids: Sequence[str]
    step: int


@dataclass(frozen=True, slots=True)
class Trained:
    uids: Sequence[str]
    step: int


@dataclass(frozen=True, slots=True)
class Released:
    uids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Published:
    """Replicas serve ``version``, some of them older ones still if ``rolling``; ``trained`` groups were in the weights
    when its number was published first."""

    version: PolicyVersion
    trained: int
    rolling: bool = False


@dataclass(frozen=True, slots=True)
class Retired:
    """No replica serves a version before ``oldest`` any more."""

    oldest: PolicyVersion


@dataclass(frozen=True, slots=True)
class Covered:
    """No restore will ever go back before ``step``: what was trained up to it is final, its payloads may go."""

    step: int


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The weights are those after ``step`` again: what was trained later, and all that is leased, is queued again."""

    step: int


@dataclass(frozen=True, slots=True, init=False)
class Partial:
    """A snapshot of the group in flight. The newest wins; one that comes after the group's end is not kept."""

    uid: str
    record: Record

    def __init__(self, uid: str, payload: Buffer) -> None:
        object.__setattr__(self, "uid", uid)
        object.__setattr__(self, "record", record(KIND_PARTIAL, payload))


@dataclass(frozen=True, slots=True)
class Closed:
    """No group starts any more, for ``reason``; a rollback opens the queue again."""

    reason: str


Event = (
    Issued
    | Finished
    | Dropped
    | Leased
    | Trained
    | Released
    | Published
    | Retired
    | Covered
    | RolledBack
    | Partial
    | Closed
)


class VersionRecord(NamedTuple):
    """A row of the ledger's table `versions`."""

    lineage: int
    number: int
    trained: int
    published_s: float


@dataclass
class Changes:
    """What a sequence of events comes to. Payloads have no place yet."""

    groups: dict[str, GroupRecord] = field(default_factory=dict)
    payloads: dict[str, Record] = field(default_factory=dict)
    partials: dict[str, Record | None] = field(default_factory=dict)  # None: no longer needed
    versions: list[VersionRecord] = field(default_factory=list)
    issued: int = 0
    covered_step: int = 0
    meta: dict[str, str | int] = field(default_factory=dict)

    def add(self, later: Changes) -> None:
        self.groups |= later.groups
        self.payloads |= later.payloads
        self.partials |= later.partials
        self.versions += later.versions
        self.meta |= later.meta
        self.issued, self.covered_step = later.issued, later.covered_step


class Lives:
    """All groups whose life goes on. `stage` says what events come to and changes nothing; `adopt` takes it over."""

    def __init__(
        self,
        groups: Iterable[GroupRecord] = (),
        partials: Mapping[str, Place] | None = None,
        issued: int = 0,
        version: PolicyVersion | None = None,
        covered_step: int = 0,
    ) -> None:
        self.groups = {group.uid: group for group in groups}
        #: the newest snapshot of groups in flight; None while it is on its way to the spool
        self.partials: dict[str, Place | None] = dict(partials or {})
        self.issued, self.version, self.covered_step = issued, version, covered_step

    def stage(self, events: Iterable[Event], at_s: float) -> Changes:
        """Raises JournalError for the first event that does not fit."""
        return _Stage(self, at_s).run(events)

    def adopt(self, changes: Changes) -> None:
        for uid, group in changes.groups.items():
            if group.state == DROPPED or group.final:
                self.groups.pop(uid, None)
            else:
                self.groups[uid] = group
        for uid, snapshot in changes.partials.items():
            if snapshot is None:
                self.partials.pop(uid, None)
            else:
                self.partials[uid] = None
        if changes.versions:
            self.version = PolicyVersion(*changes.versions[-1][:2])
        self.issued, self.covered_step = changes.issued, changes.covered_step

    def segments(self) -> set[int]:
        """The segments of the spool that somebody may still read."""
        of_groups = {group.segment for group in self.groups.values() if group.segment is not None}
        return of_groups | {place.segment for place in self.partials.values() if place is not None}


class _Stage:
    """One `Lives.stage`: the groups before it, and the changes so far on top of them."""

    def __init__(self, lives: Lives, at_s: float) -> None:
        self._lives, self._at_s, self._version = lives, at_s, lives.version
        self._changes = Changes(issued=lives.issued, covered_step=lives.covered_step)

    def run(self, events: Iterable[Event]) -> Changes:
        for event in events:
            match event:
                case Issued():
                    self._issue(event)
                case Finished():
                    self._finish(event)
                case Dropped(uid, reason):
                    group = self._get("Dropped", uid, IN_FLIGHT, QUEUED, LEASED)
                    self._set(group, state=DROPPED, reason=reason, dropped_s=self._at_s)
                case Leased(uids, step):
                    self._after_covered("Leased", step)
                    for uid in uids:
                        self._set(self._get("Leased", uid, QUEUED), state=LEASED, step=step, leased_s=self._at_s)
                case Trained(uids, step):
                    self._train(uids, step)
                case Released(uids):
                    for uid in uids:
                        self._queue_again(self._get("Released", uid, LEASED))
                case Published():
                    self._publish(event)
                case Retired(oldest):
                    self._changes.meta["served_from"] = str(oldest)
                case Covered(step):
                    self._cover(step)
                case RolledBack(step):
                    self._roll_back(step)
                case Closed(reason):
                    self._changes.meta["closed"] = reason
                case Partial(uid, snapshot):
                    known = self._find(uid)
                    if known is not None and known.state == IN_FLIGHT:
                        self._changes.partials[uid] = snapshot
                case _:
                    raise JournalError(f"expected an event of asyncrl.sample_queue.life, found {event!r}")
        return self._changes

    def _issue(self, event: Issued) -> None:
        known = self._find(event.uid)
        if known is not None and known.state == IN_FLIGHT and known.seq == event.seq:
            self._set(known, lineage=event.version.lineage, number=event.version.number)
            return
        if known is not None:
            raise JournalError(
                f"Issued: group {event.uid} was issued before, as number {known.seq}, and is {known.state}"
            )
        if event.seq != self._changes.issued + 1:
            raise JournalError(f"Issued: group {event.uid} has seq {event.seq}, expected {self._changes.issued + 1}")
        self._changes.issued = event.seq
        self._changes.groups[event.uid] = GroupRecord(
            event.seq, event.uid, event.prompt_id, event.epoch, *event.version, IN_FLIGHT, self._at_s
        )

    def _finish(self, event: Finished) -> None:
        uid, oldest, newest, samples, tokens, reward, started_ago_s, generated_ago_s = event.measures
        oldest_lineage, oldest_number = oldest or (None, None)
        newest_lineage, newest_number = newest or (None, None)
        self._set(
            self._get("Finished", uid, IN_FLIGHT),
            state=QUEUED,
            oldest_lineage=oldest_lineage,
            oldest_number=oldest_number,
            newest_lineage=newest_lineage,
            newest_number=newest_number,
            samples=samples,
            tokens=tokens,
            reward=reward,
            started_s=None if started_ago_s is None else self._at_s - started_ago_s,
            generated_s=None if generated_ago_s is None else self._at_s - generated_ago_s,
            finished_s=self._at_s,
        )
        self._changes.payloads[uid] = event.record

    def _train(self, uids: Sequence[str], step: int) -> None:
        self._after_covered("Trained", step)
        lineage, number = self._version or (None, None)
        for uid in uids:
            group = self._get("Trained", uid, LEASED)
            if group.step != step:
                raise JournalError(f"Trained: group {uid} is leased to step {group.step}, not to step {step}")
            self._set(group, state=TRAINED, trained_lineage=lineage, trained_number=number, trained_s=self._at_s)

    def _publish(self, event: Published) -> None:
        version = event.version
        if self._version is not None and version <= self._version:
            raise JournalError(f"Published: version {version} comes after {self._version}, expected a higher one")
        self._version = version
        self._changes.versions.append(VersionRecord(*version, event.trained, self._at_s))
        if not event.rolling:
            self._changes.meta["served_from"] = str(version)

    def _cover(self, step: int) -> None:
        if step > self._changes.covered_step:
            self._changes.covered_step = self._changes.meta["covered_step"] = step
        for group in self._in_state(TRAINED):
            if group.step is not None and group.step <= step:
                self._set(group, final=1)

    def _roll_back(self, step: int) -> None:
        if step < self._changes.covered_step:
            raise JournalError(
                f"cannot go back to step {step}: the groups trained up to step {self._changes.covered_step} are final "
                "and their payloads may be gone; report a step as covered when no older checkpoint will be restored"
            )
        for group in self._in_state(TRAINED, LEASED):
            if group.state == LEASED or (group.step is not None and group.step > step):
                self._queue_again(group)
        self._changes.meta |= {"served_from": "", "closed": ""}

    def _queue_again(self, group: GroupRecord) -> None:
        self._set(
            group, state=QUEUED, step=None, leased_s=None, trained_lineage=None, trained_number=None, trained_s=None
        )

    def _after_covered(self, verb: str, step: int) -> None:
        if step <= self._changes.covered_step:
            raise JournalError(f"{verb}: step {step} is covered by a checkpoint of step {self._changes.covered_step}")

    def _in_state(self, *states: str) -> list[GroupRecord]:
        now = (self._lives.groups | self._changes.groups) if self._changes.groups else self._lives.groups
        return [group for group in now.values() if group.state in states and not group.final]

    def _find(self, uid: str) -> GroupRecord | None:
        return self._changes.groups.get(uid) or self._lives.groups.get(uid)

    def _get(self, verb: str, uid: str, *states: str) -> GroupRecord:
        group = self._find(uid)
        if group is None or group.state not in states:
            found = "not under way" if group is None else group.state
            raise JournalError(f"{verb}: group {uid} is {found}, expected {' or '.join(states)}")
        return group

    def _set(self, group: GroupRecord, **fields: object) -> None:
        self._changes.groups[group.uid] = changed = group._replace(**fields)  # type: ignore[arg-type]
        if group.state == IN_FLIGHT != changed.state:
            uid = group.uid
            if uid in self._lives.partials or uid in self._changes.partials:
                self._changes.partials[uid] = None


def trained_versions(group: Group) -> tuple[PolicyVersion, PolicyVersion] | None:
    """The oldest and the newest version that sampled one of the group's trained tokens; None if it has none.

    By number, whatever the lineage: a lineage goes on with the number of the checkpoint that it began from, so the
    number is the place in training."""
    lineages, numbers = group.span_lineage, group.span_number
    if not len(numbers):
        return None
    if (numbers == numbers[0]).all() and (lineages == lineages[0]).all():
        if not group.loss_mask.any():
            return None
        only = PolicyVersion(int(lineages[0]), int(numbers[0]))
        return only, only
    sample = np.repeat(np.arange(len(group)), np.diff(group.span_offsets))
    start = group.offsets[sample] + group.span_start
    last = np.append(sample[1:] != sample[:-1], True)
    end = np.where(last, group.offsets[sample + 1], np.append(start[1:], 0))
    trained = np.concatenate([[0], np.cumsum(group.loss_mask)])
    used = np.flatnonzero(trained[end] > trained[start])
    if not len(used):
        return None
    order = used[np.lexsort((lineages[used], numbers[used]))]
    low, high = int(order[0]), int(order[-1])
    return PolicyVersion(int(lineages[low]), int(numbers[low])), PolicyVersion(int(lineages[high]), int(numbers[high]))
