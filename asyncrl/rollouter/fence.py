"""One owner at a time for an engine: a rollouter that starts takes over from one that died or hangs.

Without it the engine would go on with the requests of the dead one, and a call of ``events`` that the dead one left
waiting would swallow what the new one waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from asyncrl.rollouter.engine import EngineError, EventBatch, Request


class Generator(Protocol):
    """What of an engine the fence stands before (see `asyncrl.rollouter.engine.Engine`)."""

    async def submit(self, requests: Sequence[Request]) -> None: ...
    async def events(self) -> EventBatch: ...
    async def abort(self, ids: Sequence[str]) -> None: ...
    async def set_width(self, width: int | None) -> None: ...


class Fenced(Protocol):
    """A `Fence`, or an actor around one. All but ``attach`` raise EngineError for who is not the owner."""

    async def attach(self, owner: str) -> None: ...
    async def submit(self, owner: str, requests: Sequence[Request]) -> None: ...
    async def events(self, owner: str) -> EventBatch: ...
    async def abort(self, owner: str, ids: Sequence[str]) -> None: ...
    async def set_width(self, owner: str, width: int | None) -> None: ...


class Fence:
    """Implements `Fenced` in the engine's process."""

    def __init__(self, engine: Generator) -> None:
        self._engine = engine
        self._owner: str | None = None
        self._unfinished: set[str] = set()  # ids of requests whose end no event told yet
        self._listening: asyncio.Task[EventBatch] | None = None
        self._giving = asyncio.Lock()  # of requests or of the engine: one after the other

    async def attach(self, owner: str) -> None:
        """From now on only ``owner`` counts. Returns when the engine holds nothing of an earlier one: its requests are
        aborted, their events dropped, its width is forgotten, and its pending call of `events` raises EngineError."""
        async with self._giving:
            self._owner = owner
            if self._listening is not None:
                self._listening.cancel()
                await asyncio.wait([self._listening])
            await self._engine.abort(sorted(self._unfinished))
            while self._unfinished:
                await self._listen()
            await self._engine.set_width(None)

    async def submit(self, owner: str, requests: Sequence[Request]) -> None:
        async with self._giving:
            self._check(owner)
            await self._engine.submit(requests)
            self._unfinished |= {r.id for r in requests}

    async def events(self, owner: str) -> EventBatch:
        self._check(owner)
        self._listening = asyncio.ensure_future(self._listen())
        try:
            batch = await self._listening
        except asyncio.CancelledError:
            self._check(owner)  # raises if it was `attach` that ended the wait, not the caller
            raise
        self._check(owner)
        return batch

    async def abort(self, owner: str, ids: Sequence[str]) -> None:
        self._check(owner)
        await self._engine.abort(ids)

    async def set_width(self, owner: str, width: int | None) -> None:
        self._check(owner)
        await self._engine.set_width(width)

    async def _listen(self) -> EventBatch:
        batch = await self._engine.events()
        self._unfinished -= {id for id, finish in zip(batch.ids, batch.finish) if finish is not None}
        return batch

    def _check(self, owner: str) -> None:
        if owner != self._owner:
            raise EngineError(f"this engine serves {self._owner or 'nobody yet'}, not {owner}: attach first")


class Owned:
    """Implements `asyncrl.rollouter.router.ReplicaClient` for one owner of a fenced engine."""

    def __init__(self, fenced: Fenced, owner: str) -> None:
        self._fenced, self._owner = fenced, owner

    async def attach(self) -> None:
        await self._fenced.attach(self._owner)

    async def submit(self, requests: Sequence[Request]) -> None:
        await self._fenced.submit(self._owner, requests)

    async def events(self) -> EventBatch:
        return await self._fenced.events(self._owner)

    async def abort(self, ids: Sequence[str]) -> None:
        await self._fenced.abort(self._owner, ids)

    async def set_width(self, width: int | None) -> None:
        await self._fenced.set_width(self._owner, width)
