"""Exclusive lease of an engine by one rollouter, guarded by a fencing token.

A restarted rollouter takes over engines whose previous rollouter died or hangs. Every call carries the caller's token,
a number that grows with each rollouter of a run; the engine serves only the newest. Otherwise it would keep generating
for the dead rollouter, whose pending ``events`` call would swallow the events that the new one waits for.

Calls are also numbered, since one may come twice: through a relay that then dies, and without it
(`asyncrl.processes.relay`). Repeated, ``events`` returns the same batch, and the others do nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from asyncrl.rollouter.engines.base import Engine, EngineError, EventBatch, Request, Scheduling

#: numbers of first calls: those of a later `LeasedEngine` are higher, so a late call of an earlier one does nothing
_FIRST = itertools.count(0, 2**32)


class FencedEngine(Protocol):
    """Engine calls that carry a fencing token: an `EngineLease`, or the actor around one. ``number``: of this call
    among those of `events`, or among the others, since `attach`, from its ``first``.

    All raise EngineError for a token that is not the newest one attached."""

    async def attach(self, token: int, first: int) -> None: ...
    async def submit(self, token: int, number: int, requests: Sequence[Request]) -> None: ...
    async def events(self, token: int, number: int) -> EventBatch: ...
    async def abort(self, token: int, number: int, ids: Sequence[str]) -> None: ...
    async def set_scheduling(self, token: int, number: int, scheduling: Scheduling) -> None: ...


class EngineLease:
    """Checks tokens in the engine's process; implements `FencedEngine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._token: int | None = None
        self._unfinished: set[str] = set()  # ids of requests whose end no event has reported
        self._listening: asyncio.Task[EventBatch] | None = None  # for the newest batch, until the next is wanted
        self._batches = self._commands = 0  # calls of the holder
        self._lock = asyncio.Lock()  # serialises commands and the transfer of the lease

    async def attach(self, token: int, first: int) -> None:
        """Transfer the lease to ``token``. Returns once the earlier holder's requests are aborted, their events dropped
        and its scheduling reset. Its pending call of `events` raises EngineError.

        Raises EngineError if a newer token holds the lease."""
        async with self._lock:
            if self._token is not None and token < self._token:
                self._check(token)
            self._token, self._batches, self._commands = token, first, first
            if self._listening is not None:
                self._listening.cancel()
                await asyncio.wait([self._listening])
            await self._engine.abort(sorted(self._unfinished))
            while self._unfinished:
                await self._next_events()
            await self._engine.set_scheduling(Scheduling())

    async def submit(self, token: int, number: int, requests: Sequence[Request]) -> None:
        async def work() -> None:
            new = {r.id for r in requests} - self._unfinished
            self._unfinished |= new  # first: a short request may end while others are still being added
            try:
                await self._engine.submit(requests)
            except BaseException:
                self._unfinished -= new
                raise

        await self._command(token, number, work)

    async def events(self, token: int, number: int) -> EventBatch:
        self._check(token)
        if number == self._batches:
            self._batches += 1
            self._listening = asyncio.create_task(self._next_events())
            self._listening.add_done_callback(lambda task: task.cancelled() or task.exception())  # its call may be gone
        elif number != self._batches - 1:
            raise EngineError(f"expected a call for batch {self._batches}, or again the one before; found {number}")
        listening = self._listening
        assert listening is not None
        try:
            batch = await asyncio.shield(listening)
        except asyncio.CancelledError:
            self._check(token)
            if listening.cancelled():  # by `attach`, rather than by the caller
                raise EngineError("the engine was attached again meanwhile") from None
            raise
        self._check(token)
        return batch

    async def abort(self, token: int, number: int, ids: Sequence[str]) -> None:
        await self._command(token, number, lambda: self._engine.abort(ids))

    async def set_scheduling(self, token: int, number: int, scheduling: Scheduling) -> None:
        await self._command(token, number, lambda: self._engine.set_scheduling(scheduling))

    async def _command(self, token: int, number: int, work: Callable[[], Awaitable[None]]) -> None:
        async with self._lock:
            self._check(token)
            if number >= self._commands:
                await work()
                self._commands = number + 1

    async def _next_events(self) -> EventBatch:
        batch = await self._engine.events()
        self._unfinished -= {id for id, finish in zip(batch.ids, batch.finish) if finish is not None}
        return batch

    def _check(self, token: int) -> None:
        if token != self._token:
            holder = "by nobody yet: attach first" if self._token is None else f"under token {self._token}"
            raise EngineError(
                f"expected a call of the lease's holder, found token {token}; the engine is held {holder}"
            )


class LeasedEngine:
    """One holder's view of a fenced engine; implements `asyncrl.rollouter.router.ReplicaClient`. One call of `events`,
    and one of the others, at a time. ``relayed``: the same engine, for the numbered calls."""

    def __init__(self, engine: FencedEngine, token: int, relayed: FencedEngine | None = None) -> None:
        self._direct, self._engine, self._token = engine, relayed or engine, token
        self._batches = self._commands = self._first = next(_FIRST)

    async def attach(self) -> None:
        await self._direct.attach(self._token, self._first)

    async def submit(self, requests: Sequence[Request]) -> None:
        await self._engine.submit(self._token, self._next_command(), requests)

    async def events(self) -> EventBatch:
        batch = await self._engine.events(self._token, self._batches)
        self._batches += 1
        return batch

    async def abort(self, ids: Sequence[str]) -> None:
        await self._engine.abort(self._token, self._next_command(), ids)

    async def set_scheduling(self, scheduling: Scheduling) -> None:
        await self._engine.set_scheduling(self._token, self._next_command(), scheduling)

    def _next_command(self) -> int:
        self._commands += 1
        return self._commands - 1
