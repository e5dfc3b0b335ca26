"""From rewards to advantages, in NumPy: group normalisation, and what becomes of overlong samples."""

from __future__ import annotations

import dataclasses

import numpy as np

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.sample import effective_reward
from asyncrl.trainer.backend import TrainBatch
from asyncrl.trainer.batches import per_token, trained_tokens

STD_EPS = 1e-6

OVERLONG_POLICIES = ("keep", "mask", "penalize")


def group_advantages(
    rewards: np.ndarray,
    group: np.ndarray,
    normalize_by_std: bool = True,
    eps: float = STD_EPS,
    counted: np.ndarray | None = None,
) -> np.ndarray:
    """float32 [B]: how much better each sample's reward is than its group's, for ``rewards`` and ``group`` ids [B].

    GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1.2)::

        A = (r − mean(r)) / (std(r) + eps)

    with the population's standard deviation. Without ``normalize_by_std`` A = r − mean(r), which does not overweigh
    prompts that are nearly solved or nearly hopeless (Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical
    Perspective", Dr. GRPO).
    A group of equal rewards gets exact zeros. Samples that are not ``counted`` (bool [B]; None: all are) get zero and
    move neither mean nor deviation.
    """
    share = np.ones(len(rewards)) if counted is None else counted.astype(np.float64)
    rewards = rewards.astype(np.float64)  # sums of equal float32 are then exact, and equal rewards have no noise
    size = np.maximum(np.bincount(group, share), 1)
    centred = (rewards - (np.bincount(group, rewards * share) / size)[group]) * share
    if normalize_by_std:
        centred /= np.sqrt(np.bincount(group, centred**2) / size)[group] + eps
    return centred.astype(np.float32)


def grpo_advantages(batch: TrainBatch, config: AlgorithmConfig) -> np.ndarray:
    """float32 [R]: each sample's group advantage at all of its response tokens (outcome supervision). Samples without a
    trained token do not count."""
    columns, counted = batch.sequence_columns, trained_tokens(batch) > 0
    return per_token(
        batch, group_advantages(columns["rewards"], columns["group"], config.normalize_by_std, counted=counted)
    )


def apply_overlong(batch: TrainBatch, policy: str, penalty: float) -> TrainBatch:
    """The batch with overlong samples (FinishReason.LENGTH) treated by ``policy``:

    - ``keep``: like any other.
    - ``mask``: none of their tokens are trained, as a cut answer says little of the policy, and their rewards do not
      count for the group's mean (overlong filtering, Yu et al. 2025, "DAPO", section 3.4).
    - ``penalize``: ``penalty`` is taken from their reward before advantages are computed (the constant end of DAPO's
      soft overlong punishment, its equation 13).

    The rewards are those of `asyncrl.sample.effective_reward`, which also decides what the rollouter drops.
    Raises ValueError for another policy."""
    if policy not in OVERLONG_POLICIES:
        raise ValueError(f"algorithm.overlong is {policy!r}; expected one of {', '.join(OVERLONG_POLICIES)}")
    columns = batch.sequence_columns
    effective = [
        effective_reward(reward, finish, policy, penalty)
        for reward, finish in zip(columns["rewards"].tolist(), columns["finish"].tolist(), strict=True)
    ]
    counted = np.array([reward is not None for reward in effective])
    rewards = np.array([0.0 if reward is None else reward for reward in effective], dtype=np.float32)
    return dataclasses.replace(
        batch,
        loss_mask=batch.loss_mask & per_token(batch, counted),
        sequence_columns={**columns, "rewards": rewards},
    )
