"""Clients that call a Ray actor as if it were the object inside it, so that Ray-free code can use either."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from asyncrl.observability.telemetry.log import LogConfig, configure_logging
from asyncrl.processes.identity import Process

REPEAT_S = 1.0  # before a call is made again whose data was lost

log = logging.getLogger(__name__)


def start_ray(**options: Any) -> None:
    """Start a token-protected Ray cluster on this machine that lives as long as this process, and listens on loopback
    only."""
    # by default Ray writes a token to the user's home folder, and the user's other clusters would require it too
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    joinable = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # Ray's option for this has an effect on other systems only
    try:
        ray.init(address="local", include_dashboard=False, **options)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = joinable


class SupervisedActor:
    """Base class of a run's actors, with the calls that supervision uses. ``name``: role in the run, shown in Ray's log
    prefixes and dashboard. ``logs``: log configuration, if the actor is part of a run."""

    def __init__(self, name: str, logs: LogConfig | None) -> None:
        self.name = name
        if logs is not None:
            configure_logging(name, logs)

    def __repr__(self) -> str:
        return self.name

    async def alive(self) -> None:
        """Never returns; fails as soon as the actor dies, which notifies the caller."""
        await asyncio.Event().wait()

    async def where(self) -> tuple[str, Process]:
        """Node id and process."""
        return ray.get_runtime_context().get_node_id(), Process.of(os.getpid())


class ActorClient:
    """``await ActorClient(handle, name).method(args)``.

    Raises an exception of the actor unchanged (see `remote_exception`), `ActorDied` when its process dies, `DataLost`
    when data of the call is lost, and `ActorStartFailed` for an exception of its constructor."""

    def __init__(self, handle: Any, name: str) -> None:
        self.handle, self.name = handle, name

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self.handle, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            with self._translated():
                return await method.remote(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate Ray's errors."""
        try:
            yield
        except RayTaskError as e:
            if isinstance(e.cause, ObjectLostError):
                raise DataLost(self.name) from None
            raise remote_exception(e) from None
        except ObjectLostError:
            raise DataLost(self.name) from None
        except RayActorError as e:
            if e.actor_init_failed:
                raise ActorStartFailed(self.name, str(e).strip().splitlines()[-1].strip()) from None
            raise ActorDied(self.name) from None


class RestartableClient(ActorClient):
    """Client of an actor that may be restarted, for calls that are safe to repeat: a call that the actor's death
    interrupts is repeated on its successor, set by `replace`, and one whose data is lost on the same actor; a call
    before the first start (``handle`` None) waits for it. ``client.once.method()`` raises instead. ``once``: creates
    the client of one process."""

    def __init__(self, handle: Any, name: str, once: Callable[[Any, str], ActorClient] = ActorClient) -> None:
        super().__init__(handle, name)
        self._once, self._replaced = once, asyncio.Event()

    @property
    def once(self) -> ActorClient:
        return self._once(self.handle, self.name)

    def replace(self, handle: Any) -> None:
        self.handle = handle
        self._replaced.set()
        self._replaced = asyncio.Event()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            while True:
                once, replaced = self.once, self._replaced
                if once.handle is not None:
                    try:
                        return await getattr(once, name)(*args, **kwargs)
                    except DataLost as lost:
                        log.warning("%s; the call is made again", lost)
                        await asyncio.sleep(REPEAT_S)
                        continue
                    except ActorDied as died:
                        if died.name != self.name:
                            raise
                await replaced.wait()

        return call


class ActorDied(RuntimeError):
    """The process of actor ``name`` died, or was killed because it hung."""

    def __init__(self, name: str, why: str = "its process was killed, ran out of memory or crashed") -> None:
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"{self.name} died: {self.why}"


class ActorBroken(ActorDied):
    """The process of actor ``name`` lives, but it, its device or its engine is of no more use: it counts as dead."""

    def __str__(self) -> str:
        return f"{self.name} is broken: {self.why}"


class Preempted(ActorDied):
    """The process of actor ``name`` got SIGTERM, or its machine is to be taken away. It still serves."""

    def __init__(self, name: str, why: str = "it got SIGTERM") -> None:
        super().__init__(name, why)

    def __str__(self) -> str:
        return f"{self.name} is preempted: {self.why}"


class DataLost(RuntimeError):
    """A large argument or answer of a call to actor ``name`` is lost, with the machine that had it. The actor may be
    alive."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"data of a call to {self.name} is lost: the machine that had it is gone, or cannot be reached"


class ActorStartFailed(RuntimeError):
    """The constructor of an actor raised, and would raise again."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"{self.name} could not be started: {self.why}"


def remote_exception(error: RayTaskError) -> BaseException:
    """The exception that the actor raised; its attribute ``remote_traceback`` is the actor's traceback."""
    cause = error.cause if isinstance(error.cause, BaseException) else error
    # an exception that passed through another actor: print the traceback of its origin first
    earlier = f"{before}\n\nre-raised by:\n" if (before := getattr(cause, "remote_traceback", "")) else ""
    cause.remote_traceback = earlier + str(error)  # type: ignore[attr-defined]
    return cause


def first_leaf(error: BaseException) -> BaseException:
    """First single exception in (nested) groups; unlike a group, it can cross an actor boundary unchanged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
