"""Pacing: limits concurrent generation so that the rollouter keeps the trainer's pace without stop and go.

A rollouter faster than the trainer exhausts the staleness budget, stops, and restarts all of its slots at the next
version. Fewer concurrent samples give the same throughput without the stops: each starts later, under newer weights,
and decodes faster. The limit narrows in small steps while generation waits for budget much of the time, and widens in
large ones as soon as the trainer waits. The rollouter stays slightly too fast, so that a full budget of finished groups
is ready and no straggler blocks a step.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.observability.telemetry.clock import now_s

MIN_SHARE = 0.75  # of the slots: below it the engine loses more throughput than it gains in evenness
MAX_BLOCKED = 0.1  # share of the time that generation may wait for budget before the limit narrows
NARROW = 0.95
MAX_STARVED = 0.02  # share of the time that the trainer may wait before the limit widens
WIDEN = 1.3


class GenerationPacer:
    """Controller of the number of training samples that a replica generates at once, out of ``slots``. Calls
    ``set_limit`` when it begins, and with each version; None is no limit: the engine then holds more requests than
    slots, so a freed slot is refilled at once."""

    def __init__(self, slots: int, set_limit: Callable[[int | None], None]) -> None:
        self._slots, self._set_limit = slots, set_limit
        self._limit = float(slots)
        self._number: int | None = None
        self._since_s = self._blocked_s = self._starved_s = 0.0  # when that version began
        set_limit(None)

    def note_version(self, number: int | None, blocked_s: float, starved_s: float) -> None:
        """Adjust the limit if version ``number`` is new. ``blocked_s``, ``starved_s``: seconds so far for which groups
        waited for staleness budget, and the trainer for groups."""
        if number == self._number:
            return
        if self._number is not None and (window_s := now_s() - self._since_s) > 0:
            self.observe((blocked_s - self._blocked_s) / window_s, (starved_s - self._starved_s) / window_s)
        self._number, self._since_s, self._blocked_s, self._starved_s = number, now_s(), blocked_s, starved_s

    def observe(self, blocked: float, starved: float) -> None:
        """Adjust the limit to the shares of a version's time in which groups waited for staleness budget (``blocked``)
        and the trainer waited for groups (``starved``)."""
        if starved > MAX_STARVED:
            self._limit *= WIDEN
        elif blocked > MAX_BLOCKED:
            self._limit *= NARROW
        self._limit = min(max(self._limit, MIN_SHARE * self._slots), self._slots)
        self._set_limit(round(self._limit) if self._limit < self._slots else None)
