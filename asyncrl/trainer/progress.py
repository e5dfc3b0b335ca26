"""Position of the run in training, and requests to stop it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncrl.types.groups import groups_digest
from asyncrl.types.versions import PolicyVersion


@dataclass(frozen=True)
class Progress:
    """Position in training at one moment. ``trained``: groups in the weights; ``trained_at_publish``: the same when
    ``version``'s number was published. ``groups_digest``: `asyncrl.types.groups.groups_digest` of those in the weights.
    ``last``: no step follows. ``stopped``: why training ended early."""

    step: int = 0
    version: PolicyVersion = PolicyVersion(0, 0)
    trained: int = 0
    trained_at_publish: int = 0
    groups_digest: int = 0
    last: bool = False
    stopped: str | None = None

    @property
    def taken(self) -> tuple[int, int]:
        """`asyncrl.trainer.checkpoints.Checkpoint.taken` of a checkpoint saved now: identifies its weights."""
        return self.version.lineage, self.step

    @property
    def trained_since_publish(self) -> int:
        """Groups in the weights that the published version lacks."""
        return self.trained - self.trained_at_publish


class TrainingState:
    """The run's current `Progress` and its stop request, shared by the training loop, its publisher and its saver.
    ``starved_s``: seconds for which this process has waited for groups."""

    def __init__(self) -> None:
        self.progress, self.starved_s = Progress(), 0.0
        self.stopping = asyncio.Event()

    def stop(self, reason: str) -> None:
        """Request the end of training after the current step; the first reason is kept."""
        if not self.stopping.is_set():
            self.progress = replace(self.progress, stopped=reason)
        self.stopping.set()

    def step_done(self, step: int, uids: Sequence[str]) -> None:
        p = self.progress
        digest = groups_digest(uids, p.groups_digest)
        self.progress = replace(p, step=step, trained=p.trained + len(uids), groups_digest=digest)

    def next_version(self) -> None:
        """The weights become the next version."""
        p = self.progress
        version = PolicyVersion(p.version.lineage, p.version.number + 1)
        self.progress = replace(p, version=version, trained_at_publish=p.trained)

    def next_lineage(self) -> None:
        """The weights become the same version number of a new lineage."""
        version = self.progress.version
        self.progress = replace(self.progress, version=version._replace(lineage=version.lineage + 1))
