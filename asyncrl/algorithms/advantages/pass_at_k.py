"""pass@k: only the best sample of a group is reinforced, by what it adds to the second best.

Tang et al. 2025, "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning", with k = n:
the leave-one-out estimate of the gradient of E[max r]::

    A(best) = r(best) − r(second best), A(others) = 0
"""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.batch_view import BatchView
from asyncrl.algorithms.items import Advantage, NoOptions


def compute(batch: BatchView, options: NoOptions) -> np.ndarray:
    """Of equally good samples none is better than the second best: zeros."""
    advantages = np.zeros(len(batch.rewards))
    rewards = batch.rewards.astype(np.float64)
    for group in np.unique(batch.group):
        of_group = np.flatnonzero((batch.group == group) & batch.counted)
        if len(of_group) > 1:
            *_, second, best = of_group[np.argsort(rewards[of_group], kind="stable")]
            advantages[best] = rewards[best] - rewards[second]
    return batch.of_tokens(advantages.astype(np.float32))


ADVANTAGE = Advantage(compute, min_samples=2, of_groups=True)
