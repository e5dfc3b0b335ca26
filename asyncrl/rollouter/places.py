"""How many groups may be under way: enough that no slot of an engine waits for a request, and no more than that."""

from __future__ import annotations

import asyncio
import math
import sys

from asyncrl.telemetry.recorder import now_s

_COVER_S = 0.3  # until the end of a sample has let another start: engines tell of ends up to 0.2 s later
_OVER_S = 2.0  # about how far back ends are counted


class Places:
    """Groups start while fewer of their samples are under way than the engines have ``slots``, one group and what ends
    before its successors can arrive: a request waits behind every slot that becomes free. No more than ``groups`` (0:
    any number) at once. Samples are counted, not groups: of a group that waits for its longest sample one place is
    taken. ::

    count = await places.free(n)         # at least one
    places.take(n)                       # for each group that does start
    places.leave()                       # a sample of it has ended
    places.leave(rest, groups=1)         # all of it has

    ``idle`` is set while a slot has no sample."""

    def __init__(self, slots: int, groups: int) -> None:
        self._slots, self._groups = slots, groups or sys.maxsize
        self._samples = 0  # under way
        self._left, self.idle = asyncio.Event(), asyncio.Event()
        self.idle.set()
        self._ends_per_s, self._counted_s = 0.0, now_s()

    async def free(self, n: int) -> int:
        """Wait until a group of ``n`` samples may start; returns how many such groups may."""
        while (count := min(-(-(self._slots + self._waiting(n) - self._samples) // n), self._groups)) < 1:
            self._left.clear()
            await self._left.wait()
        return count

    def take(self, n: int) -> None:
        self._change(n, 1)

    def leave(self, samples: int = 1, groups: int = 0) -> None:
        self._change(-samples, -groups)
        self._ends_per_s = self._recent_ends_per_s() + samples / _OVER_S
        self._counted_s = now_s()
        self._left.set()

    def _change(self, samples: int, groups: int) -> None:
        self._samples += samples
        self._groups -= groups
        if self._samples < self._slots:
            self.idle.set()
        else:
            self.idle.clear()

    def _waiting(self, n: int) -> int:
        """How many samples may wait for a slot."""
        return max(n, min(round(self._recent_ends_per_s() * _COVER_S), self._slots))

    def _recent_ends_per_s(self) -> float:
        """A mean that forgets exponentially."""
        return self._ends_per_s * math.exp((self._counted_s - now_s()) / _OVER_S)
