"""The sample queue as a Ray actor: the core's methods, and payloads handed on by reference."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import ray

from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue, Ticket
from asyncrl.sample_queue.journal import Journal


@ray.remote
class SampleQueueActor:
    """``lease`` returns two objects, so that the driver can pass the payload on to the ranks without reading it."""

    def __init__(self, run_dir: Path, groups_per_version: int, threshold: tuple[int, int], total_groups: int) -> None:
        admission = Admission(groups_per_version, Fraction(*threshold), total_groups)
        meta = {"groups_per_version": groups_per_version, "staleness_threshold": float(admission.staleness_threshold)}
        self._journal = Journal(run_dir, meta)
        self._queue = SampleQueue(admission, self._journal)

    async def issue(self, tickets: list[Ticket]) -> int:
        return await self._queue.issue(tickets)

    async def put(self, groups: list[bytes], now_s: float) -> None:
        await self._queue.put(groups, now_s)

    async def drop(self, drops: list[tuple[str, str]]) -> None:
        await self._queue.drop(drops)

    @ray.method(num_returns=2)
    async def lease(self, step: int, count: int, now_s: float) -> Any:
        return await self._queue.lease(step, count, now_s)

    async def trained(self, step: int) -> None:
        await self._queue.trained(step)

    async def covered(self, step: int) -> None:
        await self._queue.covered(step)

    async def release(self, step: int) -> None:
        await self._queue.release(step)

    async def publish(self, version: Any) -> dict[str, int]:
        return await self._queue.publish(version)

    async def finish(self) -> dict[str, float]:
        """The final balance; the ledger is closed with it."""
        stats = await self._queue.finish()
        cpu_s = self._journal.stats().cpu_s
        await self._journal.close()
        return stats | {"perf/ledger_cpu_s": cpu_s}

    async def stats(self) -> dict[str, float]:
        return await self._queue.stats()

    async def close(self, reason: str, failed: bool = False) -> None:
        await self._queue.close(reason, failed)
