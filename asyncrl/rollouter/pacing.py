"""Pacing: limits concurrent generation so that the rollouter keeps the trainer's pace without stop and go.

A rollouter faster than the trainer exhausts the staleness budget, stops, and restarts all of its slots at the next
version. Fewer concurrent samples give the same throughput without the stops: each starts later, under newer weights,
and decodes faster. The limit narrows in small steps while generation waits for budget much of the time, and widens in
large ones as soon as the trainer waits. The rollouter stays slightly too fast, so that a full budget of finished groups
is ready and no straggler blocks a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from asyncrl.observability.telemetry.clock import now_s

POLL_EVERY_S = 1.0
MIN_SHARE = 0.75  # of the slots: below it the engine loses more throughput than it gains in evenness
MAX_BLOCKED = 0.1  # share of the time that generation may wait for budget before the limit narrows
NARROW = 0.95
MAX_STARVED = 0.02  # share of the time that the trainer may wait before the limit widens
WIDEN = 1.3


class Queue(Protocol):
    def stats(self) -> Awaitable[dict[str, float]]: ...


class GenerationPacer:
    """Controller of the number of training samples that generate at once, out of ``slots``; `observe` each version."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._limit = float(slots)

    @property
    def limit(self) -> int | None:
        """None: no limit. The engine then holds more requests than slots, so a freed slot is refilled at once."""
        return round(self._limit) if self._limit < self._slots else None

    def observe(self, blocked: float, starved: float) -> int | None:
        """Adjust the limit to the shares of the time since the last call in which groups waited for staleness budget
        (``blocked``) and the trainer waited for a batch (``starved``). Returns the new limit."""
        if starved > MAX_STARVED:
            self._limit *= WIDEN
        elif blocked > MAX_BLOCKED:
            self._limit *= NARROW
        self._limit = min(max(self._limit, MIN_SHARE * self._slots), self._slots)
        return self.limit


async def run_pacer(
    pacer: GenerationPacer, queue: Queue, blocked_s: Callable[[], float], set_limit: Callable[[int | None], None]
) -> None:
    """Adjust the limit at each version until cancelled. ``blocked_s``: total seconds that groups waited for budget."""
    version, since_s, blocked_before_s, starved_before_s = -1.0, now_s(), 0.0, 0.0
    while True:
        stats = await queue.stats()
        if (current := stats.get("fully_async/version", -1.0)) != version:
            window_s = now_s() - since_s
            blocked, starved = blocked_s(), stats["fully_async/queue/starved_s"]
            if version >= 0:
                limit = pacer.observe((blocked - blocked_before_s) / window_s, (starved - starved_before_s) / window_s)
                set_limit(limit)
            version, since_s, blocked_before_s, starved_before_s = current, now_s(), blocked, starved
        await asyncio.sleep(POLL_EVERY_S)
