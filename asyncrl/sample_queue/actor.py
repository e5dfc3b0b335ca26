"""Ray actor around the sample queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import ray

from asyncrl.cpu.priority import never_interrupt
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.log import LogConfig
from asyncrl.processes.actor_client import SupervisedActor
from asyncrl.processes.garbage import collect_rarely
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.sample_queue.journal import Journal
from asyncrl.sample_queue.messages import Admitted, Drop, Holder, Lease, Recovery, Refusal, Snapshot, Ticket
from asyncrl.sample_queue.records import JournalError
from asyncrl.sample_queue.schedule import Order, Overdue

log = logging.getLogger(__name__)

GONE_WITHIN_S = 20.0  # a killed queue process releases its lock within this time


@ray.remote
class SampleQueueActor(SupervisedActor):
    """The queue's actor. ``lease`` returns two objects, so that the driver can pass the payload on to the ranks without
    reading it. ``about``: facts about the run, for readers of the ledger.

    All state is in the journal in ``folder``: after a crash, another actor with the same arguments continues, and
    callers repeat unanswered calls."""

    def __init__(
        self,
        folder: Path,
        groups_per_version: int,
        threshold: tuple[int, int],
        total_groups: int,
        order: Order,
        overdue: Overdue,
        vocab_size: int,
        max_attempts: int,
        shards: int,
        driver_epoch: int,
        about: Mapping[str, str] | None = None,
        logs: LogConfig | None = None,
    ) -> None:
        super().__init__("queue", logs)
        never_interrupt()
        self._folder, self._order, self._overdue = folder, order, overdue
        self._vocab_size, self._max_attempts, self._shards = vocab_size, max_attempts, shards
        self._driver_epoch = driver_epoch
        self._admission = Admission(groups_per_version, Fraction(*threshold), total_groups)
        self._meta: dict[str, str | int | float] = {
            "groups_per_version": groups_per_version,
            "staleness_threshold": float(self._admission.staleness_threshold),
            **(about or {}),
        }

    async def start(self) -> None:
        """Opens the journal; called once, before all other methods. Raises SpoolError or LedgerError for damage,
        JournalError if another process keeps it locked, OSError if it cannot be written."""
        self._journal = await _opened(self._folder, self._meta, self._driver_epoch)
        if self._journal.torn is not None:
            log.warning("%s", self._journal.torn)
        self._queue = SampleQueue(
            self._admission,
            self._journal,
            self._order,
            self._overdue,
            self._vocab_size,
            self._max_attempts,
            self._shards,
        )
        collect_rarely()
        self._cpu_before_s = time.thread_time()

    async def stalled_s(self) -> float:
        """See `Journal.stalled_s`."""
        return self._journal.stalled_s

    async def recover(self, holder: Holder, history: bool) -> Recovery:
        return await self._queue.recover(holder, history)

    async def room(self, count: int, holder: Holder) -> tuple[int, int]:
        return await self._queue.room(count, holder)

    async def issue(self, tickets: list[Ticket], count: int, holder: Holder) -> Admitted:
        return await self._queue.issue(tickets, count, holder)

    async def put_and_issue(
        self, groups: list[bytes], tickets: list[Ticket], count: int, holder: Holder
    ) -> tuple[list[Refusal], Admitted]:
        return await self._queue.put_and_issue(groups, tickets, count, holder)

    async def drop(self, drops: list[Drop], holder: Holder) -> None:
        await self._queue.drop(drops, holder)

    async def snapshot(self, parts: list[Snapshot], holder: Holder) -> None:
        await self._queue.snapshot(parts, holder)

    async def end(self, reason: str, holder: Holder) -> None:
        await self._queue.end(reason, holder)

    async def overdue(self, holder: Holder) -> list[str]:
        return await self._queue.overdue(holder)

    @ray.method(num_returns=2)
    async def lease(self, step: int, count: int, having: Sequence[str] = ()) -> tuple[Lease, list[bytes]]:
        return await self._queue.lease(step, count, having)

    async def trained(self, step: int) -> None:
        await self._queue.trained(step)

    async def covered(self, step: int) -> None:
        await self._queue.covered(step)

    async def copy_to(self, folder: Path) -> None:
        """See `Journal.copy_to`."""
        await self._journal.copy_to(folder)

    async def release(self, step: int) -> None:
        await self._queue.release(step)

    async def rollback(self, step: int, total_groups: int | None = None) -> Any:
        return await self._queue.rollback(step, total_groups)

    async def skip(self, uids: list[str]) -> None:
        await self._queue.skip(uids)

    async def announce(self, version: Any) -> None:
        await self._queue.announce(version)

    async def publish(
        self, version: Any, trained: int | None = None, rolling: bool = False, starved_s: float = 0.0
    ) -> dict[str, int]:
        return await self._queue.publish(version, trained, rolling, starved_s)

    async def retire_before(self, version: Any) -> None:
        await self._queue.retire_before(version)

    async def stats(self) -> dict[str, float]:
        return await self._queue.stats() | self._costs()

    async def finish(self) -> dict[str, float]:
        """Closes the ledger and returns the final balance; a repeated call returns it again."""
        stats = await self._queue.finish() | self._costs()
        await self._journal.close()
        return stats

    def _costs(self) -> dict[str, float]:
        """CPU seconds of this loop and of the journal's writer since it was opened, without those of the thread that
        stores snapshots; and seconds of a commit."""
        spent = self._journal.stats()
        return {
            "perf/ledger_cpu_s": time.thread_time() - self._cpu_before_s + spent.cpu_s,
            "perf/ledger_write_s": spent.seconds / max(spent.commits, 1),
        }


async def _opened(folder: Path, meta: Mapping[str, str | int | float], driver_epoch: int) -> Journal:
    """Opens the journal as soon as the previous process has released it."""
    deadline = now_s() + GONE_WITHIN_S
    while True:
        try:
            return Journal(folder, meta, driver_epoch=driver_epoch)
        except JournalError:
            if now_s() > deadline:
                raise
            await asyncio.sleep(0.2)  # flock has no timeout
