"""Calls of a sync session to the replicas of many machines in one call: a driver that called each of a thousand
replicas eight times would be busy for seconds. ::

    driver                                   machine 0
    session("replica/0").pause(…) ┐
    session("replica/1").pause(…) ┼─ make ──► Relay ──► replica/0, replica/1, …
    session("replica/9").pause(…) ┘             └─ make ──► Relay of machine 1 ──► replica/8, replica/9, …

Calls that are made in one turn of the event loop travel together. Their answers come back together too, but none waits
for longer than `GRACE_S` for a slower one, so a replica that hangs costs the others no deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from asyncrl.param_sync.session_protocol import ReplicaSession, answer, remote_session

GRACE_S = 0.2

log = logging.getLogger(__name__)


class Call(NamedTuple):
    """``number`` is unique among a relay's calls."""

    number: int
    replica: str
    name: str
    args: tuple[Any, ...]


class Answer(NamedTuple):
    """Result of a call, or the exception that it raised."""

    number: int
    result: Any
    error: BaseException | None


class RelayCalls(Protocol):
    """A `Relay`, or its client in another process."""

    def make(self, calls: Sequence[Call]) -> Awaitable[Sequence[Answer]]: ...
    def rest(self, numbers: Sequence[int]) -> Awaitable[Sequence[Answer]]: ...


class Relay:
    """Makes a driver's calls to the replicas of a machine, there; those of other machines through their relays."""

    def __init__(self) -> None:
        self._sessions: dict[str, ReplicaSession] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}

    def register(self, replica: str, session: ReplicaSession) -> None:
        """Add a replica, or replace a dead one."""
        self._sessions[replica] = session

    async def make(self, calls: Sequence[Call]) -> list[Answer]:
        """Make calls; returns the answers that `rest` would."""
        for number, replica, name, args in calls:
            self._running[number] = asyncio.create_task(answer(self._sessions[replica], name, *args))
        return await self.rest([call.number for call in calls])

    async def rest(self, numbers: Sequence[int]) -> list[Answer]:
        """Answers to these calls, which were made and not answered: those that come within `GRACE_S` of the first."""
        tasks = [self._running[number] for number in numbers]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(tasks, timeout=GRACE_S)
        done = [number for number in numbers if self._running[number].done()]
        return [self._answer(number, self._running.pop(number)) for number in done]

    def _answer(self, number: int, task: asyncio.Task[Any]) -> Answer:
        error = task.exception()
        return Answer(number, None if error is not None else task.result(), error)


class _RelayDied(Exception):
    pass


class RelayedSessions:
    """The caller's end. If the relay dies, the calls that it had and later ones go to the replicas without it; a
    replica may get a call twice, see `asyncrl.param_sync.session_protocol.repeatable`."""

    def __init__(self, relay: RelayCalls) -> None:
        self._relay: RelayCalls | None = relay
        self._numbers = itertools.count()
        self._unsent: list[tuple[Call, asyncio.Future[Any]]] = []
        self._exchanges: list[asyncio.Task[None]] = []  # asyncio keeps no reference

    def session(self, replica: str, direct: ReplicaSession) -> ReplicaSession:
        """The session of a registered replica; ``direct``: without this relay."""
        return remote_session(partial(self._call, replica, direct))

    async def _call(self, replica: str, direct: ReplicaSession, name: str, *args: Any) -> Any:
        if self._relay is not None:
            with contextlib.suppress(_RelayDied):
                return await self._relayed(replica, name, args)
        return await answer(direct, name, *args)

    async def _relayed(self, replica: str, name: str, args: tuple[Any, ...]) -> Any:
        loop = asyncio.get_running_loop()
        if not self._unsent:
            loop.call_soon(self._send)
        call, done = Call(next(self._numbers), replica, name, args), loop.create_future()
        self._unsent.append((call, done))
        return await done

    def _send(self) -> None:
        sent, self._unsent = self._unsent, []
        waiting = {call.number: done for call, done in sent}
        under_way = (exchange for exchange in self._exchanges if not exchange.done())
        self._exchanges = [*under_way, asyncio.create_task(self._exchange([call for call, _ in sent], waiting))]

    async def _exchange(self, calls: Sequence[Call], waiting: dict[int, asyncio.Future[Any]]) -> None:
        relay = self._relay
        try:
            if relay is None:  # it died since
                raise ConnectionError("the relay is gone")
            answers = await relay.make(calls)
            while True:
                for number, result, error in answers:
                    if (done := waiting.pop(number)).done():  # its caller has given up
                        continue
                    if error is None:
                        done.set_result(result)
                    else:
                        done.set_exception(error)
                if not waiting:
                    return
                answers = await relay.rest(list(waiting))
        except Exception as e:
            log.warning("param_sync: calls go to their replicas without this relay from now on: %s", e)
            self._relay = None
            for done in waiting.values():
                if not done.done():
                    done.set_exception(_RelayDied())
