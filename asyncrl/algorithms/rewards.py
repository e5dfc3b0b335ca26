"""Rewards as advantages see them, and groups that teach too little: for both pools, so that the rollouter drops by the
values from which the trainer would learn.

Shape suffix: S samples of one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from asyncrl.config.section import Section


@dataclass
class RewardOptions(Section):
    # samples that a limit ended; mask: they are not trained, nor compared with; penalize: overlong_penalty is
    # subtracted
    overlong: Literal["keep", "mask", "penalize"] = "keep"
    overlong_penalty: PositiveFloat = 0.5
    # with overlong=penalize: tokens before rollout.max_response_tokens over which the penalty grows from 0; 0: none
    overlong_buffer: NonNegativeInt = 0
    # weight of a reward for being shorter than the group's other samples: ±0.5, and not above 0 for failed ones; 0:
    # none
    length_penalty: NonNegativeFloat = 0.0

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for name in ("overlong_penalty", "overlong_buffer"):
            found, default = getattr(self, name), getattr(RewardOptions, name)
            if self.overlong != "penalize" and found != default:
                yield (
                    f"algorithm.{name}: only algorithm.overlong=penalize reads it; expected {default:g}, found "
                    f"{found:g}"
                )


@dataclass
class FilterOptions(Section):
    # drop, count and replace groups whose rewards are all equal, to which only reinforce_pp gives a gradient
    filter_zero_variance: bool = True
    # drop, count and replace groups of which a smaller share succeeded (accuracy, or without that metric reward, above
    # 0)
    filter_success_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    filter_success_high: Annotated[float, Field(gt=0, le=1)] = 1.0  # or a larger one

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.filter_success_low > self.filter_success_high:
            yield (
                f"algorithm.filter_success_low: expected at most filter_success_high = {self.filter_success_high:g}, "
                f"found {self.filter_success_low:g}"
            )


def masked(truncated: np.ndarray, options: RewardOptions) -> np.ndarray:
    """bool [S]: samples that are not trained because a limit ended them, as ``truncated`` bool [S] says."""
    return truncated & (options.overlong == "mask")


def shaped(
    rewards: np.ndarray, lengths: np.ndarray, truncated: np.ndarray, options: RewardOptions, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rewards float32 [S] from which advantages are computed, and bool [S]: whether a sample is trained.

    ``lengths``: tokens of each sample's longest response, of at most ``max_tokens``; ``truncated`` bool [S]: a limit
    ended it.

    - ``overlong=mask``: a truncated answer says little about the policy (overlong filtering, Yu et al. 2025, "DAPO",
      section 3.4).
    - ``overlong=penalize`` with a buffer: DAPO's soft overlong punishment, equation 13.
    - ``length_penalty``: w · λ where the reward is positive, else w · min(0, λ), with λ = 0.5 − (length − shortest) /
      (longest − shortest) of the group (Kimi Team 2025, "Kimi k1.5: Scaling Reinforcement Learning with LLMs", section
      2.3.3)."""
    rewards, trained = rewards.astype(np.float32), ~masked(truncated, options)
    added = np.zeros(len(rewards))
    if options.overlong == "penalize":
        share = truncated.astype(np.float64)
        if buffer := options.overlong_buffer:
            share = np.maximum(share, np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0))
        added -= options.overlong_penalty * share
    if options.length_penalty and trained.any():
        shortest, longest = lengths[trained].min(), lengths[trained].max()
        brevity = np.zeros(len(rewards))
        if longest > shortest:
            brevity = 0.5 - (lengths - shortest) / (longest - shortest)
        added += options.length_penalty * np.where(rewards > 0, brevity, np.minimum(brevity, 0.0))
    return np.where(trained, rewards + added.astype(np.float32), np.float32(0)), trained


def too_easy_or_hard(succeeded: np.ndarray, options: FilterOptions) -> bool:
    """True if the share of samples that ``succeeded`` (bool [S]) is outside of the band to train on."""
    share = float(np.mean(succeeded)) if len(succeeded) else 0.0
    return not options.filter_success_low <= share <= options.filter_success_high
