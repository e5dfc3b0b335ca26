"""The sample queue as one rollouter calls it, which names itself: calls of a rollouter that was replaced fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.sample_queue.messages import Admitted, Drop, Holder, Recovery, Refusal, Snapshot, Ticket


class HeldQueue:
    """Implements `asyncrl.rollouter.loop.QueueClient` over a client of the queue's actor."""

    def __init__(self, queue: Any, holder: Holder) -> None:
        self._queue, self._holder = queue, holder

    async def recover(self, history: bool = False) -> Recovery:
        return await self._queue.recover(self._holder, history)

    async def room(self, count: int) -> tuple[int, int]:
        return await self._queue.room(count, self._holder)

    async def issue(self, tickets: Sequence[Ticket], count: int) -> Admitted:
        return await self._queue.issue(tickets, count, self._holder)

    async def put_and_issue(
        self, groups: Sequence[bytes], tickets: Sequence[Ticket], count: int
    ) -> tuple[Sequence[Refusal], Admitted]:
        return await self._queue.put_and_issue(groups, tickets, count, self._holder)

    async def drop(self, drops: Sequence[Drop]) -> None:
        await self._queue.drop(drops, self._holder)

    async def snapshot(self, parts: Sequence[Snapshot]) -> None:
        await self._queue.snapshot(parts, self._holder)

    async def overdue(self) -> list[str]:
        return await self._queue.overdue(self._holder)

    async def end(self, reason: str) -> None:
        await self._queue.end(reason, self._holder)
