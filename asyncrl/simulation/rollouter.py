"""A rollouter of a simulated run: the real loop and router, with engines, agents and rewards that are models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.data.order import PromptOrder
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.processes.actor_client import ActorDied
from asyncrl.rollouter.held_queue import HeldQueue
from asyncrl.rollouter.loop import RolloutLoop
from asyncrl.rollouter.pacing import GenerationPacer
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.samples import SampleMaker
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.sample_queue.messages import Holder
from asyncrl.simulation.engine import SimulatedEngine
from asyncrl.simulation.profile import Profile
from asyncrl.simulation.workload import SimulatedAgent, SimulatedRewards, SimulatedTokenizer, prompts


class SimulatedRollouter:
    """``run()`` rolls out from ``begun`` on. The other calls are those of a rollouter's actor.

    ``engines``: replicas of ``shard``, by name; ``count``: prompts of each of endless epochs."""

    def __init__(
        self,
        config: Config,
        profile: Profile,
        shard: int,
        engines: Mapping[str, SimulatedEngine],
        queue: SampleQueue,
        count: int,
        recorder: Recorder,
    ) -> None:
        self.name = f"rollouter/{shard}"
        self._config, self._queue, self._held = config, queue, HeldQueue(queue, Holder(shard))
        self._router = Router(engines, _is_death, recorder)
        maker = SampleMaker(
            config,
            SimulatedTokenizer(profile),  # type: ignore[arg-type]
            SimulatedAgent(profile, rewards=not config.reward.has_function),
            max(group.prompt_tokens for group in profile.groups),
            self._router,
            SimulatedRewards(profile),
            recorder,
        )
        order = PromptOrder(prompts(count), config.seed, config.data.shuffle)
        slots, set_limit = config.rollout.engine.slots, self._router.set_max_running_requests
        pacer = GenerationPacer(slots, set_limit) if config.rollout.pacing else None
        self._loop = RolloutLoop(config, self._slots, order, maker, self._held, recorder, pacer)

    async def run(self, begun: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._router.run())
            await begun.wait()
            await self._loop.run(await self._held.recover(history=False))

    async def set_routable(self, names: Sequence[str]) -> None:
        await self._router.set_routable(names)

    async def unfit(self, silent_s: float | None) -> dict[str, str]:
        return self._router.unfit(silent_s)

    async def replace_queue(self, handle: Any) -> None: ...

    async def replace_replica(self, name: str, replica: Any) -> None:
        self._router.replace(name, replica)

    async def retire_replica(self, name: str) -> None:
        await self._router.retire(name)
        self._loop.limiter.resize(self._slots)

    @property
    def _slots(self) -> int:
        return len(self._router.outstanding_tokens) * self._config.rollout.engine.slots


def _is_death(error: BaseException) -> bool:
    """Raises an error that is not a death: an engine's model is wrong."""
    if isinstance(error, ActorDied | BaseExceptionGroup):
        return isinstance(error, ActorDied)
    raise error
