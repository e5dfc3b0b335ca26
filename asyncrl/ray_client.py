"""Calls a Ray actor as if it were the object inside it, so that Ray-free code can be handed either."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayTaskError


class ActorClient:
    """``await ActorClient(handle).method(args)``; an exception arrives as the class that was raised, its remote
    traceback in the message."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._handle, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await method.remote(*args, **kwargs)
            except RayTaskError as e:
                raise e.as_instanceof_cause() from None

        return call

    def kill(self) -> None:
        ray.kill(self._handle)
