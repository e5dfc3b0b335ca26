"""Group-relative advantages and overlong policies, in NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np

from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.batches import per_token
from asyncrl.types.samples import effective_reward

STD_EPS = 1e-6

OVERLONG_POLICIES = ("keep", "mask", "penalize")


def group_advantages(
    rewards: np.ndarray,
    group: np.ndarray,
    normalize_by_std: bool = True,
    std_ddof: int = 1,
    eps: float = STD_EPS,
    counted: np.ndarray | None = None,
) -> np.ndarray:
    """float32 [B]: each sample's reward relative to its group, for ``rewards`` and ``group`` ids [B].

    GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1.2)::

        A = (r − mean(r)) / (std(r) + eps)

    The variance divides by the number of samples less ``std_ddof``: by n − 1, as in verl and TRL, or by n. Without
    ``normalize_by_std`` A = r − mean(r), which does not overweight prompts that are nearly solved or nearly hopeless
    (Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", Dr. GRPO).

    A group of equal rewards gets exact zeros. Samples not ``counted`` (bool [B]; None: all are) get zero, and affect
    neither mean nor deviation.
    """
    share = np.ones(len(rewards)) if counted is None else counted.astype(np.float64)
    rewards = rewards.astype(np.float64)  # makes sums of equal float32 exact, so equal rewards give zero
    size = np.maximum(np.bincount(group, share), 1)
    centred = (rewards - (np.bincount(group, rewards * share) / size)[group]) * share
    if normalize_by_std:
        freedom = np.maximum(size - std_ddof, 1)  # a single sample has deviation 0
        centred /= np.sqrt(np.bincount(group, centred**2) / freedom)[group] + eps
    return centred.astype(np.float32)


def apply_overlong(batch: TrainBatch, policy: str, penalty: float) -> TrainBatch:
    """Apply the overlong ``policy`` to samples that a limit ended (`FinishReason.truncated`):

    - ``keep``: no change.
    - ``mask``: their tokens are not trained, and their rewards do not count in the group's mean, since a truncated
      answer says little about the policy (overlong filtering, Yu et al. 2025, "DAPO", section 3.4).
    - ``penalize``: ``penalty`` is subtracted from their reward before advantages are computed (the constant end of
      DAPO's soft overlong punishment, its equation 13).

    Rewards are those of `asyncrl.types.samples.effective_reward`, which also decides what the rollouter drops. Raises
    ValueError for an unknown policy."""
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
