"""Starts the actors of a run and restarts those that die, within limits. Consequences of each death:

    replica died ──► its samples migrate ──► new replica ──► joins at the next sync, or at once if the trainer waits
    replica is preempted ──► the same, but it reports all its tokens before it ends
    rollouter died ──► new rollouter resumes the in-flight groups from the ledger
    rank died ──► `TrainLoop` asks for new ranks and restores the last checkpoint
    queue died ──► new queue rebuilds its state from disk; calls to it are repeated
    endpoint died ──► its agents end with it; their samples begin again, with what is recorded of them

The first start works like any other: an actor that dies or hangs before it is up is restarted, within the limits.
Recovery is automatic until an actor has died too often. Replicas may also be added to the run and removed from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from asyncrl.config.schema import SupervisionConfig
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.processes.actor_client import ActorClient, ActorDied, Preempted
from asyncrl.processes.tasks import cancelled, end_of_first

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0


class DiedTooOften(RuntimeError):
    """An actor was restarted as often as `SupervisionConfig` allows, and died again."""


class NotStarted(RuntimeError):
    """Replicas that were added to the run did not start; it goes on without them."""


class DiskStalled(RuntimeError):
    """The disk of the ledger does not complete its writes, so nothing can be acknowledged."""


class RestartPolicy:
    """Limits the restarts of each actor and sets the pause before each. One for all actors of a run."""

    def __init__(self, config: SupervisionConfig, clock: Callable[[], float] = now_s) -> None:
        self._config, self._clock = config, clock
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)
        self.counts: Counter[str] = Counter()  # all restarts, by actor

    def next_backoff_s(self, name: str, why: str) -> float:
        """Count a restart of ``name``; returns the seconds to wait before it.

        Raises DiedTooOften, with ``why`` it died, after too many within the window."""
        config, restarts, now = self._config, self._restarts[name], self._clock()
        while restarts and now - restarts[0] > config.window_s:
            restarts.popleft()
        if len(restarts) >= config.max_restarts:
            often = f"; restarted {len(restarts)} times within {config.window_s:g} s" if restarts else ""
            raise DiedTooOften(f"{why}{often} (supervision.max_restarts is {config.max_restarts})")
        restarts.append(now)
        self.counts[name] += 1
        return min(config.backoff_s * 2.0 ** (len(restarts) - 1), config.max_backoff_s)


class SupervisedCluster(Protocol):
    """The actors of a run, as their supervisor starts and watches them. A start first kills the actor's predecessor;
    it raises ActorDied if a process dies before it is up."""

    replica_names: list[str]
    replicas: dict[str, ActorClient]  # those that have started
    sessions: dict[str, Any]  # their ends of a sync session
    rollouters: Any  # asyncrl.run.rollouters.Rollouters
    queue: Any  # RestartableClient: alive(), stalled_s()
    endpoints: Sequence[Any]  # RestartableClient: alive(); of each rollouter, if there are agents
    ranks: Any  # the current rank group
    senders: dict[str, Any]  # its ranks

    async def start_queue(self) -> None: ...
    async def start_replica(self, name: str) -> None: ...
    def replica_handle(self, name: str) -> Any: ...  # what its rollouter is given
    async def start_endpoint(self, shard: int) -> None: ...
    async def start_rollouter(self, shard: int, routable: Callable[[], Sequence[str]]) -> None: ...
    async def start_ranks(self) -> None: ...
    async def add_replicas(self, names: Sequence[str]) -> None: ...
    async def remove_replica(self, name: str) -> None: ...
    def draining(self) -> Sequence[str]: ...
    def silent(self, name: str) -> str: ...
    async def end(self, name: str, why: str) -> None: ...


class ReplicaMembership(Protocol):
    """The parameter-sync group's membership: replicas leave when they die and join when they have restarted."""

    fleet: Any

    @property
    def last_sync_s(self) -> float: ...

    def routable(self) -> list[str]: ...
    async def leave(self, name: str) -> None: ...
    async def retire(self, name: str) -> None: ...
    def join(self, name: str, replica: Any) -> None: ...


class Supervisor:
    """``run()`` keeps queue, endpoints and replicas alive; raises DiedTooOften, or any exception of an actor that is
    not a death. ``started()`` returns when all of them have been up. Ranks and rollouters start by `start`, see
    `asyncrl.run.restartable`."""

    def __init__(
        self,
        config: SupervisionConfig,
        policy: RestartPolicy,
        cluster: SupervisedCluster,
        membership: ReplicaMembership,
        recorder: Recorder,
    ) -> None:
        self._config, self._policy, self._cluster, self._membership = config, policy, cluster, membership
        self._recorder = recorder
        self._serving: set[str] = set()  # replicas that have joined, until they die
        self._ended: dict[str, str] = {}  # replica → why it was killed
        self._draining: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)  # by replica
        endpoints = [endpoint.name for endpoint in cluster.endpoints]
        self._up = {name: asyncio.Event() for name in ("queue", *endpoints, *cluster.replica_names)}
        self._replicas: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            tasks = self._tasks
            tasks.create_task(self._queue(tasks))
            for shard in range(len(self._cluster.endpoints)):
                tasks.create_task(self._endpoint(shard, tasks))
            tasks.create_task(self._fitness())
            for name in self._cluster.replica_names:
                self._replicas[name] = tasks.create_task(self._replica(name))

    async def started(self) -> None:
        for up in self._up.values():
            await up.wait()

    async def add_replicas(self, names: Sequence[str]) -> None:
        """Add replicas that serve after their first sync; returns when they are up. Raises PlacementError, and
        NotStarted for those that do not start."""
        await self._cluster.add_replicas(names)
        for name in names:
            self._up[name] = asyncio.Event()
            self._replicas[name] = self._tasks.create_task(self._replica(name, joins=True))
        await asyncio.gather(*(end_of_first(self._up[name].wait(), _wait(self._replicas[name])) for name in names))
        if failed := [name for name in names if not self._up[name].is_set()]:
            raise NotStarted(f"{', '.join(failed)} did not start; the run's log has the reason")

    async def remove_replica(self, name: str) -> None:
        """Its samples go on elsewhere, with all their tokens."""
        if (supervised := self._replicas.pop(name, None)) is None:  # the run goes on without it already
            return
        await cancelled([supervised])
        self._serving.discard(name)
        await self._remove(name)

    async def _remove(self, name: str) -> None:
        await self._cluster.rollouters.retire_replica(name)
        await self._membership.retire(name)
        await self._cluster.remove_replica(name)

    async def start(
        self,
        name: str,
        start: Callable[[], Awaitable[None]],
        why: str | None = None,
        lost: Callable[[Exception], Awaitable[str | None]] | None = None,
    ) -> None:
        """Start an actor; restart it whenever its process dies before it is up, or is not up after ``start_s``.
        ``why``: the reason for this start, if it follows a death.

        ``lost`` returns why a process is dead after a failed start, None if none is; by default only ActorDied is a
        death. Raises DiedTooOften, or any other exception of the actor, which it would raise again."""
        limit_s = self._config.start_s
        while True:
            if why is not None:
                await self._pause(name, why)
            try:
                async with asyncio.timeout(limit_s) as deadline:
                    return await start()
            except Exception as e:
                if deadline.expired():
                    why = f"{self._cluster.silent(name)} did not start within {limit_s:g} s (supervision.start_s)"
                elif lost is not None:
                    why = await lost(e)
                else:
                    why = str(e) if isinstance(e, ActorDied) else None
                if why is None:
                    raise

    @property
    def serving(self) -> Collection[str]:
        """Replicas that have joined and live."""
        return self._serving

    async def _pause(self, name: str, why: str) -> None:
        """Log the restart of ``name`` and wait for its back-off. Raises DiedTooOften."""
        pause_s = self._policy.next_backoff_s(name, why)
        log.warning("supervision: %s; restarting it in %g s", why, pause_s)
        self._recorder.count(f"supervision/restarts/{name.split('/')[0]}")
        await asyncio.sleep(pause_s)

    # -- one coroutine per supervised actor ------------------------------------------------------------------------

    async def _queue(self, tasks: asyncio.TaskGroup) -> None:
        why: str | None = None
        replacing: list[asyncio.Task[None]] = []
        while True:
            await self.start("queue", self._cluster.start_queue, why)
            # Concurrent, because a stopped rollouter answers only after its own restart. Then the last one must win.
            await cancelled(replacing)
            replacing = [tasks.create_task(self._cluster.rollouters.replace_queue(self._cluster.queue.handle))]
            self._up["queue"].set()
            try:
                await self._queue_death()
            except ActorDied as died:
                why = str(died)

    async def _endpoint(self, shard: int, tasks: asyncio.TaskGroup) -> None:
        why: str | None = None
        client, rollouter = self._cluster.endpoints[shard], self._cluster.rollouters.shards[shard]
        replacing: list[asyncio.Task[None]] = []
        while True:
            await self.start(client.name, lambda: self._cluster.start_endpoint(shard), why)
            await cancelled(replacing)  # as in `_queue`
            replacing = [tasks.create_task(rollouter.replace_endpoint(client.handle))]
            self._up[client.name].set()
            try:
                await client.once.alive()
            except ActorDied as died:
                why = str(died)

    async def _queue_death(self) -> None:
        """Wait until the queue dies, or kill it if it does not answer; raises ActorDied, or DiskStalled."""
        queue, limit_s = self._cluster.queue.once, self._config.answer_s
        every_s = min(limit_s, self._config.disk_s) / 10
        living = asyncio.ensure_future(queue.alive())
        try:
            while not living.done():
                asked = asyncio.ensure_future(queue.stalled_s())
                await asyncio.wait([living, asked], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if not living.done() and not asked.done():
                    await self._cluster.end("queue", f"has not answered for {limit_s:g} s: it is stopped or stuck")
                    await asyncio.wait([living])
                if asked.done() and not asked.exception() and asked.result() > self._config.disk_s:
                    raise DiskStalled(
                        f"the disk of the ledger has not completed a write for {asked.result():.0f} s "
                        f"(supervision.disk_s is {self._config.disk_s:g}); all acknowledged groups are safe. Check the "
                        "disk, then resume the run"
                    )
                await cancelled([asked])
                await asyncio.wait([living], timeout=every_s)
            living.result()
        finally:
            living.cancel()

    async def _replica(self, name: str, joins: bool = False) -> None:
        """``joins``: the run goes on without it if it does not start."""
        why: str | None = None
        while True:
            try:
                await self.start(name, lambda: self._cluster.start_replica(name), why)
            except Exception as e:
                was_up = self._up[name].is_set()
                if not (joins if not was_up else isinstance(e, DiedTooOften) and self._others_serve(name)):
                    raise
                log.warning("supervision: %s; the run continues without it", e)
                del self._replicas[name]
                await self._remove(name)  # it may hang, and hold memory and a bundle
                return
            await self._cluster.rollouters.replace_replica(name, self._cluster.replica_handle(name))
            self._membership.join(name, self._cluster.sessions[name])
            self._up[name].set()
            self._serving.add(name)
            why = await self._death(name)
            self._serving.discard(name)
            await self._membership.leave(name)

    def _others_serve(self, name: str) -> bool:
        """Other replicas can take over the samples of this one."""
        of = self._cluster.rollouters.of
        return any(of(other) is of(name) for other in self._membership.fleet.sessions)

    async def _death(self, name: str) -> str:
        """Wait until a replica dies, or is preempted and has handed its samples over; returns why."""
        try:
            await end_of_first(self._alive(name), self._drained(name))
        except Preempted as preempted:
            log.warning("supervision: %s; its samples go on elsewhere", preempted)
            self._serving.discard(name)
            await self._cluster.rollouters.retire_replica(name)
            return str(preempted)
        except ActorDied as died:
            return f"{name} {ended}" if (ended := self._ended.pop(name, None)) is not None else str(died)
        raise RuntimeError(f"{name}: alive() returned, which it never does")

    async def _alive(self, name: str) -> None:
        await self._cluster.replicas[name].alive()

    async def _drained(self, name: str) -> None:
        await self._draining[name].wait()
        del self._draining[name]
        raise Preempted(name, "Ray drains its machine")

    async def _fitness(self) -> None:
        """Notice machines that are drained. Kill replicas that answer with errors or that their rollouter cannot reach,
        and outside of syncs those that have work but produced no token for ``progress_s``."""
        progress_s = self._config.progress_s
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            for name in self._serving.intersection(self._cluster.draining()):
                self._draining[name].set()
            in_sync = now_s() - self._membership.last_sync_s < progress_s
            asked_of = {name: self._cluster.replicas[name] for name in self._serving}
            for name, why in (await self._cluster.rollouters.unfit(None if in_sync else progress_s)).items():
                # else its successor is starting, or has started since
                if name in self._serving and self._cluster.replicas[name] is asked_of.get(name):
                    self._ended[name] = why
                    await self._cluster.end(name, why)


async def _wait(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
