"""Interfaces of everything that the training loop drives: queue, ranks, parameter sync, rollouter, validation,
observer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.sample_queue.messages import Lease
from asyncrl.trainer.mismatch import SamplerKL
from asyncrl.trainer.progress import Progress
from asyncrl.types.versions import PolicyVersion


class QueueClient(Protocol):
    """The trainer's side of the sample queue. ``lease`` returns a payload that is passed to `Ranks.train` unread."""

    async def lease(self, step: int, count: int, having: Sequence[str] = ()) -> tuple[Lease, Any]: ...
    async def trained(self, step: int) -> None: ...
    async def covered(self, step: int) -> None: ...
    async def release(self, step: int) -> None: ...
    async def rollback(self, step: int, total_groups: int) -> PolicyVersion | None: ...
    async def skip(self, uids: Sequence[str]) -> None: ...
    async def announce(self, version: PolicyVersion) -> None: ...
    async def publish(
        self, version: PolicyVersion, trained: int | None = None, rolling: bool = False, starved_s: float = 0.0
    ) -> dict[str, int]: ...
    async def retire_before(self, version: PolicyVersion) -> None: ...
    async def copy_to(self, folder: Path) -> None: ...
    async def finish(self) -> dict[str, float]: ...


class Ranks(Protocol):
    """All trainer ranks at once. ``stage`` copies their state; ``write`` writes the copy while training continues."""

    async def train(
        self, step: int, payload: Any, mask_before: int | None, version: float, part: int = 0, parts: int = 1
    ) -> tuple[dict[str, float], Sequence[SamplerKL]]:
        """Train on a batch that comes in parts. With the last one: its metrics, and for each sampler the KL to the
        trainer's policy before the batch."""
        ...

    async def stage(self) -> None: ...
    async def write(self, path: Path) -> None: ...
    async def load(self, path: Path) -> None: ...
    async def export_hf(self, path: Path) -> None: ...

    async def lost(self, error: BaseException) -> str | None:
        """Why a rank is dead, or None if all live; asked after a call failed with ``error``."""

    async def restart(self, why: str) -> None:
        """Replace all ranks; the new ones hold the run's initial weights. Raises after too many restarts."""


class Sync(Protocol):
    """The parameter-sync group, see `asyncrl.param_sync.coordinator`."""

    async def __call__(self, version: PolicyVersion, on_sent: Callable[[], None]) -> Mapping[str, float]:
        """Move all replicas to a version; returns the session's metrics. Calls ``on_sent`` as soon as the ranks may
        continue training."""
        ...

    async def rejoin(self, version: PolicyVersion) -> None:
        """Bring out-of-service replicas to the version that the others serve. Raises SyncError if a rank fails."""

    async def renew(self) -> None:
        """End out-of-service replicas, so that the supervisor restarts them."""

    async def someone_to_join(self) -> None:
        """Wait until a replica needs a sync: one was restarted since the last session or `joiners_seen`, or one left
        and strands samples."""

    def joiners_seen(self) -> None:
        """Those that wait for a sync until now need not be reported again."""

    def stranded(self) -> bool: ...


class Rollouter(Protocol):
    """The rollout side of a restore."""

    async def reset(self) -> None:
        """Snapshot the in-flight groups and re-admit them under the restored version."""


class Validation(Protocol):
    """Validation of published versions, see `asyncrl.trainer.validation.ValidationSchedule`."""

    async def finished(self) -> None:
        """Wait, but not for long, until no validation is running, so that each sees one version."""

    async def validate(self, progress: Progress) -> None:
        """Validate ``progress.version`` if it is due. All replicas serve it; no group has started under it."""


class Observer(Protocol):
    """Reports the run; the metrics that it returns may rate checkpoints."""

    async def on_version(self, progress: Progress) -> None:
        """All replicas serve ``progress.version``, and it is validated if that was due."""

    async def on_step(self, progress: Progress, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """A step is in the weights; ``metrics`` includes those of the sync before it. Runs concurrently with the next
        step. Returns all metrics reported for the step."""
        ...

    async def on_end(self, progress: Progress, queue: Mapping[str, float]) -> None:
        """Training is over; ``queue`` is the final balance."""
