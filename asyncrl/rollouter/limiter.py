"""Admission of groups to the engines: enough samples in flight to keep every slot busy, and no more."""

from __future__ import annotations

import asyncio
import math
import sys

from asyncrl.observability.telemetry.clock import now_s

# from the end of a sample to the start of its successor: engines report ends up to 0.2 s late, and then groups wait up
# to 0.05 s to start in the call that ends others
_REFILL_S = 0.35
_RATE_WINDOW_S = 2.0  # time constant of the completion rate


class GroupPlaces:
    """The places of a group's ``n`` samples in a limiter: one for each that generates or is about to begin.

    An agent loop may prepare itself before its sample generates for the first time. With ``reserved`` the sample has
    its place meanwhile, without it another one may begin."""

    def __init__(self, limiter: InFlightLimiter, n: int, reserved: bool = False) -> None:
        self._limiter, self._generating, self._running = limiter, set(range(n)), n
        self._reserved = set(range(n)) if reserved else set()
        limiter.acquire(n, groups=1)

    def generates(self, index: int, generates: bool) -> None:
        """A sample generates, or waits for its agent loop."""
        if generates:
            self._reserved.discard(index)
        if generates and self._running and index not in self._generating:
            self._generating.add(index)
            self._limiter.acquire(1, groups=0)
        elif not generates and index in self._generating and index not in self._reserved:
            self._generating.remove(index)
            self._limiter.release(1, groups=0)

    def ended(self, index: int) -> None:
        self._reserved.discard(index)
        self.generates(index, False)
        self._running -= 1
        if not self._running:
            self._limiter.release(0, groups=1)

    def close(self) -> None:
        """Give back what is left."""
        if self._running:
            self._limiter.release(len(self._generating), groups=1)
        self._generating, self._running = set(), 0


class InFlightLimiter:
    """Caps samples that generate at slots + one group + expected completions, and groups that have not ended at
    ``max_groups`` (0: no cap).

    A freed slot thus always finds a waiting request. The cap counts samples, not groups, so a group that waits for its
    longest sample occupies one slot only, and one that waits for a tool none. A sample that comes back from its tool
    does not wait here, so there may be more for a while. ::

        count = await limiter.room(n)            # groups of n samples that may start, at least one
        places = GroupPlaces(limiter, n)         # for each group that starts

    ``idle`` is set while a slot has no sample."""

    def __init__(self, slots: int, max_groups: int) -> None:
        self._slots, self._groups_left = slots, max_groups or sys.maxsize
        self._samples = 0  # that generate
        self._released, self.idle = asyncio.Event(), asyncio.Event()
        self.idle.set()
        self._completions_per_s, self._measured_s = 0.0, now_s()

    def resize(self, slots: int) -> None:
        """Replicas joined or left."""
        self._slots = slots
        self._add(0, 0)
        self._released.set()

    @property
    def samples(self) -> int:
        """Samples that generate."""
        return self._samples

    async def room(self, n: int) -> int:
        """Wait until a group of ``n`` samples may start; returns how many such groups may."""
        while (count := min(-(-(self._slots + self._backlog(n) - self._samples) // n), self._groups_left)) < 1:
            self._released.clear()
            await self._released.wait()
        return count

    def acquire(self, samples: int, groups: int) -> None:
        self._add(samples, groups)

    def release(self, samples: int, groups: int) -> None:
        self._add(-samples, -groups)
        self._completions_per_s = self._recent_completions_per_s() + samples / _RATE_WINDOW_S
        self._measured_s = now_s()
        self._released.set()

    def _add(self, samples: int, groups: int) -> None:
        self._samples += samples
        self._groups_left -= groups
        if self._samples < self._slots:
            self.idle.set()
        else:
            self.idle.clear()

    def _backlog(self, n: int) -> int:
        """Samples that may queue behind the slots: one group, or the completions expected within `_REFILL_S`."""
        return max(n, min(round(self._recent_completions_per_s() * _REFILL_S), self._slots))

    def _recent_completions_per_s(self) -> float:
        """Exponentially decaying mean."""
        return self._completions_per_s * math.exp((self._measured_s - now_s()) / _RATE_WINDOW_S)
