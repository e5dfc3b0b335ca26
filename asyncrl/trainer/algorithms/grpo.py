"""GRPO: advantages relative to a prompt's group of samples, with a clipped policy loss.

Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", section 4.1.
Dr. GRPO is ``algorithm.normalize_by_std=false``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncrl.config.schema import AlgorithmConfig, Config
from asyncrl.trainer.algorithms.advantages import group_advantages
from asyncrl.trainer.algorithms.base import Algorithm
from asyncrl.trainer.algorithms.losses import clipped_loss_problems, clipped_policy_loss
from asyncrl.trainer.backends.base import LossFunction, TrainBatch
from asyncrl.trainer.batches import first_sequences, per_token, trained_tokens


class GRPO:
    """See `asyncrl.trainer.algorithms.base.Algorithm`."""

    def problems(self, config: Config) -> Iterator[str]:
        if config.rollout.n < 2:
            yield f"rollout.n: grpo compares the samples of a group and needs at least 2, found {config.rollout.n}"
        yield from clipped_loss_problems(config)

    def reads_proximal(self, config: AlgorithmConfig) -> bool:
        return config.anchor == "proximal"

    def advantages(self, batch: TrainBatch, config: AlgorithmConfig) -> np.ndarray:
        """Each sample's group advantage at all response tokens of its sequences (outcome supervision). Samples without
        a trained token do not count."""
        columns, first = batch.sequence_columns, first_sequences(batch)
        counted = np.bincount(columns["sample"], trained_tokens(batch)) > 0
        advantages_S = group_advantages(
            columns["rewards"][first],
            columns["group"][first],
            config.normalize_by_std,
            config.std_ddof,
            counted=counted,
        )
        return per_token(batch, advantages_S[columns["sample"]])

    def loss(self, config: AlgorithmConfig) -> LossFunction:
        return clipped_policy_loss(config)


ALGORITHM: Algorithm = GRPO()
