"""Replicas that die at random and start again, under the supervisor of real runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.processes.actor_client import ActorDied
from asyncrl.run.rollouters import Rollouters
from asyncrl.simulation.engine import SimulatedEngine, SimulatedReceiver
from asyncrl.simulation.profile import Profile


@dataclass(frozen=True)
class Deaths:
    """A replica lives for ``after_s`` seconds on average, exponentially distributed; its successor takes ``start_s``
    seconds to start."""

    after_s: float
    start_s: float


class MortalCluster:
    """Implements `asyncrl.run.supervision.SupervisedCluster`; only replicas start and die."""

    endpoints, ranks = (), None

    def __init__(
        self,
        deaths: Deaths,
        seed: int,
        profile: Profile,
        engines: Mapping[str, SimulatedEngine],
        rollouters: Rollouters,
    ) -> None:
        self._deaths, self._draw, self._profile, self._engines = deaths, random.Random(seed), profile, engines
        self.replica_names = list(engines)
        self.replicas: dict[str, _Life] = {}
        self.sessions: dict[str, Any] = {}
        self.senders: dict[str, Any] = {}
        self.queue = _Immortal()
        self.rollouters = rollouters
        self.count = 0  #: of deaths

    async def start_queue(self) -> None: ...

    async def start_replica(self, name: str) -> None:
        if name in self.replicas:  # all first ones are there when the run begins
            await asyncio.sleep(self._deaths.start_s)
        engine = self._engines[name]
        life = _Life(name, engine, self._draw.expovariate(1 / self._deaths.after_s), self._count)
        session = EngineSession(name, engine, SimulatedReceiver(name, self._profile.sync))
        self.replicas[name], self.sessions[name] = life, _UntilDeath(session, life)

    def replica_handle(self, name: str) -> Any:
        return self.replicas[name].client

    async def remove_replica(self, name: str) -> None:
        self.replica_names.remove(name)

    def draining(self) -> Sequence[str]:
        return ()

    def silent(self, name: str) -> str:
        return name

    async def end(self, name: str, why: str) -> None:
        self.replicas[name].end(why)

    def _count(self) -> None:
        self.count += 1


class _Life:
    """One process of a replica."""

    def __init__(self, name: str, engine: SimulatedEngine, seconds: float, on_death: Callable[[], None]) -> None:
        self._name, self._engine, self._on_death = name, engine, on_death
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.death.add_done_callback(lambda death: death.exception())  # nobody may wait for it
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)
        self.client = _UntilDeath(engine, self)

    def end(self, why: str = "its time was over") -> None:
        self._timer.cancel()
        if not self.death.done():
            self._engine.stop()
            self._on_death()
            self.death.set_exception(ActorDied(self._name, why))

    async def alive(self) -> None:
        await asyncio.shield(self.death)


class _UntilDeath:
    """Calls that raise ActorDied once the process is dead."""

    def __init__(self, target: Any, life: _Life) -> None:
        self._target, self._life = target, life

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            called = asyncio.ensure_future(getattr(self._target, name)(*args))
            try:
                await asyncio.wait([called, self._life.death], return_when=asyncio.FIRST_COMPLETED)
                return called.result() if called.done() else self._life.death.result()
            finally:
                called.cancel()

        return call


class _Immortal:
    """Stands for the client of the queue, which never dies here."""

    handle = None

    @property
    def once(self) -> _Immortal:
        return self

    async def alive(self) -> None:
        await asyncio.Event().wait()

    async def stalled_s(self) -> float:
        return 0.0
