"""Rejection: what is too far from the anchor policy is not trained, and the rest keeps its weight.

By sequence, with the geometric mean of the ratios, this drops sequences that went astray as a whole (Li et al. 2025,
"When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch")::

    w = 1 if reject_low ≤ ρ ≤ reject_high, else 0

``reject_level`` as in `asyncrl.algorithms.corrections.tis`. Beside `tis` it masks what that only truncates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.items import Correction, TokenFigures
from asyncrl.algorithms.ratios import at_level
from asyncrl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algorithms.items import Segments


@dataclass
class RejectOptions(Section):
    reject_low: Annotated[float, Field(ge=0, lt=1)] = 0.5  # what has a smaller ratio is not trained
    reject_high: Annotated[float, Field(gt=1)] = 2.0  # nor what has a larger one
    reject_level: Literal["token", "sequence", "geometric"] = "geometric"  # ratio of the token, or of its sequence


def weights(log_ratio: Tensor, segments: Segments, options: RejectOptions) -> tuple[Tensor, TokenFigures]:
    ratio = at_level(log_ratio, segments, options.reject_level).exp()
    kept = (ratio >= options.reject_low) & (ratio <= options.reject_high)
    return kept.to(ratio.dtype), {"rejected": ~kept}


CORRECTION = Correction(weights, RejectOptions, weighs=False)
