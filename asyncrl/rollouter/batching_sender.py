"""Coalesces items into batched calls, in order: what arrives during one call goes out in the next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from asyncrl.processes.tasks import first_of

T = TypeVar("T")


class BatchingSender(Generic[T]):
    """``run()`` is the only task that calls ``send``, and raises what that raises.

    Calls start at least ``interval_s`` apart, except after `hurry` and while ``urgent`` is set."""

    def __init__(
        self, send: Callable[[list[T]], Awaitable[None]], interval_s: float = 0.0, urgent: asyncio.Event | None = None
    ) -> None:
        self._send, self._interval_s = send, interval_s
        self._items: list[T] = []
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._hurried, self._urgent = asyncio.Event(), urgent or asyncio.Event()

    def add(self, item: T) -> None:
        self._items.append(item)
        self._drained.clear()
        self._filled.set()

    def hurry(self) -> bool:
        """Send the items that wait, if any, as soon as no call is under way; returns whether there are some."""
        if self._items:
            self._hurried.set()
        return bool(self._items)

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        earliest_s = clock()
        while True:
            await self._filled.wait()
            if not (clock() >= earliest_s or self._urgent.is_set() or self._hurried.is_set()):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(earliest_s):
                        await first_of(self._urgent.wait(), self._hurried.wait())
            self._hurried.clear()
            earliest_s = clock() + self._interval_s
            self._filled.clear()
            items, self._items = self._items, []
            await self._send(items)
            if not self._items:
                self._drained.set()

    async def drained(self) -> None:
        """Wait until all items added so far have been sent."""
        await self._drained.wait()
