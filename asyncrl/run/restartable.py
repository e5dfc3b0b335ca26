"""Rollouters and trainer ranks for the run's two loops, restarted whenever they die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.param_sync.errors import SyncError
from asyncrl.processes.actor_client import ActorDied, DataLost, first_leaf
from asyncrl.processes.tasks import cancelled, end_of_first
from asyncrl.run.supervision import SupervisedCluster, Supervisor

DEATH_NOTICE_S = 2.0  # wait for the notice of a death after a call failed


class RestartableRollouters:
    """The rollout loops and their actors. ``run()`` starts the actors, restarts those that die, and rolls out once
    `start_groups` is called. ``routable()``: replicas that new rollouters may use at first."""

    def __init__(
        self, cluster: SupervisedCluster, supervisor: Supervisor, routable: Callable[[], Sequence[str]]
    ) -> None:
        self._cluster, self._supervisor, self._routable = cluster, supervisor, routable
        self._up = [asyncio.Event() for _ in cluster.rollouters.shards]
        self._may_start = asyncio.Event()

    async def run(self) -> None:
        """Raises DiedTooOften, or the exception of a rollout loop."""
        async with asyncio.TaskGroup() as tasks:
            for shard in range(len(self._up)):
                tasks.create_task(self._run(shard))

    async def _run(self, shard: int) -> None:
        why: str | None = None
        client = self._cluster.rollouters.shards[shard]
        start = lambda: self._cluster.start_rollouter(shard, self._routable)
        while True:
            await self._supervisor.start(client.name, start, why)
            self._up[shard].set()
            rollouter = client.once
            try:
                if not self._may_start.is_set():
                    await end_of_first(rollouter.alive(), self._may_start.wait())
                await rollouter.run()
            except ActorDied as died:
                if died.name != client.name:
                    raise
                why = str(died)

    async def started(self) -> None:
        """Wait until each actor has been up once."""
        for up in self._up:
            await up.wait()

    def start_groups(self) -> None:
        """Let groups start; called when ranks and queue are at the run's checkpoint."""
        self._may_start.set()

    async def reset(self) -> None:
        """Snapshot the in-flight groups and re-admit them under the restored version."""
        await self._cluster.rollouters.reset()


class RestartableRanks:
    """The training loop's `Ranks`: calls go to the current rank group, which `restart` replaces."""

    def __init__(self, cluster: SupervisedCluster, supervisor: Supervisor) -> None:
        self._cluster, self._supervisor = cluster, supervisor

    def __getattr__(self, call: str) -> Any:
        return getattr(self._cluster.ranks, call)

    async def start(self) -> None:
        """Raises DiedTooOften."""
        await self._supervisor.start("trainer", self._cluster.start_ranks, lost=self.lost)

    async def restart(self, why: str) -> None:
        """Raises DiedTooOften."""
        why = f"{why}; all ranks go back to the last checkpoint"
        await self._supervisor.start("trainer", self._cluster.start_ranks, why, self.lost)

    async def lost(self, error: BaseException) -> str | None:
        """Why a rank is dead; None if all live. Waits up to `DEATH_NOTICE_S`: a rank may fail with ``error`` because
        another one died, before that death is reported. A rank that failed a sync counts as dead, and so does one whose
        data is lost."""
        if (died := rank_death(error)) is not None:
            return str(died)
        if isinstance(error, DataLost):
            return str(error)
        if isinstance(error, SyncError) and error.who in self._cluster.senders:
            await self._cluster.end(error.who, f"failed a sync ({error})")
            return str(error)
        living = [asyncio.ensure_future(rank.alive()) for rank in self._cluster.senders.values()]
        if not living:  # none could be created
            return None
        try:
            done, _ = await asyncio.wait(living, timeout=DEATH_NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
            return next((str(e) for task in done if isinstance(e := task.exception(), ActorDied)), None)
        finally:
            await cancelled(living)


def rank_death(error: BaseException | None) -> ActorDied | None:
    """The death of a rank that caused ``error``, if one did."""
    while error is not None:
        error = first_leaf(error)
        if isinstance(error, ActorDied) and error.name.startswith("trainer/"):
            return error
        error = error.__cause__
    return None
