"""The algorithm seam: advantages and loss of one algorithm, and the registry that finds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from asyncrl.config.schema import AlgorithmConfig, Config
from asyncrl.plugins.registry import Registry
from asyncrl.trainer.backends.base import LossFunction, TrainBatch


class Algorithm(Protocol):
    """Backends never know which one they train with: the same algorithm runs on all of them."""

    def problems(self, config: Config) -> Iterator[str]:
        """One line per problem with the options, each beginning with an option's key."""
        ...

    def reads_proximal(self, config: AlgorithmConfig) -> bool:
        """True if the loss reads the column ``proximal_logprobs``: those of the policy at the start of the batch. It
        costs a forward pass per batch of several optimizer steps; it is absent in a batch's only step, where the
        current policy is the proximal one."""
        ...

    def advantages(self, batch: TrainBatch, config: AlgorithmConfig) -> np.ndarray:
        """float32 [R] from the whole batch (all ranks' sequences, overlong policy applied). Called once per train step,
        on every rank; the loss finds the result as the column ``advantages``."""
        ...

    def loss(self, config: AlgorithmConfig) -> LossFunction:
        """Builds the loss function, once per run."""
        ...


ALGORITHMS: Registry[Algorithm] = Registry(
    kind="algorithm",
    option="algorithm.name",
    package="asyncrl.trainer.algorithms",
    attribute="ALGORITHM",
    entry_points="asyncrl.algorithms",
    interface=Algorithm,
)
