"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740)."""

from collections.abc import Iterator

import numpy as np

from asyncrl.config.schema import AlgorithmConfig, Config
from asyncrl.models.device_copy import on_device
from asyncrl.trainer.backends.base import LossFunction, LossOutput, TrainBatch
from asyncrl.trainer.batches import first_sequences, per_token


class RLOO:
    def problems(self, config: Config) -> Iterator[str]:
        if config.rollout.n < 2:
            yield f"rollout.n: rloo compares the samples of a group, expected at least 2, found {config.rollout.n}"
        if config.async_training.staleness_threshold > 0:
            yield "async_training.staleness_threshold: rloo does not correct for stale tokens, expected 0"
        if config.async_training.trigger_parameter_sync_step > 1:
            yield "async_training.trigger_parameter_sync_step: rloo does not correct for stale tokens, expected 1"
        if config.algorithm.kl_coef > 0:
            yield "algorithm.kl_coef: rloo has no KL term, expected 0"

    def reads_proximal(self, config: AlgorithmConfig) -> bool:
        return False

    def advantages(self, batch: TrainBatch, config: AlgorithmConfig) -> np.ndarray:
        """float32 [R]: each sample's reward minus the mean reward of the other samples of its group."""
        columns, first = batch.sequence_columns, first_sequences(batch)
        rewards, group = columns["rewards"][first].astype(np.float64), columns["group"][first]  # of each sample
        others = np.maximum(np.bincount(group) - 1, 1)[group]
        baseline = (np.bincount(group, rewards)[group] - rewards) / others
        return per_token(batch, (rewards - baseline).astype(np.float32)[columns["sample"]])

    def loss(self, config: AlgorithmConfig) -> LossFunction:
        """−advantage · log π(token), summed with the weights of ``algorithm.loss_aggregation``."""

        def reinforce(logprobs, entropy, batch):
            weights = on_device(batch.columns["weights"], logprobs.device)
            advantages = on_device(batch.columns["advantages"], logprobs.device)
            trained = weights != 0  # the other columns may hold anything elsewhere, NaN included
            loss = -(advantages * logprobs)[trained] @ weights[trained]
            return LossOutput(loss, sums={"entropy": entropy.detach()[trained] @ weights[trained]})

        return reinforce


ALGORITHM = RLOO()
