"""Masked importance sampling: the importance weight within a band, 0 outside of it, so that what is too far from the
anchor policy is not trained instead of being truncated.

By token with a band such as 0.5 to 5 this is IcePop (Ling Team 2025, "Every Step Evolves: Scaling Reinforcement
Learning for Trillion-Scale Thinking Model")::

    w = ρ if mis_low ≤ ρ ≤ mis_high, else 0

``mis_level`` as in `asyncrl.algorithms.corrections.tis`.
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
class MISOptions(Section):
    mis_low: Annotated[float, Field(ge=0, lt=1)] = 0.0  # tokens with a smaller importance weight are not trained
    mis_high: Annotated[float, Field(gt=1)] = 2.0  # nor those with a larger one
    mis_level: Literal["token", "sequence", "geometric"] = "token"  # ratio of the token, or of its whole sequence


def weights(log_ratio: Tensor, segments: Segments, options: MISOptions) -> tuple[Tensor, TokenFigures]:
    ratio = at_level(log_ratio, segments, options.mis_level).exp()
    kept = (ratio >= options.mis_low) & (ratio <= options.mis_high)
    return ratio * kept, {"mis_masked": ~kept}


CORRECTION = Correction(weights, MISOptions)
