"""Calls a Ray actor as if it were the object inside it, so that Ray-free code can be handed either."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayActorError, RayTaskError


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
            except RayActorError:
                raise ActorDied(self.name) from None

        return call


class ActorDied(RuntimeError):
    """The process of an actor ended without a word; ``name`` is the actor's."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"{self.name} died: its process was killed, ran out of memory or crashed"


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
