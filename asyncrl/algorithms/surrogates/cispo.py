"""CISPO: the ratio is a clipped weight of the policy gradient, so that no token loses its gradient.

MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention"::

    loss = −sg(clip(π / π_anchor, 1 − clip_low, 1 + clip_high)) · A · log π

The paper does not clip below: ``clip_low`` = 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.algorithms.items import Surrogate, TokenFigures
from asyncrl.algorithms.ratios import clamped
from asyncrl.algorithms.surrogates.clip import ClipRange

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algorithms.items import Segments


def loss(
    logprobs: Tensor, anchor: Tensor, advantages: Tensor, segments: Segments, options: ClipRange
) -> tuple[Tensor, TokenFigures]:
    ratio = clamped(logprobs.detach() - anchor).exp()
    low, high = 1 - options.clip_low, 1 + options.clip_high
    figures = {"clip_fraction_low": ratio < low, "clip_fraction_high": ratio > high}
    return -ratio.clamp(low, high) * advantages * logprobs, figures


SURROGATE = Surrogate(loss, ClipRange, scales_advantages=True)
