"""GSPO: the clipped surrogate of the whole sequence's ratio.

Zheng et al. 2025, "Group Sequence Policy Optimization", in the form of its token variant (GSPO-token), whose value
and, for equal advantages within a sequence, gradient are those of the sequence form::

    s    = exp(mean over the sequence's trained tokens of log(π / π_anchor))
    loss = −min(s · A, clip(s, 1 − clip_low, 1 + clip_high) · A)    with s = sg(s) · π / sg(π) in the gradient

The paper's clip range is some hundred times narrower than PPO's, as s varies less than the ratio of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.algorithms.items import Surrogate, TokenFigures
from asyncrl.algorithms.ratios import clamped
from asyncrl.algorithms.surrogates.clip import ClipRange, clip_fractions

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algorithms.items import Segments


def loss(
    logprobs: Tensor, anchor: Tensor, advantages: Tensor, segments: Segments, options: ClipRange
) -> tuple[Tensor, TokenFigures]:
    current = logprobs.detach()
    ratio = (clamped(segments.mean(current - anchor)) + (logprobs - current)).exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    gain = (ratio * advantages).minimum(clipped * advantages)
    return -gain, clip_fractions(ratio, advantages, options)


SURROGATE = Surrogate(loss, ClipRange, scales_advantages=True)
