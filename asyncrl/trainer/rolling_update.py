"""Change-over of the replicas to a new version while training continues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from asyncrl.processes.tasks import cancelled, first_of
from asyncrl.trainer.progress import Progress
from asyncrl.trainer.protocols import QueueClient
from asyncrl.types.versions import PolicyVersion


class RollingUpdate:
    """At most one change-over at a time. Until every replica serves the version, groups count as started under the
    previous one.

    ``sync(version, sent)`` moves the replicas, sets ``sent`` when the weights have left the ranks, and returns False if
    not all of them serve the version. ``served(progress)`` is awaited when all replicas serve the version."""

    def __init__(
        self,
        queue: QueueClient,
        sync: Callable[[PolicyVersion, asyncio.Event], Awaitable[bool]],
        served: Callable[[Progress], Awaitable[None]],
    ) -> None:
        self._queue, self._sync, self._served = queue, sync, served
        self._changing: asyncio.Task[None] | None = None

    async def start(self, progress: Progress, starved_s: float) -> None:
        """Start the change-over to ``progress.version``; returns when the ranks may continue training."""
        sent = asyncio.Event()
        self._changing = asyncio.create_task(self._change_over(progress, starved_s, sent))
        await first_of(sent.wait(), beside=self._changing)
        if not sent.is_set():
            await self.finish()

    @property
    def under_way(self) -> asyncio.Task[None] | None:
        """The change-over, until `finish` or `cancel`."""
        return self._changing

    async def finish(self) -> None:
        """Wait for the change-over; raises its failure."""
        changing, self._changing = self._changing, None
        if changing is not None:
            await changing

    async def cancel(self) -> None:
        if self._changing is not None:
            await cancelled([self._changing])
            self._changing = None

    async def _change_over(self, progress: Progress, starved_s: float, sent: asyncio.Event) -> None:
        version = progress.version
        weights_sent = asyncio.Event()
        syncing = asyncio.ensure_future(self._sync(version, weights_sent))
        try:
            await first_of(weights_sent.wait(), beside=syncing)
            if weights_sent.is_set():
                await self._queue.publish(version, progress.trained_at_publish, rolling=True, starved_s=starved_s)
                sent.set()
            if await syncing:
                await self._queue.retire_before(version)
                await self._served(progress)
        finally:
            await cancelled([syncing])
