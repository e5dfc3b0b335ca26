"""The sample queue as a Ray actor: the core's methods, and payloads handed on by reference."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import ray

from asyncrl.priority import never_interrupt
from asyncrl.ray_client import Watched
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import Order, Overdue, SampleQueue
from asyncrl.sample_queue.journal import Journal
from asyncrl.sample_queue.life import JournalError
from asyncrl.sample_queue.messages import Recovery, Ticket
from asyncrl.telemetry.log import LogTo

GONE_WITHIN_S = 20.0  # the process of a queue that was killed, and with it its lock


@ray.remote
class SampleQueueActor(Watched):
    """``lease`` returns two objects, so that the driver can pass the payload on to the ranks without reading it.
    ``about``: more of the run, for readers of the ledger. ``backoff_s``: to wait before a new start.

    Ray starts it anew when its process dies, with the same arguments, and makes the calls again that had no answer:
    the journal in ``folder`` holds all that it knew, and every call may be repeated."""

    def __init__(
        self,
        folder: Path,
        groups_per_version: int,
        threshold: tuple[int, int],
        total_groups: int,
        order: Order = "fifo",
        overdue: Overdue = "wait",
        about: Mapping[str, str] | None = None,
        backoff_s: float = 0.0,
        logs: LogTo | None = None,
    ) -> None:
        super().__init__("queue", logs)
        never_interrupt()
        self._problem: Exception | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what Ray calls there
            again = ray.get_runtime_context().was_current_actor_reconstructed
        if again:
            time.sleep(backoff_s)  # Ray itself starts it at once
        admission = Admission(groups_per_version, Fraction(*threshold), total_groups)
        meta: dict[str, str | int | float] = {
            "groups_per_version": groups_per_version,
            "staleness_threshold": float(admission.staleness_threshold),
            **(about or {}),
        }
        try:
            self._journal = _opened(folder, meta)
            self._core = SampleQueue(admission, self._journal, order, overdue)
        except Exception as problem:  # raised by every call: what a constructor raises, Ray takes for a death
            self._problem = problem

    @property
    def _queue(self) -> SampleQueue:
        if self._problem is not None:
            raise self._problem
        return self._core

    async def start(self) -> None:
        """Raises what there is to say against the journal: damage, another process that has it, a disk that is full."""
        _ = self._queue

    async def recover(self) -> Recovery:
        return await self._queue.recover()

    async def issue(self, tickets: list[Ticket], version: Any = None) -> int:
        return await self._queue.issue(tickets, version)

    async def put(self, groups: list[bytes], now_s: float) -> None:
        await self._queue.put(groups, now_s)

    async def drop(self, drops: list[tuple[str, str]]) -> None:
        await self._queue.drop(drops)

    async def snapshot(self, snapshots: list[tuple[str, bytes]]) -> None:
        await self._queue.snapshot(snapshots)

    async def overdue(self) -> list[str]:
        return await self._queue.overdue()

    @ray.method(num_returns=2)
    async def lease(self, step: int, count: int, now_s: float) -> Any:
        return await self._queue.lease(step, count, now_s)

    async def trained(self, step: int) -> None:
        await self._queue.trained(step)

    async def covered(self, step: int) -> None:
        await self._queue.covered(step)

    async def copy_to(self, folder: Path) -> None:
        """Copy ledger and spool to another disk, see `Journal.copy_to`."""
        await self._journal.copy_to(folder)

    async def release(self, step: int) -> None:
        await self._queue.release(step)

    async def rollback(self, step: int) -> Any:
        return await self._queue.rollback(step)

    async def publish(self, version: Any, trained: int | None = None, rolling: bool = False) -> dict[str, int]:
        return await self._queue.publish(version, trained, rolling)

    async def retire_before(self, version: Any) -> None:
        await self._queue.retire_before(version)

    async def stats(self) -> dict[str, float]:
        return await self._queue.stats() | {"perf/ledger_cpu_s": self._journal.stats().cpu_s}

    async def close(self, reason: str, failed: bool = False) -> None:
        await self._queue.close(reason, failed)

    async def finish(self) -> dict[str, float]:
        """The final balance; the ledger is closed with it, and a further call gets the balance again."""
        stats = await self._queue.finish() | {"perf/ledger_cpu_s": self._journal.stats().cpu_s}
        await self._journal.close()
        return stats


def _opened(folder: Path, meta: Mapping[str, str | int | float]) -> Journal:
    """The journal, as soon as the process that had it before lets go of it."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while True:
        try:
            return Journal(folder, meta)
        except JournalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)  # flock can wait, but not for a limited time
