"""What passes between the sample queue and the two pools: small values, no payloads but the snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.sample import PolicyVersion


class Ticket(NamedTuple):
    """A group that wants to start."""

    uid: str
    prompt_id: str
    epoch: int


class InFlight(NamedTuple):
    """A group that was issued and not finished. ``snapshot``: its samples so far, as the rollouter packed them last."""

    uid: str
    prompt_id: str
    epoch: int
    snapshot: bytes | None


class Recovery(NamedTuple):
    """What a new rollouter is told of the groups that the one before it had in flight.

    ``last_uid``: of the group issued last in the run, whatever became of it; None if there was none yet."""

    last_uid: str | None
    in_flight: list[InFlight]


@dataclass(frozen=True)
class LeasedGroup:
    """One group of a lease, without its payload. ``oldest``: the version its staleness counts from; ``processing_s``:
    from its issue to its end; ``in_queue_s``: from there to the lease."""

    uid: str
    oldest: PolicyVersion
    processing_s: float
    in_queue_s: float


@dataclass(frozen=True)
class Lease:
    """``groups`` in the order of their payloads; empty, with the reason in ``closed``, when there will be none.

    Tokens of versions numbered below ``mask_before`` are too old to be trained; None: none can be."""

    groups: tuple[LeasedGroup, ...]
    closed: str | None = None
    mask_before: int | None = None
