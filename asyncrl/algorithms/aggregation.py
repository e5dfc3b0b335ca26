"""Aggregations: how much each token weighs in the loss of a mini batch, in NumPy."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic.dataclasses import dataclass

from asyncrl.config.section import Section


@dataclass
class AggregationOptions(Section):
    # equal weight for all tokens, all sequences, or all samples; constant: a sample is divided by max_response_tokens
    loss_aggregation: Literal["token_mean", "sequence_mean", "sample_mean", "constant"] = "token_mean"
    # tokens that the means divide by; owned: all sampled ones; trained: without those that overdue or overlong masks
    denominators: Literal["owned", "trained"] = "owned"


def token_weights(
    loss_mask: np.ndarray,
    row_offsets: np.ndarray,
    sample: np.ndarray,
    owned: np.ndarray,
    options: AggregationOptions,
    constant: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Weight of each response token (float32 [R]), and share of each sequence in the denominator (float64 [B]).

    ``loss_mask`` bool [R], ``row_offsets`` int64 [B+1], ``sample`` int64 [B], ``owned`` int64 [B]: tokens that a
    sequence trains, before masks.

    - ``token_mean``: all trained tokens of the mini batch weigh the same, so long samples count more (Yu et al. 2025,
      "DAPO", section 3.4).
    - ``sequence_mean``: all sequences weigh the same, each by the mean over its tokens (Shao et al. 2024, GRPO).
    - ``sample_mean``: all samples weigh the same, each by the mean over the trained tokens of its sequences.
    - ``constant``: each sample's tokens are summed and divided by ``constant`` (Liu et al. 2025, Dr. GRPO).

    ``denominators``: means are over the tokens that a sequence ``owned`` before masks of age and overlong samples, so a
    mask does not make the rest weigh more, or over those that are still ``trained``."""
    until = np.concatenate([[0], np.cumsum(loss_mask, dtype=np.int64)])[row_offsets]
    count = (np.diff(until) if options.denominators == "trained" else owned).astype(np.float64)
    of_sample = np.bincount(sample, count)[sample]
    share_of_sample = count / np.maximum(of_sample, 1)

    def mean_over(counts_B: np.ndarray) -> np.ndarray:
        return (loss_mask / np.repeat(np.maximum(counts_B, 1), np.diff(row_offsets))).astype(np.float32)

    match options.loss_aggregation:
        case "token_mean":
            return loss_mask.astype(np.float32), count
        case "sequence_mean":
            return mean_over(count), (count > 0).astype(float)
        case "sample_mean":
            return mean_over(of_sample), share_of_sample
        case "constant":
            return loss_mask.astype(np.float32), share_of_sample * constant
