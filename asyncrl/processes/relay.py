"""Calls to the many actors of a machine in one call: a process that called each of a thousand replicas by itself would
be busy with nothing else. ::

    caller                                         machine 0
    client("replica/0").pause(…)  ┐
    client("replica/1").events(…) ┼─ exchange ──► Relay ──► replica/0, replica/1, …
    client("replica/9").pause(…)  ┘                 └─ exchange ──► Relay of machine 1 ──► replica/8, replica/9, …

Calls that are made in one moment travel together. So do their answers, but none waits longer than ``gather_s`` for a
slower one: an actor that hangs delays no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

TOGETHER_S = 0.003  # calls travel together that a process makes within this time
SILENT_S = 15.0  # of a relay, which answers three times as often, even if it has nothing to answer

log = logging.getLogger(__name__)


class Call(NamedTuple):
    """``number`` is unique among the calls of a caller."""

    number: int
    target: int
    name: str
    args: tuple[Any, ...]


class Answer(NamedTuple):
    """Result of a call, or the exception that it raised."""

    number: int
    result: Any
    error: BaseException | None


class RelayCalls(Protocol):
    """A `Relay`, or its client in another process."""

    def exchange(
        self, caller: str, calls: Sequence[Call], gather_s: float, within_s: float
    ) -> Awaitable[Sequence[Answer]]: ...


@dataclass(eq=False)
class _Caller:
    running: set[asyncio.Task[None]] = field(default_factory=set)
    answers: list[Answer] = field(default_factory=list)
    since_s: float = 0.0  # when the first of them came
    wake: asyncio.Event | None = None  # of its exchange that waits


class Relay:
    """Makes calls to the actors of a machine, there."""

    def __init__(self) -> None:
        self._targets: list[Any] = []
        self._callers: dict[str, _Caller] = {}

    def register(self, client: Any) -> int:
        """Number of a new target."""
        self._targets.append(client)
        return len(self._targets) - 1

    async def exchange(self, caller: str, calls: Sequence[Call], gather_s: float, within_s: float) -> list[Answer]:
        """Make calls. Returns answers to this and earlier calls of the caller: those that come within ``gather_s`` of
        the first, nothing if none comes within ``within_s``. The caller's exchange before, if it still waits, returns
        nothing at once."""
        now_s = asyncio.get_running_loop().time
        of = self._callers.setdefault(caller, _Caller())
        if of.wake is not None:
            of.wake.set()
        wake = of.wake = asyncio.Event()
        for call in calls:
            of.running.add(asyncio.create_task(self._make(of, call)))
        if not of.answers:
            await _set_within(wake, within_s)
        if of.answers and of.running and of.wake is wake:
            wake.clear()
            await _set_within(wake, max(0.0, of.since_s + gather_s - now_s()))
        if of.wake is not wake:
            return []
        of.wake, answers, of.answers = None, of.answers, []
        return answers

    async def _make(self, of: _Caller, call: Call) -> None:
        number, target, name, args = call
        try:
            answer = Answer(number, await getattr(self._targets[target], name)(*args), None)
        except Exception as e:
            answer = Answer(number, None, e)
        if not of.answers:
            of.since_s = asyncio.get_running_loop().time()
        of.answers.append(answer)
        of.running.discard(asyncio.current_task())  # type: ignore[arg-type]
        if of.wake is not None and (len(of.answers) == 1 or not of.running):
            of.wake.set()


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


class _RelayDied(Exception):
    pass


class Relayed:
    """The caller's end. ``caller``: a name that no other one uses at this relay.

    If the relay dies or hangs, the calls that it had and later ones go to the actors without it. An actor may then get
    a call twice, the second time perhaps before the first, and must not mind."""

    def __init__(self, relay: RelayCalls, caller: str, gather_s: float, silent_s: float = SILENT_S) -> None:
        self._relay: RelayCalls | None = relay
        self._caller, self._gather_s, self._silent_s = caller, gather_s, silent_s
        self._numbers = itertools.count()
        self._unsent: list[Call] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._exchanges: set[asyncio.Task[None]] = set()
        self._planned = False

    @property
    def alive(self) -> bool:
        """False once the relay has died or hung."""
        return self._relay is not None

    def client(self, target: int, direct: Any) -> Any:
        """A client with the methods of ``direct``, which reaches the same actor without this relay."""
        return _Client(partial(self._call, target, direct))

    async def _call(self, target: int, direct: Any, name: str, *args: Any) -> Any:
        if self._relay is not None:
            with contextlib.suppress(_RelayDied):
                return await self._relayed(target, name, args)
        return await getattr(direct, name)(*args)

    async def _relayed(self, target: int, name: str, args: tuple[Any, ...]) -> Any:
        call, answered = Call(next(self._numbers), target, name, args), asyncio.get_running_loop().create_future()
        self._unsent.append(call)
        self._waiting[call.number] = answered
        self._plan()
        return await answered

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_later(TOGETHER_S, self._begin)

    def _begin(self) -> None:
        self._planned = False
        if self._relay is not None and (self._unsent or (self._waiting and not self._exchanges)):
            calls, self._unsent = self._unsent, []
            exchange = self._relay.exchange(self._caller, calls, self._gather_s, self._silent_s / 3)
            self._exchanges.add(asyncio.create_task(self._answered(exchange)))

    async def _answered(self, exchange: Awaitable[Sequence[Answer]]) -> None:
        try:
            answers = await asyncio.wait_for(exchange, self._silent_s)
        except Exception as e:
            self._without_relay(e)
            return
        finally:
            self._exchanges.discard(asyncio.current_task())  # type: ignore[arg-type]
        for number, result, error in answers:
            answered = self._waiting.pop(number, None)
            if answered is None or answered.done():  # made without the relay since, or its caller has given up
                continue
            if error is None:
                answered.set_result(result)
            else:
                answered.set_exception(error)
        self._plan()

    def _without_relay(self, error: Exception) -> None:
        if self._relay is not None:
            why = str(error) or f"it was silent for {self._silent_s:g} s"
            log.warning("calls go to their replicas without this relay from now on: %s", why)
            self._relay = None
        waiting, self._waiting, self._unsent = self._waiting, {}, []
        for answered in waiting.values():
            if not answered.done():
                answered.set_exception(_RelayDied())


class _Client:
    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._call, name)
