"""TOPR: negative samples are weighed by how likely they still are, positive ones are not.

Le Roux et al. 2025, "Tapered Off-Policy REINFORCE: Stable and Efficient Reinforcement Learning for LLMs"
(arXiv 2503.14286)::

    loss = −A · log π                            where A ≥ 0
    loss = −A · log π · min(π(y) / μ(y), cap)    where A < 0, for the whole sequence y
"""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.items import Surrogate
from asyncrl.algorithms.ratios import clamped
from asyncrl.config.section import Section


@dataclass
class Options(Section):
    topr_cap: Annotated[float, Field(gt=0)] = 1.0  # upper bound of a negative sequence's weight


def loss(logprobs, anchor, advantages, segments, options):
    ratio = clamped(segments.sum(logprobs.detach() - anchor)).exp().clamp(max=options.topr_cap)
    weight = ratio.where(advantages < 0, ratio.new_ones(()))
    return -weight * advantages * logprobs, {"topr_weight": weight}


SURROGATE = Surrogate(loss, Options, anchors=("behaviour",), scales_advantages=True)
