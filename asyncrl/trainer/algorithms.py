"""The algorithms by name: the one place to add another.

An algorithm is two functions. To add one, write them and enter the pair below; `algorithm.name` then selects it::

    ALGORITHMS["reinforce"] = Algorithm(advantages=my_advantages, loss=my_loss)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.trainer.advantages import grpo_advantages
from asyncrl.trainer.backend import LossFunction, TrainBatch
from asyncrl.trainer.losses import clipped_policy_loss


@dataclass(frozen=True)
class Algorithm:
    """``advantages``: the whole batch (all ranks' sequences, overlong policy applied) → float32 [R]; called once per
    train step. ``loss``: builds the loss function, which finds them as column ``advantages``."""

    advantages: Callable[[TrainBatch, AlgorithmConfig], np.ndarray]
    loss: Callable[[AlgorithmConfig], LossFunction]


ALGORITHMS = {
    "grpo": Algorithm(advantages=grpo_advantages, loss=clipped_policy_loss),
}


def algorithm_named(name: str) -> Algorithm:
    """Raises ValueError naming the known ones."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm.name is {name!r}; known: {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[name]
