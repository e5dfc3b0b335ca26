"""The training loop: take a batch, train on it, publish new weights every few steps.

queue ──lease──► ranks.train ──trained──► every trigger_parameter_sync_step steps: sync, publish
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from asyncrl.config.checks import Derived
from asyncrl.config.schema import Config
from asyncrl.sample import PolicyVersion
from asyncrl.sample_queue.core import Lease, LeasedGroup
from asyncrl.telemetry.recorder import Recorder, now_s

PARTIAL = ".partial"  # ends the name of a checkpoint that is not whole


class StalenessError(RuntimeError):
    """A batch holds a token older than the bound: admission or queue is broken, and the run must not train on it."""


class QueueClient(Protocol):
    """The trainer's side of the sample queue. What ``lease`` gives as payload goes to `Ranks.train` unread."""

    async def lease(self, step: int, count: int, now_s: float) -> tuple[Lease, Any]: ...
    async def trained(self, step: int) -> None: ...
    async def covered(self, step: int) -> None: ...
    async def release(self, step: int) -> None: ...
    async def publish(self, version: PolicyVersion) -> dict[str, int]: ...
    async def finish(self) -> dict[str, float]: ...


class Ranks(Protocol):
    """All trainer ranks at once."""

    async def train(self, step: int, payload: Any) -> dict[str, float]: ...
    async def save(self, path: Path) -> None: ...
    async def export_hf(self, path: Path) -> None: ...


#: moves all replicas to a version, returns metrics of the session
Sync = Callable[[PolicyVersion], Awaitable[Mapping[str, float]]]


@dataclass(frozen=True)
class Progress:
    """Where the run stands. ``last``: no step follows. ``stopped``: why training ended before its last step."""

    step: int = 0
    version: PolicyVersion = PolicyVersion(0, 0)
    last: bool = False
    stopped: str | None = None


class Hooks(Protocol):
    """What the run does beside training."""

    async def on_step(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """A step is in the weights; its metrics hold those of the sync before it. The next step goes on meanwhile."""

    async def on_version(self, progress: Progress) -> None:
        """All replicas serve ``progress.version``, no group has started under it yet; training waits for the answer."""

    async def on_end(self, progress: Progress, queue: Mapping[str, float]) -> None:
        """Nothing more will be trained; ``queue`` is the final balance."""


class TrainLoop:
    """One per run, in the driver. ``run()`` to the end; ``stop(reason)`` ends it after the step under way."""

    def __init__(
        self,
        config: Config,
        derived: Derived,
        queue: QueueClient,
        ranks: Ranks,
        sync: Sync,
        hooks: Hooks,
        recorder: Recorder,
        run_dir: Path,
    ) -> None:
        self._config, self._derived = config, derived
        self._queue, self._ranks, self._sync, self._hooks = queue, ranks, sync, hooks
        self._recorder = recorder
        self._checkpoints = run_dir / "checkpoints"
        self._stop = asyncio.Event()
        self._progress = Progress()
        self._reporting: asyncio.Task[None] | None = None

    def stop(self, reason: str) -> None:
        if not self._stop.is_set():
            self._progress = replace(self._progress, stopped=reason)
        self._stop.set()

    async def run(self) -> Progress:
        """Sync version 0, train ``trainer.total_steps`` steps, save, sync the final weights.

        Raises what any part raised. Stopped by `stop` it saves and returns; when the prompts end, it also syncs."""
        trigger, total = self._config.async_training.trigger_parameter_sync_step, self._config.trainer.total_steps
        every = self._config.checkpoint.every_steps
        sync_metrics = await self._publish()
        prompts_ended = False
        for step in range(1, total + 1):
            lease, payload = await self._lease(step)
            if not lease.groups:
                prompts_ended = not self._stop.is_set()
                if prompts_ended:
                    self._progress = replace(self._progress, stopped=lease.closed)
                break
            metrics = {**self._staleness(step, lease.groups), **sync_metrics, **await self._ranks.train(step, payload)}
            await self._queue.trained(step)
            self._progress = replace(self._progress, step=step)
            await self._report(metrics)
            sync_metrics = {}
            if step % trigger == 0 and step < total:
                self._next_version()
                sync_metrics = await self._publish()
            if every and step % every == 0 and step < total:
                await self.save(f"step_{step:06d}")
        done = self._progress.step == total
        await self.save("final" if done else f"step_{self._progress.step:06d}")
        if done or prompts_ended:
            self._progress = replace(self._progress, last=True)
            self._next_version()
            await self._publish()
        if self._reporting is not None:
            await self._reporting
        await self._hooks.on_end(self._progress, await self._queue.finish())
        return self._progress if not done else replace(self._progress, stopped=None)

    async def save(self, name: str) -> Path:
        """Weights, optimizer and schedule under ``checkpoints/name``, with a Hugging Face folder if the config asks for
        one. Until it is whole it has another name."""
        path, partial = self._checkpoints / name, self._checkpoints / f"{name}{PARTIAL}"
        with self._recorder.span("trainer/checkpoint", step=self._progress.step):
            await self._ranks.save(partial / "state")
            if self._config.checkpoint.export_hf != "none":
                await self._ranks.export_hf(partial / "hf")
            partial.rename(path)
        if self._progress.step:
            await self._queue.covered(self._progress.step)
        return path

    def _next_version(self) -> None:
        version = self._progress.version
        self._progress = replace(self._progress, version=version._replace(number=version.number + 1))

    async def _publish(self) -> Mapping[str, float]:
        metrics = await self._sync(self._progress.version)
        await self._unless_stopped(self._hooks.on_version(self._progress))
        await self._queue.publish(self._progress.version)
        return metrics

    async def _lease(self, step: int) -> tuple[Lease, Any]:
        """The next batch; an empty one if `stop` came first or there will be none."""
        with self._recorder.span("trainer/wait_for_batch", step=step):
            found = await self._unless_stopped(self._queue.lease(step, self._derived.groups_per_step, now_s()))
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

    async def _unless_stopped(self, work: Awaitable[Any]) -> Any:
        """The result of ``work``, or None if `stop` comes first (or came before)."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            return None if self._stop.is_set() else working.result()
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.wait([working, stopping])

    def _staleness(self, step: int, leased: Sequence[LeasedGroup]) -> dict[str, float]:
        now = self._progress.version
        ages = [now.number - g.oldest.number for g in leased]
        bound = self._derived.staleness_bound
        for group, age in zip(leased, ages):
            if group.oldest.lineage != now.lineage or age > bound:
                raise StalenessError(
                    f"step {step}: group {group.uid} holds tokens of version {group.oldest}, the trainer is at {now}; "
                    f"the bound is {bound} versions"
                )
        return {
            "fully_async/staleness/mean": sum(ages) / len(ages),
            "fully_async/staleness/max": max(ages),
            "fully_async/staleness/bound": bound,
            "fully_async/in_queue_s": sum(g.in_queue_s for g in leased) / len(leased),
        }
