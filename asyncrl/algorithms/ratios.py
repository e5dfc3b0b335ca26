"""Ratios of two policies' probabilities, kept finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algorithms.items import Segments

#: log-ratios are clamped to ±20 before exp: float32 cannot overflow, and no weight beyond e^20 is meaningful
MAX_LOG_RATIO = 20.0


def clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def at_level(log_ratio: Tensor, segments: Segments, level: str) -> Tensor:
    """[R] → [R]: log-ratios of tokens; at the level ``sequence`` of the whole sequence, at ``geometric`` its mean over
    the sequence's trained tokens, whose exponential is the geometric mean of the tokens' ratios."""
    if level == "token":
        return clamped(log_ratio)
    return clamped(segments.sum(log_ratio) if level == "sequence" else segments.mean(log_ratio))
