"""Messages between the sample queue and the two pools: small values, no payloads except snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.types.versions import PolicyVersion

OVERDUE = "overdue"  # drop reason: past the staleness bound
POISON = "poison"  # drop reason: refused too often, or replicas died of it
SKIPPED = "skipped"  # drop reason: --skip
PROMPT_REFUSED = "prompt_refused"  # drop reason: by the chat template
PROMPT_TOO_LONG = "prompt_too_long"  # drop reason: longer than data.max_prompt_tokens
DROPPED_METRICS = "fully_async/dropped/"  # metrics of the queue, by drop reason


class Holder(NamedTuple):
    """A rollouter of a run. ``token``: its fencing token; of those of one shard the queue serves the newest."""

    shard: int = 0
    token: int = 0


ONLY = Holder()


class Ticket(NamedTuple):
    """Admission request for a group. ``place``: how many groups of the run come before it."""

    uid: str
    prompt_id: str
    epoch: int
    place: int


class Admitted(NamedTuple):
    """``started``: groups that their rollouter makes now; ``passed``: those that it does not, since they have ended, or
    another rollouter makes them; both empty once the queue is closed, and if the call does not wait. ``issued``: groups
    of the run so far.

    For pacing: ``number``: of the version last published; ``starved_s``: seconds for which the trainer had waited for
    groups by then."""

    started: list[str]
    passed: list[str]
    issued: int
    number: int | None = None
    starved_s: float = 0.0


class InFlight(NamedTuple):
    """A group that was issued and is not finished. ``snapshot``: its samples so far, as the rollouter last packed them:
    data of all parts, empty if there is none. ``attempt``: refusals so far."""

    ticket: Ticket
    snapshot: list[bytes]
    attempt: int = 0

    @property
    def uid(self) -> str:
        return self.ticket.uid


class Snapshot(NamedTuple):
    """One part of the snapshot of a group in flight. Part 0 is the whole snapshot and replaces an earlier one; each
    further part holds what is new since the one before. ``attempt``: the group's refusals so far."""

    uid: str
    attempt: int
    part: int
    data: bytes


class Refusal(NamedTuple):
    """A group that failed the checks of `asyncrl.sample_queue.acceptance`. It stays in flight, to be sampled again as
    ``attempt``; None: it was dropped as poison."""

    uid: str
    reason: str
    attempt: int | None


class Drop(NamedTuple):
    """``success``: share of the group's samples that succeeded; None without samples."""

    uid: str
    reason: str
    success: float | None = None


class Issued(NamedTuple):
    """A group of the run, in any state. ``number``: of the version under which it was issued; ``success``: None until
    it ends, 0 if it ends without samples."""

    uid: str
    number: int
    success: float | None


class Recovery(NamedTuple):
    """State for a new rollouter. ``issued``: groups of the run so far; ``last_uid``: the last of them, in any state,
    None if there is none. ``in_flight``: those that this rollouter makes. ``history``: all groups ever issued, in the
    order of issue, for a rollouter that asks for it."""

    issued: int
    last_uid: str | None
    in_flight: list[InFlight]
    history: list[Issued] = []  # noqa: RUF012 - never changed


@dataclass(frozen=True)
class LeasedGroup:
    """One group of a lease, without its payload. ``oldest``: version that its staleness counts from. ``processing_s``:
    duration of the attempt that finished it, in the rollouter; ``in_queue_s``: from then to the lease."""

    uid: str
    oldest: PolicyVersion
    processing_s: float
    in_queue_s: float


@dataclass(frozen=True)
class Lease:
    """``groups`` in the order of their payloads; empty, with the reason in ``closed``, if there will be none.
    ``waited_s``: seconds for which the queue waited for them.

    Tokens of versions numbered below ``mask_before`` are too old to be trained; None: no token is too old."""

    groups: tuple[LeasedGroup, ...]
    closed: str | None = None
    mask_before: int | None = None
    waited_s: float = field(default=0.0, compare=False)
