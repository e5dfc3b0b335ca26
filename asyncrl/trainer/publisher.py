"""Publishes policy versions: announce → sync → validate → publish. In between, syncs restarted replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from asyncrl.param_sync.errors import ALL_REPLICAS, SyncError
from asyncrl.processes.tasks import cancelled, first_of
from asyncrl.trainer.progress import Progress, TrainingState
from asyncrl.trainer.protocols import Observer, QueueClient, Ranks, Sync, Validation
from asyncrl.trainer.rolling_update import RollingUpdate
from asyncrl.types.versions import PolicyVersion

T = TypeVar("T")

log = logging.getLogger(__name__)


class Publisher:
    """Syncs the current version of ``state`` to all replicas, then publishes it to the queue: groups start under it.

    ``overlapped``: replicas first receive a host copy of the weights (``param_sync.staging: full``), so training
    continues while they change over."""

    def __init__(
        self,
        state: TrainingState,
        queue: QueueClient,
        ranks: Ranks,
        sync: Sync,
        validation: Validation,
        observer: Observer,
        overlapped: bool,
    ) -> None:
        self._state, self._queue, self._ranks, self._sync = state, queue, ranks, sync
        self._validation, self._observer = validation, observer
        self._overlapped = overlapped
        self._rolling = RollingUpdate(queue, self._synced, self._served)
        self._published = False  # True once a version was published since the start or the last restore
        self._served_version: PolicyVersion | None = None  # the last one that a sync brought to the replicas
        self._sync_metrics: Mapping[str, float] = {}

    async def publish(self) -> None:
        """Sync the version to all replicas, validate it, then let groups start under it. Waits for the previous
        version's change-over first; publishes nothing if stopped while no replica is alive.

        When overlapped, returns as soon as the weights have left the ranks, except for the first and last versions and
        after a restore."""
        state = self._state
        await self._rolling.finish()
        await self.while_replicas_join(self._validation.finished(), self._stranded)
        # announced before any replica can serve it: its tokens may reach the queue before `publish` does
        await self._queue.announce(state.progress.version)
        if self._overlapped and self._published and not state.progress.last:
            await self._rolling.start(state.progress, state.starved_s)
            return
        if not await self._synced(state.progress.version):
            return
        await self.while_replicas_join(self._served(state.progress))
        # no group starts under the last version; a run that resumes this one may train the groups left over
        if not state.progress.last:
            progress = state.progress
            await self._queue.publish(progress.version, progress.trained_at_publish, starved_s=state.starved_s)
        self._published = True

    async def while_replicas_join(
        self, work: Awaitable[T], on_join: Callable[[], Awaitable[bool]] | None = None
    ) -> T | None:
        """Result of ``work``; None if a stop comes first. Meanwhile, whenever a replica comes back and no change-over
        is running, calls ``on_join`` (default: sync it to the served version); if that returns True, cancels ``work``
        and returns None."""
        joined, stopping = on_join or self._rejoin, self._state.stopping
        working = asyncio.ensure_future(work)
        try:
            while not working.done() and not stopping.is_set():
                if (changing := self._rolling.under_way) is not None:
                    await first_of(_ended(changing), stopping.wait(), beside=working)
                    if changing.done():
                        await self._rolling.finish()
                    continue
                await first_of(self._sync.someone_to_join(), stopping.wait(), beside=working)
                if not working.done() and not stopping.is_set():
                    self._sync.joiners_seen()
                    if await joined():
                        break
            return working.result() if working.done() and not stopping.is_set() else None
        finally:
            await cancelled([working])

    def take_sync_metrics(self) -> Mapping[str, float]:
        """Metrics of the last sync, once."""
        taken, self._sync_metrics = self._sync_metrics, {}
        return taken

    def restored(self) -> None:
        """The weights are those of a checkpoint; no version of the new lineage is published yet."""
        self._published = False

    async def cancel(self) -> None:
        """Cancel a running change-over."""
        await self._rolling.cancel()

    async def _synced(self, version: PolicyVersion, sent: asyncio.Event | None = None) -> bool:
        """Sync the version; False if stopped while no replica is alive. A session that failed because no replica was
        left is repeated once there is one: weights and version have not changed. But with ``sent``, which is set when
        the weights have left the ranks, these train on from then: returns False, and the first replica that joins gets
        what they hold, see `_rejoin`."""
        on_sent = sent.set if sent is not None else lambda: None
        while True:
            try:
                self._sync_metrics = metrics = await self._sync(version, on_sent)
            except SyncError as e:
                if e.who != ALL_REPLICAS or await self._ranks.lost(e) is not None:
                    raise
                log.warning("%s; replicas that join are synced anew", e)
            else:
                log.debug("version %s is served", version, extra=dict(metrics))
                self._served_version = version
                return True
            await self._sync.renew()
            if sent is not None and sent.is_set():
                return False
            await first_of(self._sync.someone_to_join(), self._state.stopping.wait())
            if self._state.stopping.is_set():
                return False

    async def _served(self, progress: Progress) -> None:
        await self._validation.validate(progress)
        await self._observer.on_version(progress)

    async def _stranded(self) -> bool:
        """True if samples wait for a replica: only the next sync can bring one back, so it must not wait."""
        return self._sync.stranded()

    async def _rejoin(self) -> bool:
        """Sync restarted replicas now, so that they need not wait for the next version; returns False.

        If the weights are ahead of the published version, or no replica ever served it, publishes them as the same
        number in a new lineage, but only if samples wait for a replica: live ones would have to change over for
        nothing."""
        progress = self._state.progress
        if progress.trained == progress.trained_at_publish and progress.version == self._served_version:
            try:
                await self._sync.rejoin(progress.version)
            except SyncError as e:
                if self._sync.stranded() or await self._ranks.lost(e) is not None:
                    raise
                log.warning("%s; restarted replicas join at the next sync", e)
            if self._sync.stranded():  # the next sync may never come
                await self._sync.renew()
        elif self._sync.stranded():
            self._state.next_lineage()
            await self.publish()
        return False


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
