"""Regularisers: KL to a reference policy, in the loss or in the reward, and entropy, with a target or without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.ratios import clamped
from asyncrl.config.section import PathText, Section

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class KLOptions(Section):
    kl_coef: NonNegativeFloat = 0.0  # of the KL to the reference model in the loss; 0: none
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    # weigh each token's KL by its ratio to the policy that sampled it: unbiased for stale tokens, and in its gradient
    kl_unbiased: bool = False
    # of the same KL in the reward: log(sampling policy / reference) of each trained token is subtracted from it. Groups
    # of equal rewards are still dropped by filter_zero_variance
    kl_reward_coef: NonNegativeFloat = 0.0
    reference_path: PathText = ""  # checkpoint folder of the reference model; empty: model.path

    @property
    def needs_reference(self) -> bool:
        """A reference model is loaded."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.kl_coef and self.kl_reward_coef:
            yield (
                "algorithm.kl_reward_coef: the KL would count twice, in the reward and with algorithm.kl_coef="
                f"{self.kl_coef:g} in the loss; expected one of them to be 0"
            )
        for name, default in (("kl_estimator", "k3"), ("kl_unbiased", False)):
            if not self.kl_coef and (found := getattr(self, name)) != default:
                yield (
                    f"algorithm.{name}: read only with algorithm.kl_coef above 0; expected its default, found {found}"
                )
        if self.reference_path and not self.needs_reference:
            yield (
                "algorithm.reference_path: read only with algorithm.kl_coef or kl_reward_coef above 0; expected it "
                f"empty, found {self.reference_path}"
            )
        if self.kl_coef and self.kl_estimator == "k1" and not self.kl_unbiased:
            yield (
                "algorithm.kl_estimator: as a loss, k1's gradient is zero in the mean; expected k2 or k3, or "
                f"algorithm.kl_unbiased=true, with algorithm.kl_coef={self.kl_coef:g}"
            )


@dataclass
class EntropyOptions(Section):
    entropy_coef: float = 0.0  # entropy bonus, with entropy_target its first coefficient; negative: a penalty
    # nats per token below which the policy's entropy shall not fall: a bonus while it is lower; 0: no target
    entropy_target: NonNegativeFloat = 0.0
    # with entropy_target, what each train step adds to the coefficient below the target, and takes from it above
    entropy_step: PositiveFloat = 0.005

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.entropy_target and self.entropy_coef < 0:
            yield (
                f"algorithm.entropy_coef: a penalty works against algorithm.entropy_target={self.entropy_target:g}; "
                f"expected at least 0, found {self.entropy_coef:g}"
            )
        if self.entropy_step != EntropyOptions.entropy_step and not self.entropy_target:
            yield (
                "algorithm.entropy_step: read only with algorithm.entropy_target; expected its default, found "
                f"{self.entropy_step:g}"
            )


@dataclass
class EntropyControl:
    """Coefficient of the entropy bonus: adaptive entropy control (He et al. 2025, "Skywork Open Reasoner 1", arXiv
    2505.22312). With c = ``entropy_coef`` at first, after a train step of entropy e::

        c ← max(0, c ± entropy_step)    + where e < entropy_target
        coefficient = c where e < entropy_target, else 0

    It lags a step behind the published form: a step's entropy is known after its forward passes. Without a target the
    coefficient is always ``entropy_coef``."""

    options: EntropyOptions
    level: float = 0.0  #: c
    coefficient: float = 0.0

    def __post_init__(self) -> None:
        self.level = self.coefficient = self.options.entropy_coef

    def observe(self, entropy: float) -> None:
        """``entropy``: mean of the trained tokens of a train step, nats."""
        if not self.options.entropy_target:
            return
        low = entropy < self.options.entropy_target
        self.level = max(0.0, self.level + self.options.entropy_step * (1 if low else -1))
        self.coefficient = self.level if low else 0.0

    @property
    def used(self) -> bool:
        """There is a bonus or a penalty, or may be one later."""
        return bool(self.options.entropy_coef or self.options.entropy_target)

    @property
    def state(self) -> list[float]:
        """For a checkpoint: level and coefficient; a level of −1 without a target, which has none."""
        return [self.level, self.coefficient] if self.options.entropy_target else [-1.0, self.coefficient]

    def restore(self, state: list[float]) -> None:
        """Continue from a checkpoint's `state`; if it or this run has no target, the options count, which a resumed run
        may change."""
        if self.options.entropy_target and state[0] >= 0:
            self.level, self.coefficient = state


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """KL(policy ‖ reference) per token [R], from tokens of the policy (Schulman 2020, "Approximating KL Divergence").

    With d = reference − logprobs: k1 = −d, unbiased but noisy (as a loss its gradient is zero in the mean); k2 = d²/2,
    biased but with the right gradient; k3 = e^d − 1 − d, unbiased and never negative."""
    d = reference - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    d = clamped(d)
    return d.expm1() - d


def kl_loss(logprobs: Tensor, reference: Tensor, behaviour: Tensor, options: KLOptions) -> Tensor:
    """Loss of each token [R]. Unbiased: the estimate is multiplied by π / π_behaviour with its gradient, which makes it
    one of the current policy's KL (DeepSeek-AI 2025, "DeepSeek-V3.2")."""
    kl = kl_estimate(logprobs, reference, options.kl_estimator)
    return kl * clamped(logprobs - behaviour).exp() if options.kl_unbiased else kl
