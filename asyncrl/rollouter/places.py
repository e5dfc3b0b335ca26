"""How many groups may be under way: enough that no slot of an engine waits for a request, and no more than that."""

from __future__ import annotations

import asyncio


class Places:
    """Groups start while fewer than ``samples`` of their samples generate, and no more than ``groups`` (0: any number)
    at once. Samples are counted, not groups: of a group that waits for its longest sample one place is taken. ::

    count = await places.free(n)         # at least one
    places.take(n)                       # for each group that does start
    places.leave()                       # a sample of it has ended
    places.leave(rest, groups=1)         # all of it has
    """

    def __init__(self, samples: int, groups: int) -> None:
        self._samples, self._groups = samples, groups or samples
        self._left = asyncio.Event()

    async def free(self, n: int) -> int:
        """Wait until a group of ``n`` samples may start; returns how many such groups may."""
        while (count := min(-(-self._samples // n), self._groups)) < 1:
            self._left.clear()
            await self._left.wait()
        return count

    def take(self, n: int) -> None:
        self._samples -= n
        self._groups -= 1

    def leave(self, samples: int = 1, groups: int = 0) -> None:
        self._samples += samples
        self._groups += groups
        self._left.set()
