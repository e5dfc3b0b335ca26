"""How many training samples to generate at once, so that generation keeps the trainer's pace without stop and go.

A rollouter that is faster than the trainer uses up the staleness budget, stops, and starts again at the next version
with all of its slots. Fewer samples at once give the same throughput without the stops: each starts later, under
younger weights, and decodes faster. So the width narrows, in small steps, while generation is held up by the budget for
much of the time, and widens in large ones as soon as the trainer waits. What remains is a rollouter a little too
fast, so that the finished groups which the budget allows are there, and a straggler holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from asyncrl.telemetry.recorder import now_s

LOOK_EVERY_S = 1.0
LEAST = 0.75  # of the slots: narrower, the engine loses more throughput than it gains in evenness
HELD_UP = 0.1  # of the time, at most, is how much too fast the rollouter may stay
NARROW = 0.95
WAITED_FOR = 0.02  # of the time: for less counts as not at all
WIDEN = 1.3


class Queue(Protocol):
    def stats(self) -> Awaitable[dict[str, float]]: ...


class Pace:
    """``width`` samples of ``slots`` may generate at once. ``observe`` each version."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._width = float(slots)

    @property
    def width(self) -> int | None:
        """None: no limit. The engine then has more requests than slots, and a slot that becomes free is taken at once
        by one that is there already."""
        return round(self._width) if self._width < self._slots else None

    def observe(self, held_up: float, waited_for: float) -> int | None:
        """Shares of the time since the last call: that no group could start for want of budget, and that the trainer
        waited for a batch. Returns the new width."""
        if waited_for > WAITED_FOR:
            self._width *= WIDEN
        elif held_up > HELD_UP:
            self._width *= NARROW
        self._width = min(max(self._width, LEAST * self._slots), self._slots)
        return self.width


async def keep_pace(
    pace: Pace, queue: Queue, held_up_s: Callable[[], float], set_width: Callable[[int | None], None]
) -> None:
    """Adjust the width from version to version, until cancelled. ``held_up_s``: seconds so far that groups could not
    start for want of budget."""
    version, since_s, held_s, starved_s = -1.0, now_s(), 0.0, 0.0
    while True:
        stats = await queue.stats()
        if (now := stats.get("fully_async/version", -1.0)) != version:
            window_s, held, starved = now_s() - since_s, held_up_s(), stats["fully_async/queue/starved_s"]
            if version >= 0:
                set_width(pace.observe((held - held_s) / window_s, (starved - starved_s) / window_s))
            version, since_s, held_s, starved_s = now, now_s(), held, starved
        await asyncio.sleep(LOOK_EVERY_S)
