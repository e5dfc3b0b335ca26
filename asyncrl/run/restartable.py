"""Rollouter and trainer ranks for the run's two loops, restarted whenever they die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.param_sync.errors import SyncError
from asyncrl.processes.actor_client import ActorDied, first_leaf
from asyncrl.processes.tasks import cancelled, end_of_first
from asyncrl.run.supervision import SupervisedCluster, Supervisor

DEATH_NOTICE_S = 2.0  # wait for the notice of a death after a call failed


class RestartableRollouter:
    """The rollout loop and its actor. ``run()`` starts the actor, restarts it when it dies, and rolls out once
    `start_groups` is called. ``routable()``: replicas that a new rollouter may use at first."""

    def __init__(
        self, cluster: SupervisedCluster, supervisor: Supervisor, routable: Callable[[], Sequence[str]]
    ) -> None:
        self._cluster, self._supervisor, self._routable = cluster, supervisor, routable
        self._up, self._may_start = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Raises DiedTooOften, or the exception of the rollout loop."""
        why: str | None = None
        while True:
            await self._supervisor.start("rollouter", lambda: self._cluster.start_rollouter(self._routable), why)
            self._up.set()
            rollouter = self._cluster.rollouter.once
            try:
                if not self._may_start.is_set():
                    await end_of_first(rollouter.alive(), self._may_start.wait())
                await rollouter.run()
            except ActorDied as died:
                if died.name != "rollouter":
                    raise
                why = str(died)

    async def started(self) -> None:
        """Wait until the actor has been up once."""
        await self._up.wait()

    def start_groups(self) -> None:
        """Let groups start; called when ranks and queue are at the run's checkpoint."""
        self._may_start.set()

    async def reset(self) -> None:
        """Snapshot the in-flight groups and re-admit them under the restored version."""
        await self._cluster.rollouter.reset()


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
        another one died, before that death is reported. A rank that failed a sync counts as dead."""
        if (died := rank_death(error)) is not None:
            return str(died)
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
