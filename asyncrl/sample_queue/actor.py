"""The sample queue as a Ray actor: the core's methods, and payloads handed on by reference."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ray

from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue


@ray.remote
class SampleQueueActor:
    """``lease`` returns two objects, so that the driver can pass the payload on to the ranks without reading it."""

    def __init__(self, groups_per_version: int, threshold: tuple[int, int], total_groups: int) -> None:
        self._queue = SampleQueue(Admission(groups_per_version, Fraction(*threshold), total_groups))

    async def issue(self, uids: list[str]) -> int:
        return await self._queue.issue(uids)

    async def put(self, groups: list[bytes], now_s: float) -> None:
        await self._queue.put(groups, now_s)

    async def drop(self, drops: list[tuple[str, str]]) -> None:
        await self._queue.drop(drops)

    @ray.method(num_returns=2)
    async def lease(self, step: int, count: int, now_s: float) -> Any:
        return await self._queue.lease(step, count, now_s)

    async def trained(self, step: int) -> None:
        await self._queue.trained(step)

    async def release(self, step: int) -> None:
        await self._queue.release(step)

    async def publish(self, version: Any) -> dict[str, int]:
        return await self._queue.publish(version)

    async def finish(self) -> dict[str, float]:
        return await self._queue.finish()

    async def stats(self) -> dict[str, float]:
        return await self._queue.stats()

    async def close(self, reason: str, failed: bool = False) -> None:
        await self._queue.close(reason, failed)
