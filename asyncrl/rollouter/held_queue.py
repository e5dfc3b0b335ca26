"""The sample queue as one rollouter calls it, with its fencing token: calls of a rollouter that was replaced fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.sample_queue.messages import Drop, Recovery, Refusal, Snapshot, Ticket


class HeldQueue:
    """Implements `asyncrl.rollouter.loop.QueueClient` over a client of the queue's actor."""

    def __init__(self, queue: Any, token: int) -> None:
        self._queue, self._token = queue, token

    async def recover(self, history: bool = False) -> Recovery:
        return await self._queue.recover(self._token, history)

    async def room(self, count: int) -> tuple[int, int]:
        return await self._queue.room(count, self._token)

    async def issue(self, tickets: Sequence[Ticket]) -> int:
        return await self._queue.issue(tickets, self._token)

    async def put(self, groups: Sequence[bytes]) -> Sequence[Refusal]:
        return await self._queue.put(groups, self._token)

    async def drop(self, drops: Sequence[Drop]) -> None:
        await self._queue.drop(drops, self._token)

    async def snapshot(self, parts: Sequence[Snapshot]) -> None:
        await self._queue.snapshot(parts, self._token)

    async def overdue(self) -> list[str]:
        return await self._queue.overdue(self._token)

    async def close(self, reason: str) -> None:
        await self._queue.close(reason)
