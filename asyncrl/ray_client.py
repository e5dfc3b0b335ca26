"""Calls a Ray actor as if it were the object inside it, so that Ray-free code can be handed either."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.telemetry.log import LogTo, start_log


class Watched:
    """What every actor of a run offers to those who watch it. ``name``: its role in the run, by which Ray tags its
    lines in the log and lists it in the dashboard. ``logs``: where it logs to, if it is part of a run."""

    def __init__(self, name: str, logs: LogTo | None) -> None:
        self.name = name
        if logs is not None:
            start_log(name, logs)

    def __repr__(self) -> str:
        return self.name

    async def alive(self) -> None:
        """Never returns: whoever awaits it hears of the actor's death at once."""
        await asyncio.Event().wait()

    async def where(self) -> tuple[str, int]:
        """The id of the node, and the process id on it."""
        return ray.get_runtime_context().get_node_id(), os.getpid()


class ActorClient:
    """``await ActorClient(handle, name).method(args)``; an exception arrives as it was raised, see `raised_there`, and
    the death of the actor's process as `ActorDied`."""

    def __init__(self, handle: Any, name: str) -> None:
        self.handle, self.name = handle, name

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self.handle, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await method.remote(*args, **kwargs)
            except RayTaskError as e:
                raise raised_there(e) from None
            except RayActorError as e:
                raise ActorDied(self.name, _why(e)) from None

        return call


class RestartableClient(ActorClient):
    """The same for an actor that may be started again: a call that died with it is made on the one in its place, as
    soon as `replace` names it. For calls that may be repeated; ``client.once.method()`` raises ActorDied instead."""

    def __init__(self, handle: Any, name: str) -> None:
        super().__init__(handle, name)
        self._replaced = asyncio.Event()

    @property
    def once(self) -> ActorClient:
        return ActorClient(self.handle, self.name)

    def replace(self, handle: Any) -> None:
        self.handle = handle
        self._replaced.set()
        self._replaced = asyncio.Event()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            while True:
                handle, replaced = self.handle, self._replaced
                try:
                    return await getattr(ActorClient(handle, self.name), name)(*args, **kwargs)
                except ActorDied as died:
                    if died.name != self.name:
                        raise
                await replaced.wait()

        return call


class ActorDied(RuntimeError):
    """The process of an actor ended without a word, or it could not be made (``why`` then says more); ``name`` is the
    actor's."""

    def __init__(self, name: str, why: str | None = None) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        if self.why is not None:
            return f"{self.name} could not be started: {self.why}"
        return f"{self.name} died: its process was killed, ran out of memory or crashed"


def _why(error: RayActorError) -> str | None:
    """What the actor's constructor raised, on one line; None if the actor lived."""
    if not error.actor_init_failed:
        return None
    return str(error).strip().splitlines()[-1].strip()


def raised_there(error: RayTaskError) -> BaseException:
    """The exception that the actor raised; its attribute ``remote_traceback`` says where."""
    cause = error.cause if isinstance(error.cause, BaseException) else error
    # an exception that comes by way of another actor began further away: that part is told first
    earlier = f"{before}\n\nand from there:\n" if (before := getattr(cause, "remote_traceback", "")) else ""
    cause.remote_traceback = earlier + str(error)  # type: ignore[attr-defined]
    return cause


def first_leaf(error: BaseException) -> BaseException:
    """The first single exception in (nested) groups: what went wrong, without the scaffolding. A group cannot leave an
    actor as itself, its leaves can."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
