"""The training loop: take a batch, train on it, publish new weights every few steps.

queue ──lease──► ranks.train ──trained──► every trigger_parameter_sync_step steps: sync, publish
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from asyncrl.config.checks import Derived
from asyncrl.config.schema import Config
from asyncrl.sample import PolicyVersion
from asyncrl.sample_queue.core import Leased, QueueClosed
from asyncrl.telemetry.recorder import Recorder, now_s


class StalenessError(RuntimeError):
    """A batch holds a token older than the bound: admission or queue is broken, and the run must not train on it."""


class QueueClient(Protocol):
    """The trainer's side of the sample queue. What ``lease`` gives as payload goes to `Ranks.train` unread."""

    async def lease(self, step: int, count: int, now_s: float) -> tuple[list[Leased], Any]: ...
    async def trained(self, step: int) -> None: ...
    async def release(self, step: int) -> None: ...
    async def publish(self, version: PolicyVersion) -> dict[str, int]: ...


class Ranks(Protocol):
    """All trainer ranks at once."""

    async def train(self, step: int, payload: Any) -> dict[str, float]: ...
    async def save(self, path: Path) -> None: ...
    async def export_hf(self, path: Path) -> None: ...


#: moves all replicas to a version, returns metrics of the session
Sync = Callable[[PolicyVersion], Awaitable[Mapping[str, float]]]


@dataclass
class Progress:
    """Where the run stands: kept by the loop, read by whoever reports."""

    step: int = 0
    version: PolicyVersion = PolicyVersion(0, 0)
    stopped: str | None = None  # why training ended early


class Hooks(Protocol):
    """What the run does beside training, which waits for it."""

    async def on_step(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """A step is in the weights; its metrics hold those of the sync before it."""

    async def on_version(self, progress: Progress) -> None:
        """All replicas serve ``progress.version``; no group has started under it yet."""


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
        self._run_dir = run_dir
        self._stop = asyncio.Event()
        self._reason = ""
        self.progress = Progress()

    def stop(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._stop.set()

    async def run(self) -> Progress:
        """Sync version 0, train ``trainer.total_steps`` steps, save. Raises what any part raised."""
        trigger, total = self._config.async_training.trigger_parameter_sync_step, self._config.trainer.total_steps
        every = self._config.checkpoint.every_steps
        sync_metrics = await self._publish()
        for step in range(1, total + 1):
            batch = await self._lease(step)
            if batch is None:
                self.progress.stopped = self._reason
                break
            leased, payload = batch
            metrics = {**self._staleness(step, leased), **sync_metrics, **await self._ranks.train(step, payload)}
            await self._queue.trained(step)
            self.progress.step = step
            await self._hooks.on_step(self.progress, metrics)
            sync_metrics = {}
            if step % trigger == 0 or step == total:
                self.progress.version = self.progress.version._replace(number=self.progress.version.number + 1)
                sync_metrics = await self._publish()
            if every and step % every == 0 and step < total:
                await self.save(f"step_{step:06d}")
        await self.save("final" if self.progress.step == total else f"step_{self.progress.step:06d}")
        return self.progress

    async def save(self, name: str) -> Path:
        """Weights, optimizer and schedule under ``checkpoints/name``, and a Hugging Face folder beside them."""
        path = self._run_dir / "checkpoints" / name
        with self._recorder.span("trainer/checkpoint", step=self.progress.step):
            await self._ranks.save(path / "state")
            if self._config.checkpoint.export_hf:
                await self._ranks.export_hf(path / "hf")
        return path

    async def _publish(self) -> Mapping[str, float]:
        metrics = await self._sync(self.progress.version)
        await self._hooks.on_version(self.progress)
        await self._queue.publish(self.progress.version)
        return metrics

    async def _lease(self, step: int) -> tuple[list[Leased], Any] | None:
        """The next batch, or None if `stop` came first or there will be none."""
        with self._recorder.span("trainer/wait_for_batch", step=step):
            lease = asyncio.ensure_future(self._queue.lease(step, self._derived.groups_per_step, now_s()))
            stop = asyncio.ensure_future(self._stop.wait())
            try:
                await asyncio.wait([lease, stop], return_when=asyncio.FIRST_COMPLETED)
                if self._stop.is_set():
                    return None
                return await lease
            except QueueClosed as e:
                self.stop(str(e))
                return None
            finally:
                lease.cancel()
                stop.cancel()

    def _staleness(self, step: int, leased: Sequence[Leased]) -> dict[str, float]:
        now = self.progress.version
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
