"""M2PO: the tokens whose probability has changed most are not trained, so many that the rest has moved little.

Zheng et al. 2025, "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?" (arXiv
2510.01161). Over a whole train step, with M₂ = mean of log²(π / μ) over the tokens that are left::

    w = 0 for the tokens of the largest log²(π / μ), the fewest with which M₂ ≤ m2_threshold; else 1
"""

from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.items import Correction
from asyncrl.config.section import Section


@dataclass
class Options(Section):
    m2_threshold: Annotated[float, Field(ge=0)] = 0.04  # nats²


def weights(log_ratio, segments, options):
    moments, order = log_ratio[segments.trained].double().square().sort(stable=True)
    means = moments.cumsum(0) / torch.arange(1, len(moments) + 1)
    kept = order[means <= options.m2_threshold]  # the means of ascending values ascend
    weights = torch.zeros_like(log_ratio)
    weights[segments.trained.nonzero().squeeze(1)[kept]] = 1
    return weights, {"m2_masked": 1 - weights}


CORRECTION = Correction(weights, Options, weighs=False, of_step=True)
