"""The training loop: lease → train → sync → validate → publish → save; back to the last checkpoint when ranks die.

queue ──lease──► ranks.train ──► every trigger_parameter_sync_step steps: sync → validate → publish
  ▲                   │    └───► every checkpoint.every_steps steps: save
  │                   │ a rank died
  └──── rollback ─────┴── new ranks, last checkpoint, new lineage
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config.checks import Derived
from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.processes.tasks import cancelled
from asyncrl.sample_queue.messages import Lease, LeasedGroup
from asyncrl.trainer.checkpoint_saver import CheckpointSaver
from asyncrl.trainer.checkpoints import Checkpoint, CheckpointMetadata, CheckpointStore
from asyncrl.trainer.mismatch import MismatchAlarm, by_staleness
from asyncrl.trainer.progress import Progress, TrainingState
from asyncrl.trainer.protocols import Observer, QueueClient, Ranks, Rollouter, Sync, Validation
from asyncrl.trainer.publisher import Publisher
from asyncrl.trainer.staleness import batch_metrics, check_ages
from asyncrl.types.versions import PolicyVersion

T = TypeVar("T")

log = logging.getLogger(__name__)


class NoNewStep(RuntimeError):
    """Ranks die again and again before they have trained a step: its groups may be the cause."""

    def __init__(self, why: str, max_restarts: int, step: int, uids: Sequence[str]) -> None:
        advice = f"; it trained on groups {', '.join(uids)}: if one is the cause, add --skip UID" if uids else ""
        count = f"death {max_restarts + 1} without a new step, in step {step}"
        super().__init__(f"{why}; that was {count} (supervision.max_restarts is {max_restarts}){advice}")


class TrainLoop:
    """One per run, in the driver. ``begin()``, then ``run()`` to the end; ``stop(reason)`` ends it after the current
    step, or at once if that still waits for groups. ``journal_copy``: see `CheckpointSaver`."""

    def __init__(
        self,
        config: Config,
        derived: Derived,
        queue: QueueClient,
        ranks: Ranks,
        sync: Sync,
        rollouter: Rollouter,
        validation: Validation,
        observer: Observer,
        recorder: Recorder,
        checkpoints: CheckpointStore,
        journal_copy: Path | None = None,
    ) -> None:
        self._config, self._derived = config, derived
        self._queue, self._ranks, self._rollouter = queue, ranks, rollouter
        self._observer, self._recorder, self._checkpoints = observer, recorder, checkpoints
        self._state = TrainingState()
        overlapped = config.param_sync.staging == "full"
        self._publisher = Publisher(self._state, queue, ranks, sync, validation, observer, overlapped)
        self._saver = CheckpointSaver(config.checkpoint, ranks, queue, checkpoints, recorder, journal_copy)
        self._reporting: asyncio.Task[None] | None = None
        supervision = config.supervision
        self._mismatch = MismatchAlarm(supervision.mismatch_warn, supervision.mismatch_stop)
        self._training: list[str] = []  # uids of the groups of the step in progress

    def stop(self, reason: str) -> None:
        self._state.stop(reason)

    async def begin(self, checkpoint: Checkpoint | None, skip: Sequence[str] = ()) -> None:
        """Set ranks and queue to a checkpoint, or to the start, before any rollout; drop the groups ``skip``."""
        await self._with_ranks(lambda: self._go_to(checkpoint), lambda: self._go_to(checkpoint))
        if skip:
            await self._queue.skip(skip)

    async def run(self) -> Progress:
        """Publish the first version, train up to ``trainer.total_steps``, save, publish the final weights. When ranks
        die, restore the last checkpoint with new ones.

        Propagates the exceptions of all parts. After `stop` saves and returns; when the prompts end also publishes."""
        if self._config.optimizer_steps == 1 and self._config.algorithm.anchor == "proximal":
            log.warning(
                "algorithm: a batch takes one optimizer step, in which the ratio to the proximal policy is 1: the "
                "surrogate's bounds have no effect. Expected algorithm.anchor=behaviour, or more steps per batch"
            )

        async def train_again() -> Progress:
            await self._restore()
            return await self._train()

        return await self._with_ranks(self._train, train_again)

    async def _train(self) -> Progress:
        state, total = self._state, self._config.trainer.total_steps
        await self._publisher.publish()
        prompts_ended = False
        while state.progress.step < total:
            step = state.progress.step + 1
            if (ended := await self._train_step(step)) is not None:
                prompts_ended = not state.stopping.is_set()
                if prompts_ended:
                    state.progress = replace(state.progress, stopped=ended.closed)
                break
            await self._saver.check()
            # nobody would generate under a version that begins after a stop, and the checkpoint may be in a hurry
            if self._version_is_full and step < total and not state.stopping.is_set():
                state.next_version()
                await self._publisher.publish()
            if self._save_is_due and step < total:
                await self._saver.save(state.progress)
        done = state.progress.step >= total
        state.progress = replace(state.progress, last=done or prompts_ended)
        await self._saver.save(state.progress, last=True)
        if state.progress.last:
            state.next_version()
            await self._publisher.publish()
        if self._reporting is not None:
            await self._reporting
        await self._observer.on_end(state.progress, await self._queue.finish())
        return state.progress if not done else replace(state.progress, stopped=None)

    # -- a step ----------------------------------------------------------------------------------------------------

    async def _train_step(self, step: int) -> Lease | None:
        """Train on the next batch, on each part of it as soon as its groups are finished. Returns an empty lease if
        `stop` came first or the prompts ended. Raises StalenessError and MismatchError."""
        parts, bound, groups = self._derived.parts, self._derived.staleness_bound, list[LeasedGroup]()
        self._training = []
        ahead: asyncio.Future[tuple[Lease, Any]] | None = None  # the lease of the next part, while this one trains
        try:
            for part, count in enumerate(parts):
                lease, payload = await self._lease(step, count, ahead)
                if not lease.groups:
                    await self._queue.release(step)  # the lease may have been granted at the moment of the stop
                    return lease
                progress = self._state.progress
                groups += lease.groups
                self._training = [group.uid for group in groups]
                check_ages(step, lease, progress.version, bound)
                if part + 1 < len(parts):
                    ahead = asyncio.ensure_future(self._queue.lease(step, parts[part + 1], self._training))
                version = progress.version.number + progress.trained_since_publish / self._derived.groups_per_version
                train = self._ranks.train(step, payload, lease.mask_before, version, part, len(parts))
                trained, sampler_kl = await train
        finally:
            await cancelled([ahead] if ahead is not None else [])
        metrics = batch_metrics(replace(lease, groups=tuple(groups)), progress.version, bound)
        metrics |= trained | by_staleness(sampler_kl, progress.version)
        fresh = progress.trained_since_publish == 0
        metrics |= self._mismatch.observe(step, sampler_kl, progress.version, fresh)
        metrics |= self._publisher.take_sync_metrics()
        await self._queue.trained(step)
        self._state.step_done(step, self._training)
        self._training = []
        log.debug("step %d is trained", step, extra=metrics)
        await self._report(metrics)
        self._mismatch.check()
        return None

    async def _lease(self, step: int, count: int, ahead: asyncio.Future[tuple[Lease, Any]] | None) -> tuple[Lease, Any]:
        """The next part of the step's batch, by the lease ``ahead`` if there is one; an empty lease if `stop` came
        first or the prompts ended. Replicas rejoin meanwhile."""
        since_s = now_s()
        with self._recorder.span("trainer/wait_for_batch", step=step):
            if ahead is not None and ahead.done():  # also after a stop, which ends a step that need not wait
                return ahead.result()
            leasing = ahead or self._queue.lease(step, count, self._training)
            found = await self._publisher.while_replicas_join(leasing)
        if found is None:
            return Lease(()), None
        # the queue may have waited while the ranks trained, and this process for more than groups
        self._state.starved_s += min(found[0].waited_s, now_s() - since_s)
        return found

    async def _report(self, metrics: Mapping[str, float]) -> None:
        """Report the step while the next one runs, one step at a time."""
        if self._reporting is not None:
            await self._reporting
        self._reporting = asyncio.create_task(self._observe(self._state.progress, metrics))
        await asyncio.sleep(0)  # lets its first calls go out before the next step's

    async def _observe(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        await self._saver.rate(progress, await self._observer.on_step(progress, metrics))

    @property
    def _version_is_full(self) -> bool:
        """True if all groups of this version are in the weights."""
        return self._state.progress.trained_since_publish >= self._derived.groups_per_version

    @property
    def _save_is_due(self) -> bool:
        every = self._config.checkpoint.every_steps
        return bool(every) and self._state.progress.step % every == 0

    # -- restores --------------------------------------------------------------------------------------------------

    async def _with_ranks(self, work: Callable[[], Awaitable[T]], again: Callable[[], Awaitable[T]]) -> T:
        """Result of ``work``; whenever a rank dies, of ``again`` with new ranks. Raises after too many restarts, and
        NoNewStep after as many without a new step, however far apart."""
        furthest, restarts, most = self._state.progress.step, 0, self._config.supervision.max_restarts
        while True:
            try:
                return await work()
            except Exception as e:
                if (why := await self._ranks.lost(e)) is None:
                    raise
            finally:
                await self._publisher.cancel()
            step = self._state.progress.step
            furthest, restarts = (step, 1) if step > furthest else (furthest, restarts + 1)
            if restarts > most:
                raise NoNewStep(why, most, step + 1, self._training)
            await self._settle()
            await self._ranks.restart(why)
            work = again

    async def _settle(self) -> None:
        """End everything that still runs on the old ranks."""
        reporting, self._reporting = self._reporting, None
        await self._saver.settle()
        await cancelled([reporting] if reporting is not None else [])

    async def _restore(self) -> None:
        """Restore the last checkpoint in a new lineage."""
        checkpoint = await asyncio.to_thread(self._checkpoints.newest_intact)
        await self._go_to(checkpoint)
        # only now: where the queue cannot go back so far, the run ends, and may be resumed from a later one
        await asyncio.to_thread(self._checkpoints.abandon_after, checkpoint)
        await self._rollouter.reset()

    async def _go_to(self, checkpoint: Checkpoint | None) -> None:
        self._training = []  # a rank that dies from now on has trained none of them
        if checkpoint is not None:
            await self._ranks.load(checkpoint.path / "state")
        metadata = checkpoint.metadata if checkpoint is not None else CheckpointMetadata(0, PolicyVersion(0, 0), 0, 0)
        steps_left = max(0, self._config.trainer.total_steps - metadata.step)
        total_groups = metadata.trained + steps_left * self._derived.groups_per_step
        newest = await self._queue.rollback(metadata.step, total_groups)
        lineage = max(newest.lineage, metadata.version.lineage) + 1 if newest is not None else 0
        of_version = metadata.trained - metadata.trained_at_publish
        # a run that went on there would have begun the next version by now
        goes_on = of_version == self._derived.groups_per_version and metadata.step < self._config.trainer.total_steps
        # if the size of steps or versions changed, the version starts over, with newer weights under its number
        within = of_version < self._derived.groups_per_version and of_version % self._derived.groups_per_step == 0
        self._state.progress = Progress(
            metadata.step,
            PolicyVersion(lineage, metadata.version.number + goes_on),
            metadata.trained,
            metadata.trained_at_publish if within else metadata.trained,
            metadata.groups_digest,
            stopped=self._state.progress.stopped,
        )
        if lineage:
            before, now = metadata.version, self._state.progress.version
            log.info("back at step %d: the weights of version %s are now version %s", metadata.step, before, now)
        self._mismatch.restored()
        self._saver.restored(metadata.step if checkpoint is not None else None)
        self._publisher.restored()
