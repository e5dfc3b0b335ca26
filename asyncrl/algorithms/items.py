"""Kinds of items that an algorithm is made of, and the registries that find them.

An algorithm is a selection of items and their options (`asyncrl.config.schema.AlgorithmConfig`):
``configs/algorithms/`` has one file for each published one. Items are pure: no collective, no global, no random
number. So the same file trains on every backend, whatever the cut into micro-batches and ranks.

Each kind is a frozen dataclass that wraps a function. ``options``: class of the options that the function reads, a
`Section`; those of built-in items are bases of `AlgorithmConfig`, and those of others are filled from
``algorithm.args``.

Shape suffixes: R response tokens, S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from asyncrl.algorithms.batch_view import BatchView
from asyncrl.config.section import Section
from asyncrl.plugins.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


class Segments(Protocol):
    """The token sequences of a micro-batch, for items that look at whole ones."""

    @property
    def trained(self) -> Tensor:
        """bool [R]"""

    def sum(self, values: Tensor) -> Tensor:
        """[R] → [R]: at each token the sum over the trained tokens of its sequence."""

    def mean(self, values: Tensor) -> Tensor:
        """[R] → [R]: at each token the mean over the trained tokens of its sequence; 0 without any."""


class NoOptions(Section):
    """Of an item that reads none."""


@dataclass(frozen=True)
class Advantage:
    """``compute(batch, options)``: float32 [R] for a whole train step, whatever it holds at tokens that are not
    trained. ``min_samples``: of a group that teaches anything. ``of_groups``: a group's advantages depend on no other
    group, so the trainer may begin a step before all of its groups are finished."""

    compute: Callable[[BatchView, Any], np.ndarray]
    options: type = NoOptions
    min_samples: int = 1
    of_groups: bool = False


#: what a function of tokens returns beside its result: values [R] by name, reported as means over trained tokens
TokenFigures = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class Surrogate:
    """``loss(logprobs, anchor, advantages, segments, options)``: loss of each token of a micro-batch, float32 [R], and
    figures. ``anchor``: logprobs of the policy that the ratio is relative to, without gradient. Tokens that are not
    trained have zeros in all columns. ``anchors``: the values of ``algorithm.anchor`` for which it is defined; empty:
    all. ``scales_advantages``: the loss of a token has no gradient where all advantages of its sequence are 0, so the
    trainer need not compute such sequences."""

    loss: Callable[[Tensor, Tensor, Tensor, Segments, Any], tuple[Tensor, TokenFigures]]
    options: type = NoOptions
    anchors: tuple[str, ...] = ()
    scales_advantages: bool = False


@dataclass(frozen=True)
class Correction:
    """``weights(log_ratio, segments, options)``: weight of each token of a micro-batch, float32 [R] ≥ 0, and figures,
    given log(anchor policy / behaviour policy) [R] without gradient. ``weighs``: the weights estimate that ratio
    (importance sampling); else they are 0 or 1, and the item only masks tokens. ``of_step``: instead of a micro-batch,
    the function gets all tokens of a train step at once, on the CPU, and the log-ratio of the policy at the step's
    start, which costs a forward pass."""

    weights: Callable[[Tensor, Segments, Any], tuple[Tensor, TokenFigures]]
    options: type = NoOptions
    weighs: bool = True
    of_step: bool = False


ADVANTAGES: Registry[Advantage] = Registry(
    kind="advantage",
    option="algorithm.advantage",
    package="asyncrl.algorithms.advantages",
    attribute="ADVANTAGE",
    entry_points="asyncrl.advantages",
    interface=Advantage,
)
SURROGATES: Registry[Surrogate] = Registry(
    kind="surrogate",
    option="algorithm.surrogate",
    package="asyncrl.algorithms.surrogates",
    attribute="SURROGATE",
    entry_points="asyncrl.surrogates",
    interface=Surrogate,
)
CORRECTIONS: Registry[Correction] = Registry(
    kind="correction",
    option="algorithm.corrections",
    package="asyncrl.algorithms.corrections",
    attribute="CORRECTION",
    entry_points="asyncrl.corrections",
    interface=Correction,
)
