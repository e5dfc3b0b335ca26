"""Actors that die are started again: how often and how soon, and what has to follow.

    replica died ──► its samples continue elsewhere ──► a new one ──► joins at the next sync, or at once if idle
    rollouter died ──► a new one takes its groups in flight from the ledger
    rank died ──► `TrainLoop` asks for new ranks, and goes back to the last checkpoint
    queue died ──► Ray starts it again: it has all of its state on disk, and the calls to it are repeated

Nothing here needs a person, until an actor has died too often.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

from asyncrl.config.schema import SupervisionConfig
from asyncrl.ray_client import ActorClient, ActorDied, first_leaf
from asyncrl.tasks import cancelled
from asyncrl.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
NEWS_WITHIN_S = 2.0  # of a death, after a call failed


class DiedTooOften(RuntimeError):
    """An actor was restarted as often as `SupervisionConfig` allows, and died again."""


class RestartPolicy:
    """How many restarts there may be, and how long to wait before each. One for all actors of a run."""

    def __init__(self, config: SupervisionConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)
        self.counts: Counter[str] = Counter()  # of all restarts, by actor

    def next_backoff_s(self, name: str, why: str) -> float:
        """Count a restart of ``name``; returns the seconds to wait before it.

        Raises DiedTooOften, naming ``why`` it died, if there were too many within the window."""
        config, restarts, now = self._config, self._restarts[name], self._clock()
        while restarts and now - restarts[0] > config.window_s:
            restarts.popleft()
        if len(restarts) >= config.max_restarts:
            often = f"; restarted {len(restarts)} times within {config.window_s:g} s" if restarts else ""
            raise DiedTooOften(f"{why}{often} (supervision.max_restarts is {config.max_restarts})")
        restarts.append(now)
        self.counts[name] += 1
        return min(config.backoff_s * 2.0 ** (len(restarts) - 1), config.max_backoff_s)


class Pool(Protocol):
    """What of a running system is watched and started anew."""

    replicas: dict[str, ActorClient]
    receivers: dict[str, Any]  # their sides of a sync session
    rollouter: Any  # a RestartableClient: run(), silence_s(), replace_replica(), set_routable()
    queue: Any  # a client: alive(), where()
    ranks: Any  # the present rank group
    senders: dict[str, Any]  # its ranks

    async def restart_replica(self, name: str) -> None: ...
    async def restart_rollouter(self) -> None: ...
    async def restart_ranks(self) -> None: ...
    async def end(self, name: str, why: str) -> None: ...
    async def locate(self, *names: str) -> None: ...


class Replicas(Protocol):
    """The sync group's view of the replicas."""

    last_sync_s: float
    fleet: Any

    def routable(self) -> list[str]: ...
    async def leave(self, name: str) -> None: ...
    def join(self, name: str, replica: Any) -> None: ...


class Supervisor:
    """``run()`` beside training: raises DiedTooOften, or what an actor raised that is no death."""

    def __init__(
        self, config: SupervisionConfig, policy: RestartPolicy, pool: Pool, sync: Replicas, recorder: Recorder
    ) -> None:
        self._config, self._policy, self._pool, self._sync = config, policy, pool, sync
        self._recorder = recorder

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._rollouter())
            tasks.create_task(self._progress())
            tasks.create_task(self._queue())
            for name in self._pool.replicas:
                tasks.create_task(self._replica(name))

    async def restarting(self, name: str, why: str) -> None:
        """Wait as long as the policy wants before ``name`` is started again, and say so. Raises DiedTooOften."""
        pause_s = self._policy.next_backoff_s(name, why)
        log.warning("supervision: %s; starting it again in %g s", why, pause_s)
        self._recorder.count(f"supervision/restarts/{name.split('/')[0]}")
        await asyncio.sleep(pause_s)

    # -- what is watched -------------------------------------------------------------------------------------------

    async def _rollouter(self) -> None:
        why: str | None = None
        while True:
            try:
                if why is not None:
                    await self.restarting("rollouter", why)
                    await self._pool.restart_rollouter()
                    # `once`: nobody else would replace this one, should it die here
                    await self._pool.rollouter.once.set_routable(self._sync.routable())
                await self._pool.rollouter.once.run()
                return
            except ActorDied as died:
                if died.name != "rollouter":
                    raise
                why = str(died)

    async def _queue(self) -> None:
        """Ray starts it again; here it is told, and ended if it does not answer."""
        while True:
            try:
                await self._queue_lives()
            except ActorDied as died:
                self._policy.next_backoff_s("queue", str(died))  # how often is counted here; the pause is the actor's
                self._recorder.count("supervision/restarts/queue")
                log.warning("supervision: %s; it is started again, with all it knew", died)
                await self._pool.locate("queue")  # answered by the new one

    async def _queue_lives(self) -> None:
        """Until it is dead: raises ActorDied."""
        living, limit_s = asyncio.ensure_future(self._pool.queue.alive()), self._config.answer_s
        try:
            while not living.done():
                asked = asyncio.ensure_future(self._pool.queue.where())
                await asyncio.wait([living, asked], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if not living.done() and not asked.done():
                    await self._pool.end("queue", f"has not answered for {limit_s:g} s: it is stopped or stuck")
                    await asyncio.wait([living])
                await cancelled([asked])
                await asyncio.wait([living], timeout=CHECK_EVERY_S)
            living.result()
        finally:
            living.cancel()

    async def _replica(self, name: str) -> None:
        while True:
            why = await self._death(name)
            await self._sync.leave(name)
            try:
                await self.restarting(name, why)
            except DiedTooOften as e:
                if not self._sync.fleet.handles:
                    raise
                log.warning("supervision: %s; the run goes on without it", e)
                return
            try:
                await self._pool.restart_replica(name)
                await self._pool.rollouter.replace_replica(name, self._pool.replicas[name].handle)
            except ActorDied as died:
                if died.name != name:
                    raise
                continue  # the new one, at once
            self._sync.join(name, self._pool.receivers[name])

    async def _death(self, name: str) -> str:
        """Wait until a replica is dead; returns why."""
        try:
            await self._pool.replicas[name].alive()
        except ActorDied as died:
            return str(died)
        raise RuntimeError(f"{name}: alive() returned, which it never does")

    async def _progress(self) -> None:
        """Replicas that have work and give nothing for too long, though no sync holds them."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            since_sync_s = time.monotonic() - self._sync.last_sync_s
            if since_sync_s < self._config.progress_s:
                continue
            for name, silence_s in (await self._pool.rollouter.silence_s()).items():
                if silence_s > self._config.progress_s and name in self._sync.routable():
                    await self._pool.end(name, f"has work and gave no token for {silence_s:.0f} s")


class RestartableRanks:
    """The training loop's `Ranks`: those that there are now, and new ones when they die."""

    def __init__(self, pool: Any, supervisor: Supervisor) -> None:
        self._pool, self._supervisor = pool, supervisor

    def __getattr__(self, call: str) -> Any:
        return getattr(self._pool.ranks, call)

    async def lost(self, error: BaseException) -> str | None:
        """Why a rank is dead; None if all live. Waits a little: a rank may fail with ``error`` because of another that
        has just died, and be heard of first."""
        if (died := rank_death(error)) is not None:
            return str(died)
        living = [asyncio.ensure_future(rank.alive()) for rank in self._pool.senders.values()]
        try:
            done, _ = await asyncio.wait(living, timeout=NEWS_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
            return next((str(e) for task in done if isinstance(e := task.exception(), ActorDied)), None)
        finally:
            await cancelled(living)

    async def restart(self, why: str) -> None:
        """Raises DiedTooOften."""
        while True:
            await self._supervisor.restarting("trainer", f"{why}; all ranks go back to the last checkpoint")
            try:
                return await self._pool.restart_ranks()
            except ActorDied as died:  # a new one, at once
                why = str(died)


def rank_death(error: BaseException | None) -> ActorDied | None:
    """The death of a rank, if that is what ``error`` comes from."""
    while error is not None:
        error = first_leaf(error)
        if isinstance(error, ActorDied) and error.name.startswith("trainer/"):
            return error
        error = error.__cause__
    return None
