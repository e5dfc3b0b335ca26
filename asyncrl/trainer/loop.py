"""The training loop: take a batch, train on it, publish new weights every few steps, go back when ranks die.

queue ──lease──► ranks.train ──trained──► every trigger_parameter_sync_step steps: sync, publish
  ▲                   │ a rank died
  └──rollback─── last checkpoint, new lineage
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from asyncrl.config.checks import Derived
from asyncrl.config.schema import Config
from asyncrl.param_sync.errors import ALL_REPLICAS, SyncError
from asyncrl.sample import PolicyVersion
from asyncrl.sample_queue.messages import Lease
from asyncrl.tasks import cancelled
from asyncrl.telemetry.recorder import Recorder, now_s
from asyncrl.trainer.checkpoints import Checkpoint, CheckpointStore, Cut

T = TypeVar("T")

log = logging.getLogger(__name__)

RESTORABLE = 2  # newest checkpoints that a run which goes on can go back to: what was trained after them is kept


class StalenessError(RuntimeError):
    """A batch holds a token older than the bound: admission or queue is broken, and the run must not train on it."""


class QueueClient(Protocol):
    """The trainer's side of the sample queue. What ``lease`` gives as payload goes to `Ranks.train` unread."""

    async def lease(self, step: int, count: int, now_s: float) -> tuple[Lease, Any]: ...
    async def trained(self, step: int) -> None: ...
    async def covered(self, step: int) -> None: ...
    async def release(self, step: int) -> None: ...
    async def rollback(self, step: int) -> PolicyVersion | None: ...
    async def publish(
        self, version: PolicyVersion, trained: int | None = None, rolling: bool = False
    ) -> dict[str, int]: ...
    async def retire_before(self, version: PolicyVersion) -> None: ...
    async def copy_to(self, folder: Path) -> None: ...
    async def finish(self) -> dict[str, float]: ...


class Ranks(Protocol):
    """All trainer ranks at once. ``stage`` copies their state, ``write`` writes the copy while they train on."""

    async def train(self, step: int, payload: Any, mask_before: int | None) -> dict[str, float]: ...
    async def stage(self) -> None: ...
    async def write(self, path: Path) -> None: ...
    async def load(self, path: Path) -> None: ...
    async def export_hf(self, path: Path) -> None: ...

    async def lost(self, error: BaseException) -> str | None:
        """Why a rank is dead, or None if all live: asked after a call failed with ``error``."""

    async def restart(self, why: str) -> None:
        """New ranks, with the weights that the run began with. Raises if there were too many restarts."""


class Sync(Protocol):
    """The parameter-sync group, see `asyncrl.param_sync.group.ParameterSyncGroup`."""

    async def __call__(self, version: PolicyVersion, on_sent: Callable[[], None]) -> Mapping[str, float]:
        """Move all replicas to a version; returns metrics of the session. ``on_sent`` is called as soon as the ranks
        may train on."""
        ...

    async def rejoin(self, version: PolicyVersion) -> None:
        """Bring replicas that are out of service to the version that the others serve."""

    async def renew(self) -> None:
        """None is left: end those that are out of service, so that they are started again."""

    async def someone_to_join(self) -> None:
        """Wait until a replica was started again, and not told of before."""

    def routable(self) -> list[str]: ...


@dataclass(frozen=True)
class Progress:
    """Where the run stands. ``trained``: groups in the weights; ``trained_at_publish``: as many as there were when
    ``version``'s number was published. ``last``: no step follows. ``stopped``: why training ended before it."""

    step: int = 0
    version: PolicyVersion = PolicyVersion(0, 0)
    trained: int = 0
    trained_at_publish: int = 0
    last: bool = False
    stopped: str | None = None


class Hooks(Protocol):
    """What the run does beside training."""

    async def on_step(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """A step is in the weights; its metrics hold those of the sync before it. The next step goes on meanwhile."""

    async def before_sync(self, progress: Progress) -> None:
        """``progress.version`` is about to be synced; the sync waits for the answer."""

    async def on_version(self, progress: Progress) -> None:
        """All replicas serve ``progress.version``, no group has started under it yet; training waits for the answer."""

    async def on_restore(self, progress: Progress) -> None:
        """The weights are those of a checkpoint again; no version of the new lineage is published yet."""

    async def on_end(self, progress: Progress, queue: Mapping[str, float]) -> None:
        """Nothing more will be trained; ``queue`` is the final balance."""

    def newest(self, metric: str) -> float | None:
        """The value of a metric that was reported last."""
        ...


class TrainLoop:
    """One per run, in the driver. ``begin()``, then ``run()`` to the end; ``stop(reason)`` ends it after the step under
    way. ``journal_copy``: where each checkpoint copies the queue's journal to, if its disk is another one."""

    def __init__(
        self,
        config: Config,
        derived: Derived,
        queue: QueueClient,
        ranks: Ranks,
        sync: Sync,
        hooks: Hooks,
        recorder: Recorder,
        checkpoints: CheckpointStore,
        journal_copy: Path | None = None,
    ) -> None:
        self._config, self._derived = config, derived
        self._queue, self._ranks, self._sync, self._hooks = queue, ranks, sync, hooks
        self._recorder = recorder
        self._checkpoints, self._journal_copy = checkpoints, journal_copy
        self._stop = asyncio.Event()
        self._progress = Progress()
        self._newest_save = (-1, False)  # of which step, and whether as the last one
        self._saving: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._changing: asyncio.Task[None] | None = None
        self._served = False  # whether a version was published since the start or the last restore
        self._sync_metrics: Mapping[str, float] = {}  # of the last sync, until they are reported

    def stop(self, reason: str) -> None:
        if not self._stop.is_set():
            self._progress = replace(self._progress, stopped=reason)
        self._stop.set()

    async def begin(self, checkpoint: Checkpoint | None) -> None:
        """Place ranks and queue at a checkpoint, or at the start: before anything is rolled out."""
        if checkpoint is not None:
            await self._ranks.load(checkpoint.path / "state")
        cut = checkpoint.cut if checkpoint is not None else Cut(0, PolicyVersion(0, 0), 0, 0, {})
        before = await self._queue.rollback(cut.step)
        # a version that was synced, but not published yet, is not used again either
        lineage = max(before.lineage, self._progress.version.lineage) + 1 if before is not None else 0
        of_version = cut.trained - cut.trained_at_publish
        # within a version, steps and versions must be of the size that they had: else it begins anew, which is younger
        within = of_version < self._derived.groups_per_version and of_version % self._derived.groups_per_step == 0
        self._progress = Progress(
            cut.step,
            PolicyVersion(lineage, cut.version.number),
            cut.trained,
            cut.trained_at_publish if within else cut.trained,
            stopped=self._progress.stopped,
        )
        if lineage:
            now = self._progress.version
            log.info("back at step %d: the weights are those of version %s, now %s", cut.step, cut.version, now)
        self._newest_save = (cut.step if checkpoint is not None else -1, False)
        self._served = False

    async def run(self) -> Progress:
        """Sync the first version, train up to ``trainer.total_steps``, save, sync the final weights. When ranks die, go
        back to the last checkpoint with new ones.

        Raises what any part raised. Stopped by `stop` it saves and returns; when the prompts end, it also syncs."""
        why: str | None = None
        while True:
            if why is not None:
                await self._replace_ranks(why)
            try:
                if why is not None:
                    await self._restore()
                return await self._train()
            except Exception as e:
                if (why := await self._ranks.lost(e)) is None:
                    raise
            finally:
                if self._changing is not None:
                    await cancelled([self._changing])
                    self._changing = None

    async def _train(self) -> Progress:
        total, every = self._config.trainer.total_steps, self._config.checkpoint.every_steps
        await self._publish()
        prompts_ended = False
        while self._progress.step < total:
            step = self._progress.step + 1
            lease, payload = await self._lease(step)
            if not lease.groups:
                prompts_ended = not self._stop.is_set()
                if prompts_ended:
                    self._progress = replace(self._progress, stopped=lease.closed)
                break
            metrics = self._batch_metrics(step, lease)
            metrics |= await self._ranks.train(step, payload, lease.mask_before)
            metrics, self._sync_metrics = {**metrics, **self._sync_metrics}, {}
            await self._queue.trained(step)
            self._progress = replace(self._progress, step=step, trained=self._progress.trained + len(lease.groups))
            log.debug("step %d is trained", step, extra=metrics)
            await self._report(metrics)
            if self._saving is not None and self._saving.done():
                await self._saved()
            if self._version_is_full and step < total:
                self._next_version()
                await self._publish()
            if every and step % every == 0 and step < total:
                await self._save()
        await self._save(last=True)
        done = self._progress.step >= total
        if done or prompts_ended:
            self._progress = replace(self._progress, last=True)
            self._next_version()
            await self._publish()
        if self._reporting is not None:
            await self._reporting
        await self._hooks.on_end(self._progress, await self._queue.finish())
        return self._progress if not done else replace(self._progress, stopped=None)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    async def _save(self, last: bool = False) -> None:
        """A checkpoint of this step. Training waits while the state is copied and while a Hugging Face folder is
        exported; the rest goes on beside it, unless it is the ``last`` or asynchronous saving is off."""
        await self._saved()
        options, progress = self._config.checkpoint, self._progress
        if self._newest_save >= (progress.step, last):
            return
        best = self._hooks.newest(options.best_metric)
        cut = Cut(
            progress.step,
            progress.version,
            progress.trained,
            progress.trained_at_publish,
            {} if best is None else {options.best_metric: best},
        )
        with self._recorder.span("trainer/checkpoint_wait", step=progress.step):
            partial = self._checkpoints.begin(progress.step)
            await self._ranks.stage()
            if options.export_hf == "all" or (options.export_hf == "final" and last):
                await self._ranks.export_hf(partial / "hf")
            self._saving = asyncio.create_task(self._write(partial, cut, last))
            self._newest_save = (progress.step, last)
            if last or not options.asynchronous:
                await self._saved()

    async def _write(self, partial: Path, cut: Cut, last: bool) -> None:
        with self._recorder.span("trainer/checkpoint_write", step=cut.step):
            await self._ranks.write(partial / "state")
            if self._journal_copy is not None:  # before the checkpoint is one: it must not be newer than its ledger
                await self._queue.copy_to(self._journal_copy)
            checkpoint = await asyncio.to_thread(self._checkpoints.complete, partial, cut)
            if last:
                self._checkpoints.mark_final(checkpoint)
        log.info("checkpoint of step %d written to %s", cut.step, checkpoint.path)
        restorable = self._checkpoints.all()[-(1 if last else RESTORABLE) :]
        await self._queue.covered(min(c.cut.step for c in restorable))

    async def _saved(self) -> None:
        """Wait for the checkpoint that is being written; raise what went wrong with it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def _replace_ranks(self, why: str) -> None:
        """New ranks, after all that was under way with the old ones. Raises if there were too many restarts."""
        saving, reporting = self._saving, self._reporting
        self._saving = self._reporting = None
        if saving is not None:  # it fails with the ranks, or becomes the checkpoint to go back to
            await asyncio.wait([saving])
            if not saving.cancelled() and (problem := saving.exception()) is not None:
                log.warning("the checkpoint that was being written is lost: %s", problem)
        await cancelled([task for task in (saving, reporting) if task is not None])
        await self._ranks.restart(why)

    async def _restore(self) -> None:
        """The last checkpoint, a new lineage."""
        newest = self._checkpoints.newest()
        await self.begin(self._checkpoints.open(newest.path) if newest is not None else None)
        await self._hooks.on_restore(self._progress)

    # -- versions --------------------------------------------------------------------------------------------------

    @property
    def _version_is_full(self) -> bool:
        """Whether all groups of this version are in the weights."""
        return self._progress.trained - self._progress.trained_at_publish >= self._derived.groups_per_version

    def _next_version(self) -> None:
        p = self._progress
        version = PolicyVersion(p.version.lineage, p.version.number + 1)
        self._progress = replace(p, version=version, trained_at_publish=p.trained)

    async def _publish(self) -> None:
        """Have all replicas serve the version, then let groups start under it; not, if stopped before they do.

        With a host copy of the weights (staging ``full``) training goes on as soon as they have left the ranks; but not
        at the first and the last version, or after a restore. The next one waits until all replicas serve this one."""
        await self._changed()
        await self._beside_joins(self._hooks.before_sync(self._progress), self._nobody_serves)
        sent = asyncio.Event()
        if self._config.param_sync.staging == "full" and self._served and not self._progress.last:
            self._changing = asyncio.create_task(self._change_over(self._progress, sent))
            await self._first_of(sent.wait(), beside=self._changing)
            if not sent.is_set():
                await self._changed()
            return
        if (metrics := await self._synced(self._progress.version, sent.set)) is None:
            return
        self._sync_metrics = metrics
        log.debug("version %s is served", self._progress.version, extra=dict(metrics))
        await self._beside_joins(self._hooks.on_version(self._progress), self._rejoin)
        # nothing starts under the last version: what is left may be trained by a run that resumes this one
        if not self._progress.last:
            await self._queue.publish(self._progress.version, self._progress.trained_at_publish)
        self._served = True

    async def _change_over(self, progress: Progress, sent: asyncio.Event) -> None:
        """Move the replicas to a version while training goes on. Until the last one has it, groups count as started
        under the version before."""
        weights_sent = asyncio.Event()
        syncing = asyncio.create_task(self._synced(progress.version, weights_sent.set))
        try:
            await self._first_of(weights_sent.wait(), beside=syncing)
            if weights_sent.is_set():
                await self._queue.publish(progress.version, progress.trained_at_publish, rolling=True)
                sent.set()
            if (metrics := await syncing) is not None:
                self._sync_metrics = metrics
                log.debug("version %s is served", progress.version, extra=dict(metrics))
                await self._queue.retire_before(progress.version)
                await self._hooks.on_version(progress)
        finally:
            await cancelled([syncing])

    async def _change_is_over(self) -> None:
        if self._changing is not None:
            await asyncio.wait([self._changing])

    async def _changed(self) -> None:
        """Wait for the replicas that change over; raise what went wrong."""
        changing, self._changing = self._changing, None
        if changing is not None:
            await changing

    async def _nobody_serves(self) -> bool:
        """Whether all that is held up waits for a replica which only the next sync can bring back."""
        return not self._sync.routable()

    async def _synced(self, version: PolicyVersion, on_sent: Callable[[], None]) -> Mapping[str, float] | None:
        """Sync the version; None if stopped while no replica lives. A session that fails for want of replicas is run
        again when there is one: the weights, and so the version, are the same."""
        while True:
            try:
                return await self._sync(version, on_sent)
            except SyncError as e:
                if e.who != ALL_REPLICAS or await self._ranks.lost(e) is not None:
                    raise
                log.warning("%s; it is run again with new ones", e)
            await self._sync.renew()
            await self._first_of(self._sync.someone_to_join(), self._stop.wait())
            if self._stop.is_set():
                return None

    async def _rejoin(self) -> bool:
        """Give replicas that came back the weights, so that they need not wait for the next version; returns False.

        Weights that are ahead of the published version get a version of their own, of the same number in a new
        lineage; but only if nobody serves: others would have to change over for nothing."""
        if self._progress.trained == self._progress.trained_at_publish:
            await self._sync.rejoin(self._progress.version)
        elif not self._sync.routable():
            version = self._progress.version
            self._progress = replace(self._progress, version=version._replace(lineage=version.lineage + 1))
            await self._publish()
        return False

    # -- batches ---------------------------------------------------------------------------------------------------

    async def _lease(self, step: int) -> tuple[Lease, Any]:
        """The next batch; an empty one if `stop` came first or there will be none. Replicas join meanwhile."""
        with self._recorder.span("trainer/wait_for_batch", step=step):
            leasing = self._queue.lease(step, self._derived.groups_per_step, now_s())
            found = await self._beside_joins(leasing, self._rejoin)
        if found is None:
            await self._queue.release(step)  # it may have been granted at the same moment
            return Lease(()), None
        return found

    async def _report(self, metrics: Mapping[str, float]) -> None:
        """Report the step while the next one goes on, one step at a time."""
        if self._reporting is not None:
            await self._reporting
        self._reporting = asyncio.create_task(self._hooks.on_step(self._progress, metrics))
        await asyncio.sleep(0)  # its first calls leave before the next step's

    async def _beside_joins(self, work: Awaitable[T], joined: Callable[[], Awaitable[bool]]) -> T | None:
        """The result of ``work``; None if `stop` comes first, or came before. Whenever a replica came back meanwhile,
        ``joined`` sees to it, after a change-over that is going on; if it returns True, the work is given up."""
        working = asyncio.ensure_future(work)
        try:
            while not working.done() and not self._stop.is_set():
                if self._changing is not None:
                    await self._first_of(self._change_is_over(), self._stop.wait(), beside=working)
                    if self._changing.done():
                        await self._changed()
                    continue
                await self._first_of(self._sync.someone_to_join(), self._stop.wait(), beside=working)
                if not working.done() and not self._stop.is_set() and await joined():
                    break
            return working.result() if working.done() and not self._stop.is_set() else None
        finally:
            await cancelled([working])

    @staticmethod
    async def _first_of(*waits: Coroutine[Any, Any, Any], beside: asyncio.Future[Any] | None = None) -> None:
        """Until one of ``waits``, or ``beside``, is over; the waits are given up then, ``beside`` goes on."""
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait([*tasks, *([beside] if beside is not None else [])], return_when="FIRST_COMPLETED")
        finally:
            await cancelled(tasks)

    def _batch_metrics(self, step: int, lease: Lease) -> dict[str, float]:
        """Figures of the groups of a lease; raises StalenessError if one of its tokens is older than the bound."""
        now, bound = self._progress.version, self._derived.staleness_bound
        oldest_trained = lease.mask_before if lease.mask_before is not None else 0
        # numbers are places in training, whatever the lineage; a token of an abandoned future is not stale
        ages = np.array([max(0, now.number - max(g.oldest.number, oldest_trained)) for g in lease.groups])
        if ages.max() > bound:
            group = lease.groups[int(ages.argmax())]
            raise StalenessError(
                f"step {step}: group {group.uid} holds tokens of version {group.oldest}, the trainer is at {now}; "
                f"the bound is {bound} versions"
            )
        processing_s = np.array([g.processing_s for g in lease.groups])
        return {
            "fully_async/staleness/mean": float(ages.mean()),
            "fully_async/staleness/max": int(ages.max()),
            "fully_async/staleness/bound": bound,
            **{f"fully_async/staleness/groups_{age}": int((ages == age).sum()) for age in range(bound + 1)},
            "fully_async/processing_time/avg": float(processing_s.mean()),
            **{f"fully_async/processing_time/p{p}": float(np.percentile(processing_s, p)) for p in (50, 95, 99)},
            "fully_async/processing_time/max": float(processing_s.max()),
            "fully_async/in_queue_s": float(np.mean([g.in_queue_s for g in lease.groups])),
        }
