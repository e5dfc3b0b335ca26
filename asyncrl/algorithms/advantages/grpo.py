"""GRPO: rewards relative to a prompt's group of samples.

Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", section 4.1.2::

    A = (r − mean(r)) / (std(r) + ε)

Without ``normalize_by_std`` A = r − mean(r), which does not overweight prompts that are nearly solved or nearly
hopeless (Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", Dr. GRPO).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.batch_view import BatchView
from asyncrl.algorithms.items import Advantage
from asyncrl.config.section import Section

STD_EPS = 1e-6


@dataclass
class GRPOOptions(Section):
    normalize_by_std: bool = True  # false: advantages are only centred (Dr. GRPO)
    # divisor of the variance; 1: n − 1, as in verl and TRL; 0: n
    std_ddof: Annotated[int, Field(ge=0, le=1)] = 1


def compute(batch: BatchView, options: GRPOOptions) -> np.ndarray:
    """A group of equal rewards gets exact zeros, and so does a sample that is the only one."""
    rewards = batch.rewards.astype(np.float64)  # makes sums of equal float32 exact
    centred = np.where(batch.counted, rewards - batch.over_group(rewards) / batch.group_size, 0.0)
    if options.normalize_by_std:
        freedom = np.maximum(batch.group_size - options.std_ddof, 1)
        centred /= np.sqrt(batch.over_group(centred**2) / freedom) + STD_EPS
    return batch.of_tokens(centred.astype(np.float32))


ADVANTAGE = Advantage(compute, GRPOOptions, min_samples=2, of_groups=True)
