"""Records that the state machine passes to the journal, and that the journal returns after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from asyncrl.sample_queue.spool import Record
from asyncrl.types.versions import PolicyVersion

IN_FLIGHT, QUEUED, LEASED, TRAINED, DROPPED = STATES = ("in_flight", "queued", "leased", "trained", "dropped")

HOLDER_KEY = "holder/"  # before a shard: key in ``meta`` of the fencing token of its newest rollouter


class JournalError(RuntimeError):
    """The journal is closed, in use elsewhere, or a write failed; the message says what to do."""


class GroupRecord(NamedTuple):
    """Row of the ledger's table `groups`, in the order of its columns. Times are Unix seconds."""

    seq: int  # order of issue: 1, 2, 3, … without a gap
    uid: str
    prompt_id: str
    epoch: int
    lineage: int  # version under which it was issued
    number: int
    state: str
    issued_s: float
    reason: str | None = None  # why it was dropped
    step: int | None = None  # step that leased or trained it
    final: int = 0  # 1: no restore can undo its training
    oldest_lineage: int | None = None  # versions of its trained tokens; None if it has none
    oldest_number: int | None = None
    newest_lineage: int | None = None
    newest_number: int | None = None
    trained_lineage: int | None = None  # version published last before its training
    trained_number: int | None = None
    samples: int | None = None
    sequences: int | None = None  # token sequences of all samples
    tokens: int | None = None  # response tokens of all sequences
    trained_tokens: int | None = None  # those that have loss_mask
    reward: float | None = None  # mean over the samples
    success: float | None = None  # share of the samples that succeeded
    started_s: float | None = None  # first token sampled
    generated_s: float | None = None  # all samples generated; rewards follow
    finished_s: float | None = None
    processing_s: float | None = None  # duration of the attempt that finished it, by the rollouter's clock
    leased_s: float | None = None
    trained_s: float | None = None
    dropped_s: float | None = None
    attempt: int = 0  # refusals so far, see `asyncrl.sample_queue.acceptance`
    refusal: str | None = None  # reason of the last one
    shard: int = 0  # of the rollouter that makes it

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.lineage, self.number)

    @property
    def oldest(self) -> PolicyVersion | None:
        """Version that the group's staleness counts from."""
        if self.oldest_lineage is None or self.oldest_number is None:
            return None
        return PolicyVersion(self.oldest_lineage, self.oldest_number)

    @property
    def newest(self) -> PolicyVersion | None:
        if self.newest_lineage is None or self.newest_number is None:
            return None
        return PolicyVersion(self.newest_lineage, self.newest_number)


class VersionRecord(NamedTuple):
    """Row of the ledger's table `versions`."""

    lineage: int
    number: int
    trained: int  # groups in the weights when this number was first published; 0 until then
    published_s: float | None  # None: announced only


@dataclass
class Changes:
    """Rows and payloads that changed since the last `take`; the last value of each key wins."""

    groups: dict[str, GroupRecord] = field(default_factory=dict)
    payloads: dict[str, Record | None] = field(default_factory=dict)  # None: no longer needed
    versions: dict[PolicyVersion, VersionRecord] = field(default_factory=dict)
    meta: dict[str, str | int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.groups or self.payloads or self.versions or self.meta)

    def take(self) -> Changes:
        """Returns the changes so far and clears them."""
        taken = replace(self)
        self.groups, self.payloads, self.versions, self.meta = {}, {}, {}, {}
        return taken

    def add(self, later: Changes) -> None:
        self.groups |= later.groups
        self.payloads |= later.payloads
        self.versions |= later.versions
        self.meta |= later.meta


@dataclass(frozen=True)
class Recovered:
    """Durable state of a run.

    ``groups``: all that are neither dropped nor final, in the order of issue. ``issued``, ``final``: groups issued, and
    groups whose training no restore can undo; ``dropped``: by reason. ``version``: last one published; ``versions``:
    all ever announced, in order; ``served``: those that replicas serve, oldest first, each with the number of groups
    trained when it was published; empty between a rollback and the next publication. ``last_uid``: group issued last.
    ``closed``: why no more groups are issued, if so. ``holders``: shard → fencing token of its newest rollouter.
    ``total_groups``: that the run trains, as a `SampleQueue.rollback` said last."""

    groups: list[GroupRecord] = field(default_factory=list)
    issued: int = 0
    final: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    version: PolicyVersion | None = None
    versions: list[PolicyVersion] = field(default_factory=list)
    served: dict[PolicyVersion, int] = field(default_factory=dict)
    covered_step: int = 0
    last_uid: str | None = None
    closed: str | None = None
    holders: dict[int, int] = field(default_factory=dict)
    total_groups: int | None = None


def holders(meta: Mapping[str, str | int | float]) -> dict[int, int]:
    """Shard → fencing token of its newest rollouter."""
    return {int(key.removeprefix(HOLDER_KEY)): int(token) for key, token in meta.items() if key.startswith(HOLDER_KEY)}
