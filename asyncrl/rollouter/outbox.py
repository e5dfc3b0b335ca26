"""Collects items while a call is under way and hands over all of them in the next one: one call per batch, in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """``run()`` is the one task that calls ``deliver``; what it raises ends the task. ``every_s``: a call is made so
    long after the one before at the earliest, but at once while ``hurry`` is set."""

    def __init__(
        self, deliver: Callable[[list[T]], Awaitable[None]], every_s: float = 0.0, hurry: asyncio.Event | None = None
    ) -> None:
        self._deliver, self._every_s = deliver, every_s
        self._items: list[T] = []
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._hurry = hurry or asyncio.Event()

    def add(self, item: T) -> None:
        self._items.append(item)
        self._empty.clear()
        self._filled.set()

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        earliest_s = clock()
        while True:
            await self._filled.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(earliest_s):
                    await self._hurry.wait()
            earliest_s = clock() + self._every_s
            self._filled.clear()
            items, self._items = self._items, []
            await self._deliver(items)
            if not self._items:
                self._empty.set()

    async def emptied(self) -> None:
        """Wait until everything added so far is delivered."""
        await self._empty.wait()
