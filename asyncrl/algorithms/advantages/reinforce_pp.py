"""REINFORCE++: rewards normalized over the whole batch's tokens instead of within groups.

Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization"::

    A = (R − mean(R)) / sqrt(var(R) + ε)    over all trained tokens of the batch

R is a token's return: its sample's reward, less the KL penalties of this token and of those after it
(``kl_reward_coef``), undiscounted. With ``group_baseline`` (the paper's REINFORCE++-baseline) the mean reward of its
group is subtracted first.
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
    returns = batch.of_tokens(rewards) + batch.penalty_before()
    count = max(int(batch.loss_mask.sum()), 1)
    centred = returns - returns[batch.loss_mask].sum() / count
    variance = (centred[batch.loss_mask] ** 2).sum() / max(count - 1, 1)
    return (centred / np.sqrt(variance + VAR_EPS)).astype(np.float32)


ADVANTAGE = Advantage(compute, ReinforcePPOptions)
