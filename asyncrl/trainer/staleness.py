"""Age of a batch: its metrics, and the check that no token is older than the bound."""

from __future__ import annotations

import numpy as np

from asyncrl.sample_queue.messages import Lease
from asyncrl.types.versions import PolicyVersion


class StalenessError(RuntimeError):
    """A batch holds a token older than the bound: admission or queue is broken, and the run must not train on it."""


def check_ages(step: int, lease: Lease, version: PolicyVersion, bound: int) -> None:
    """Raises StalenessError if a trained token is older than ``bound``, in versions. ``version``: the trainer's."""
    ages = _ages(lease, version)
    if ages.max() > bound:
        group = lease.groups[int(ages.argmax())]
        raise StalenessError(
            f"step {step}: group {group.uid} holds tokens of version {group.oldest}, the trainer is at {version}; "
            f"the bound is {bound} versions"
        )


def batch_metrics(lease: Lease, version: PolicyVersion, bound: int) -> dict[str, float]:
    """Ages, processing and queueing times of a lease's groups; arguments as in `check_ages`."""
    ages = _ages(lease, version)
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


def _ages(lease: Lease, version: PolicyVersion) -> np.ndarray:
    """int [groups]: versions since the oldest trained token of each was sampled."""
    oldest_trained = lease.mask_before if lease.mask_before is not None else 0
    # a number is a position in training, whatever the lineage; a token of an abandoned lineage is not stale
    return np.array([max(0, version.number - max(g.oldest.number, oldest_trained)) for g in lease.groups])
