"""Collects items while a call is under way and hands over all of them in the next one: one call per batch, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """``run()`` is the one task that calls ``deliver``; what it raises ends the task."""

    def __init__(self, deliver: Callable[[list[T]], Awaitable[None]]) -> None:
        self._deliver = deliver
        self._items: list[T] = []
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, item: T) -> None:
        self._items.append(item)
        self._empty.clear()
        self._filled.set()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            items, self._items = self._items, []
            await self._deliver(items)
            if not self._items:
                self._empty.set()

    async def emptied(self) -> None:
        """Wait until everything added so far is delivered."""
        await self._empty.wait()
