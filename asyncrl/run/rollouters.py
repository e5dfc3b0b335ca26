"""The rollouters of a run: `rollout.shards` processes behind one queue, each with replicas of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from asyncrl.config.schema import RolloutConfig
from asyncrl.processes.actor_client import ActorDied, RestartableClient
from asyncrl.rollouter.validated import NO_LINEAGE, ROUNDS, Validated


def shard_names(role: str, shards: int) -> list[str]:
    """Names of the actors that each rollouter has one of."""
    return [role] if shards == 1 else [f"{role}/{shard}" for shard in range(shards)]


def shard_of(replica: str, config: RolloutConfig) -> int:
    """The shard that serves this replica. The run's first replicas, which are placed in order, are dealt in blocks, so
    that most of a machine's have one rollouter, whose calls to them travel together."""
    number = int(replica.rpartition("/")[2])
    return number * config.shards // config.replicas if number < config.replicas else number % config.shards


class RollouterClient(RestartableClient):
    """A rollouter that is dead or starting hears nothing of replicas: it gets the newest list when it has started."""

    async def set_routable(self, names: Sequence[str]) -> None:
        with contextlib.suppress(ActorDied):
            if self.handle is not None:
                await self.once.set_routable(names)

    async def unfit(self, silent_s: float | None) -> dict[str, str]:
        with contextlib.suppress(ActorDied):
            if self.handle is not None:
                return await self.once.unfit(silent_s)
        return {}


class Rollouters:
    """Calls to all rollouters. ``shards``: clients of each."""

    def __init__(self, shards: Sequence[Any], config: RolloutConfig) -> None:
        self.shards, self._config = shards, config

    def of(self, replica: str) -> Any:
        """The rollouter that serves this replica."""
        return self.shards[shard_of(replica, self._config)]

    def strands(self, routable: Collection[str]) -> bool:
        """True if a shard has none of these replicas: its samples go to no other."""
        return {self.of(name).name for name in routable} != {shard.name for shard in self.shards}

    async def set_routable(self, names: Sequence[str]) -> None:
        of_each = ([name for name in names if self.of(name) is shard] for shard in self.shards)
        await asyncio.gather(*(shard.set_routable(own) for shard, own in zip(self.shards, of_each, strict=True)))

    async def replace_queue(self, handle: Any) -> None:
        await asyncio.gather(*(shard.replace_queue(handle) for shard in self.shards))

    async def replace_replica(self, name: str, replica: Any) -> None:
        await self.of(name).replace_replica(name, replica)

    async def retire_replica(self, name: str) -> None:
        await self.of(name).retire_replica(name)

    async def unfit(self, silent_s: float | None) -> dict[str, str]:
        found = await asyncio.gather(*(shard.unfit(silent_s) for shard in self.shards))
        return {name: why for of_shard in found for name, why in of_shard.items()}

    async def reset(self) -> None:
        await asyncio.gather(*(shard.reset() for shard in self.shards))

    async def validate(self) -> dict[str, float]:
        """Each answers its part of the prompts, again if another one has answers of a newer lineage. Returns
        `Validated.values`. Raises RuntimeError if lineages are still mixed after `ROUNDS` rounds."""
        parts: list[Validated] = await asyncio.gather(*(shard.validate() for shard in self.shards))
        for left in reversed(range(ROUNDS)):
            newest = max(part.lineage for part in parts)
            outdated = [i for i, part in enumerate(parts) if NO_LINEAGE < part.lineage < newest]
            if not outdated:
                break
            if not left:
                raise RuntimeError(f"validation: after {ROUNDS} rounds shards have answers of different lineages")
            again = await asyncio.gather(*(self.shards[i].validate() for i in outdated))
            for i, part in zip(outdated, again, strict=True):
                parts[i] = part
        return Validated.together(parts).values()

    async def set_validation_first(self, first: bool) -> None:
        await asyncio.gather(*(shard.set_validation_first(first) for shard in self.shards))
