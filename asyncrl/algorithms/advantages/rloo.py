"""RLOO: REINFORCE with a leave-one-out baseline.

Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
LLMs"::

    A = r − mean of the rewards of the group's other samples
"""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.batch_view import BatchView
from asyncrl.algorithms.items import Advantage, NoOptions


def compute(batch: BatchView, options: NoOptions) -> np.ndarray:
    """A sample that is the only one of its group gets 0."""
    rewards, size = batch.rewards.astype(np.float64), batch.group_size
    others = (batch.over_group(rewards) - rewards) / np.maximum(size - 1, 1)
    advantages = np.where(batch.counted & (size > 1), rewards - others, 0.0)
    return batch.of_tokens(advantages.astype(np.float32))


ADVANTAGE = Advantage(compute, min_samples=2, of_groups=True)
