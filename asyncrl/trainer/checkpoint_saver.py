"""Saves checkpoints while training continues: stage → write → complete → cover."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from asyncrl.config.schema import CheckpointConfig
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.measured import STAGES, note
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.processes.tasks import cancelled, within
from asyncrl.sample_queue.journal import remove_older_copies
from asyncrl.trainer.checkpoints import CheckpointMetadata, CheckpointStore
from asyncrl.trainer.progress import Progress
from asyncrl.trainer.protocols import QueueClient, Ranks

log = logging.getLogger(__name__)

RESTORABLE = 2  # number of newest checkpoints a resumed run can restore; the queue keeps the groups trained after them


class CheckpointSaver:
    """Writes one checkpoint at a time. ``journal_copy``: destination of each checkpoint's copy of the queue's journal,
    if the journal is on another disk."""

    def __init__(
        self,
        config: CheckpointConfig,
        ranks: Ranks,
        queue: QueueClient,
        checkpoints: CheckpointStore,
        recorder: Recorder,
        journal_copy: Path | None,
    ) -> None:
        self._config, self._ranks, self._queue, self._recorder = config, ranks, queue, recorder
        self._checkpoints, self._journal_copy = checkpoints, journal_copy
        self._newest = (-1, False)  # step of the newest checkpoint, and whether it is the last one
        self._writing: asyncio.Task[None] | None = None

    def restored(self, step: int | None) -> None:
        """Training continues from the checkpoint of ``step``, or from the start (None)."""
        self._newest = (step if step is not None else -1, False)

    async def save(self, progress: Progress, last: bool = False) -> None:
        """Save a checkpoint of ``progress``, unless it exists. Training waits while the state is staged and a Hugging
        Face folder is exported; the write overlaps with training, except for the ``last`` checkpoint and with
        ``checkpoint.asynchronous`` off. All groups are final with one after which no step follows."""
        await self.finish()
        options = self._config
        if self._newest >= (progress.step, last):
            return
        metadata = CheckpointMetadata(
            progress.step,
            progress.version,
            progress.trained,
            progress.trained_at_publish,
            progress.groups_digest,
            self._checkpoints.driver_epoch,
        )
        with self._recorder.span("trainer/checkpoint_wait", step=progress.step):
            partial = self._checkpoints.begin(progress.step)
            began_s = now_s()
            await self._ranks.stage()
            note(self._recorder, STAGES, now_s() - began_s)
            if options.export_hf == "all" or (options.export_hf == "final" and last):
                await self._ranks.export_hf(partial / "hf")
            what = f"the write of the checkpoint of step {progress.step} (checkpoint.timeout_s)"
            write = self._write(partial, metadata, last, restorable=1 if progress.last else RESTORABLE)
            self._writing = asyncio.create_task(within(options.timeout_s, write, what))
            self._newest = (progress.step, last)
            if last or not options.asynchronous:
                await self.finish()

    async def finish(self) -> None:
        """Wait for the write in progress; raises its failure."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def check(self) -> None:
        """Raise the failure of a write that has ended; does not wait for a running one."""
        if self._writing is not None and self._writing.done():
            await self.finish()

    async def settle(self) -> None:
        """After a rank's death: wait until the write in progress has failed, or has produced the checkpoint to
        restore."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        await asyncio.wait([writing])
        if not writing.cancelled() and (problem := writing.exception()) is not None:
            log.warning("the checkpoint being written is lost: %s", problem)
        await cancelled([writing])

    async def rate(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Rate the checkpoint of exactly these weights if ``metrics`` has ``checkpoint.best_metric``. The checkpoint
        may be saved already, later or never."""
        if self._config.best_metric in metrics:
            await asyncio.to_thread(self._checkpoints.rate, progress.taken, metrics)

    async def _write(self, partial: Path, metadata: CheckpointMetadata, last: bool, restorable: int) -> None:
        with self._recorder.span("trainer/checkpoint_write", step=metadata.step):
            await self._ranks.write(partial / "state")
            if self._journal_copy is not None:  # before completion: a checkpoint must not be newer than its ledger
                await self._queue.copy_to(self._journal_copy)
            checkpoint = await asyncio.to_thread(self._checkpoints.complete, partial, metadata)
            if self._journal_copy is not None:  # no driver has taken over, which might restore an older one
                await asyncio.to_thread(remove_older_copies, self._journal_copy)
            if last:
                await asyncio.to_thread(self._checkpoints.mark_final, checkpoint)
        log.info("checkpoint of step %d written to %s", metadata.step, checkpoint.path)
        kept = await asyncio.to_thread(self._checkpoints.all)
        await self._queue.covered(min(c.metadata.step for c in kept[-restorable:]))
