"""Estimates of success over prompts, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959964  # the normal distribution's 97.5 % quantile


@dataclass(frozen=True)
class Estimate:
    """Mean over prompts and half the width of its 95 % confidence interval; ``nan`` for a single prompt's."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Of one value per prompt. Samples of one prompt depend on each other, so that only prompts count as
        observations (Miller 2024, arXiv 2411.00640): mean ± 1.96 · s / √n."""
        array = np.asarray(values, np.float64)
        spread = float(array.std(ddof=1)) if len(array) > 1 else math.nan
        return cls(float(array.mean()), _Z * spread / math.sqrt(len(array)))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half_width:.3f}"


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Unbiased estimate of the probability that one of ``k`` samples succeeds, of ``samples`` ≥ k with ``successes``:
    1 − C(n − c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374)."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples of a prompt, found {samples}")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)
