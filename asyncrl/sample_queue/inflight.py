"""What a new rollouter is told of the groups that the one before it had in flight."""

from __future__ import annotations

from typing import NamedTuple


class InFlight(NamedTuple):
    """A group that was issued and not finished. ``snapshot``: its samples so far, as the rollouter packed them last."""

    uid: str
    prompt_id: str
    epoch: int
    snapshot: bytes | None


class Recovery(NamedTuple):
    """``last_uid``: of the group issued last in the run, whatever became of it; None if there was none yet."""

    last_uid: str | None
    in_flight: list[InFlight]
