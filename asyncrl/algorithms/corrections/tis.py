"""Truncated importance sampling: each token weighs by the ratio of the anchor policy to the one that sampled it, up to
a cap, which bounds the variance at the price of a bias.

Ionides 2008, "Truncated Importance Sampling"; for policies of reinforcement learning Espeholt et al. 2018, "IMPALA",
and Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"::

    w = min(ρ, tis_cap)

``tis_level`` says of what ρ is the ratio: of a token, of its whole sequence (their product), or the geometric mean over
it.
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
class TISOptions(Section):
    tis_cap: Annotated[float, Field(ge=1)] = 2.0  # upper bound of the importance weight
    tis_level: Literal["token", "sequence", "geometric"] = "token"  # ratio of the token, or of its whole sequence


def weights(log_ratio: Tensor, segments: Segments, options: TISOptions) -> tuple[Tensor, TokenFigures]:
    ratio = at_level(log_ratio, segments, options.tis_level).exp()
    return ratio.clamp(max=options.tis_cap), {"tis_truncated": ratio > options.tis_cap}


CORRECTION = Correction(weights, TISOptions)
