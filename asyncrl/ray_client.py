"""Calls a Ray actor as if it were the object inside it, so that Ray-free code can be handed either."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayTaskError


class ActorClient:
    """``await ActorClient(handle).method(args)``; an exception arrives as it was raised, see `raised_there`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self.handle, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await method.remote(*args, **kwargs)
            except RayTaskError as e:
                raise raised_there(e) from None

        return call

    def kill(self) -> None:
        ray.kill(self.handle)


def raised_there(error: RayTaskError) -> BaseException:
    """The exception that the actor raised; its attribute ``remote_traceback`` says where."""
    cause = error.cause if isinstance(error.cause, BaseException) else error
    cause.remote_traceback = str(error)  # type: ignore[attr-defined]
    return cause


def first_leaf(error: BaseException) -> BaseException:
    """The first single exception in (nested) groups: what went wrong, without the scaffolding. A group cannot leave an
    actor as itself, its leaves can."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
