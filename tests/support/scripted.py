"""A scripted replica, driven by a test at the router's interface."""

import asyncio
from collections.abc import Callable

import numpy as np

from asyncrl.rollouter.engines.base import EventBatch, Request, Scheduling
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion


class Death(Exception):
    """Death of a replica's process."""


class ScriptedReplica:
    """Records submitted requests, and reports the events that the test emits."""

    def __init__(self) -> None:
        self.attached = 0
        self.requests: dict[str, Request] = {}
        self.submits: list[int] = []
        self.aborted: list[str] = []
        self.schedulings: list[Scheduling] = []
        self._events: asyncio.Queue[EventBatch | Exception] = asyncio.Queue()
        self.version = PolicyVersion(0, 0)

    async def attach(self):
        self.attached += 1

    async def submit(self, requests):
        assert self.attached == 1
        self.submits.append(len(requests))
        self.requests |= {r.id: r for r in requests}

    async def abort(self, ids):
        self.aborted += ids

    async def set_scheduling(self, scheduling):
        assert self.attached == 1
        self.schedulings.append(scheduling)

    async def events(self):
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def emit(self, id: str, tokens: list[int], finish: FinishReason | None = None, error: str = "") -> None:
        n = len(tokens)
        self._events.put_nowait(
            EventBatch(
                [id],
                np.array([0, n]),
                np.array(tokens, np.int32),
                -np.ones(n, np.float32),
                [self.version],
                [finish],
                [False],
                {id: error} if error else {},
            )
        )

    def die(self, error: Exception) -> None:
        self._events.put_nowait(error)


def is_death(error: BaseException) -> bool:
    return isinstance(error, Death)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):  # far less on any machine, unless it never holds
        while not condition():
            await asyncio.sleep(0.001)
