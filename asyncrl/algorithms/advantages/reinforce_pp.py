"""REINFORCE++: rewards normalized over the whole batch's tokens instead of within groups.

Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization"::

    A = (r − mean(r)) / sqrt(var(r) + ε)    over all trained tokens of the batch, each with its sample's r

With ``group_baseline`` (the paper's REINFORCE++-baseline) each group's mean is subtracted from r first.
"""

from __future__ import annotations

import numpy as np
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.batch_view import BatchView
from asyncrl.algorithms.items import Advantage
from asyncrl.config.section import Section

VAR_EPS = 1e-8


@dataclass
class ReinforcePPOptions(Section):
    group_baseline: bool = False  # subtract the mean reward of the group before the batch is normalized


def compute(batch: BatchView, options: ReinforcePPOptions) -> np.ndarray:
    """A batch whose samples are all alike gets zeros."""
    rewards = batch.rewards.astype(np.float64)
    if options.group_baseline:
        rewards = rewards - batch.over_group(rewards) / batch.group_size
    tokens = np.bincount(batch.sample, batch.trained_tokens, minlength=len(rewards))  # of each sample
    count = tokens.sum()
    if not count:
        return np.zeros(len(batch.loss_mask), np.float32)
    centred = rewards - (rewards * tokens).sum() / count
    variance = (centred**2 * tokens).sum() / max(count - 1, 1)
    return batch.of_tokens((centred / np.sqrt(variance + VAR_EPS)).astype(np.float32))


ADVANTAGE = Advantage(compute, ReinforcePPOptions)
