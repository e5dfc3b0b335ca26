"""Regularisers: KL to a reference policy, and entropy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.ratios import clamped
from asyncrl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3")


@dataclass
class KLOptions(Section):
    kl_coef: NonNegativeFloat = 0.0  # KL penalty against the reference model; 0: no reference model is loaded
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    # weigh each token's KL by its ratio to the policy that sampled it: unbiased for stale tokens, and in its gradient
    kl_unbiased: bool = False
    reference_path: str = ""  # checkpoint folder of the reference model; empty: model.path

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.kl_unbiased and not self.kl_coef:
            yield "algorithm.kl_unbiased: there is no KL with algorithm.kl_coef=0; expected a positive one, or false"
        if self.kl_coef and self.kl_estimator == "k1" and not self.kl_unbiased:
            yield (
                "algorithm.kl_estimator: as a loss, k1's gradient is zero in the mean; expected k2 or k3, or "
                f"algorithm.kl_unbiased=true, with algorithm.kl_coef={self.kl_coef:g}"
            )


@dataclass
class EntropyOptions(Section):
    entropy_coef: float = 0.0  # entropy bonus; negative: a penalty


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """KL(policy ‖ reference) per token [R], from tokens of the policy (Schulman 2020, "Approximating KL Divergence").

    With d = reference − logprobs: k1 = −d, unbiased but noisy (as a loss its gradient is zero in the mean); k2 = d²/2,
    biased but with the right gradient; k3 = e^d − 1 − d, unbiased and never negative. Raises ValueError for others."""
    d = reference - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = clamped(d)
        return d.expm1() - d
    raise ValueError(f"algorithm.kl_estimator is {estimator!r}; expected one of {', '.join(ESTIMATORS)}")


def kl_loss(logprobs: Tensor, reference: Tensor, behaviour: Tensor, options: KLOptions) -> Tensor:
    """Loss of each token [R]. Unbiased: the estimate is multiplied by π / π_behaviour with its gradient, which makes it
    one of the current policy's KL (DeepSeek-AI 2025, "DeepSeek-V3.2")."""
    kl = kl_estimate(logprobs, reference, options.kl_estimator)
    return kl * clamped(logprobs - behaviour).exp() if options.kl_unbiased else kl
