"""PPO's clipped surrogate: a token that has moved too far in its favoured direction has no gradient.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", with separate bounds (clip-higher: Yu et al.
2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale")::

    ratio = π / π_anchor
    loss  = −min(ratio · A, clip(ratio, 1 − clip_low, 1 + clip_high) · A)

With ``dual_clip`` c the loss of a token with A < 0 is at most −c · A, so that a single one whose probability has grown
far cannot dominate (Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.items import Surrogate, TokenFigures
from asyncrl.algorithms.ratios import clamped
from asyncrl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algorithms.items import Segments


@dataclass
class ClipRange(Section):
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2  # the ratio is clipped below 1 − clip_low; 1: not clipped below
    clip_high: NonNegativeFloat = 0.2  # and above 1 + clip_high


@dataclass
class ClipOptions(ClipRange):
    dual_clip: NonNegativeFloat = 0.0  # bound of the ratio where the advantage is negative, such as 3; 0: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if 0 < self.dual_clip <= 1 + self.clip_high:
            yield (
                f"algorithm.dual_clip: expected 0, or more than 1 + clip_high = {1 + self.clip_high:g}, found "
                f"{self.dual_clip:g}"
            )


def loss(
    logprobs: Tensor, anchor: Tensor, advantages: Tensor, segments: Segments, options: ClipOptions
) -> tuple[Tensor, TokenFigures]:
    ratio = clamped(logprobs - anchor).exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    gain = (ratio * advantages).minimum(clipped * advantages)
    figures = clip_fractions(ratio, advantages, options)
    if options.dual_clip:
        bounded = (advantages < 0) & (ratio > options.dual_clip)
        gain = (options.dual_clip * advantages).where(bounded, gain)
        figures["clip_fraction_dual"] = bounded
    return -gain, figures


def clip_fractions(ratio: Tensor, advantages: Tensor, options: ClipRange) -> dict[str, Tensor]:
    """Tokens without a gradient because their ratio left the range in the direction of their advantage."""
    ratio = ratio.detach()
    return {
        "clip_fraction_low": (advantages < 0) & (ratio < 1 - options.clip_low),
        "clip_fraction_high": (advantages > 0) & (ratio > 1 + options.clip_high),
    }


SURROGATE = Surrogate(loss, ClipOptions, scales_advantages=True)
