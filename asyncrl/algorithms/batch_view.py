"""A whole train step as advantages see it, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BatchView:
    """``S`` samples with ``B`` token sequences of ``R`` response tokens in all.

    ``rewards`` float32 [S], ``group`` int64 [S] (id of each sample's group), ``counted`` bool [S] (it has a trained
    token; others must not affect anything), ``sample`` int64 [B] (sample of each sequence, ascending), ``row_offsets``
    int64 [B+1] (the sequences' bounds in the tokens), ``loss_mask`` bool [R]."""

    rewards: np.ndarray
    group: np.ndarray
    counted: np.ndarray
    sample: np.ndarray
    row_offsets: np.ndarray
    loss_mask: np.ndarray

    def of_tokens(self, values_S: np.ndarray) -> np.ndarray:
        """[S] → [R]: each sample's value for the tokens of its sequences."""
        return np.repeat(values_S[self.sample], np.diff(self.row_offsets))

    def over_group(self, values_S: np.ndarray) -> np.ndarray:
        """[S] → [S]: sum over the counted samples of each sample's group, in float64."""
        return np.bincount(self.group, np.where(self.counted, values_S, 0.0))[self.group]

    @property
    def group_size(self) -> np.ndarray:
        """float64 [S]: counted samples of each sample's group, at least 1."""
        return np.maximum(self.over_group(np.ones(len(self.group))), 1.0)

    @property
    def trained_tokens(self) -> np.ndarray:
        """int64 [B]: of each sequence."""
        until = np.concatenate([[0], np.cumsum(self.loss_mask)])
        return until[self.row_offsets[1:]] - until[self.row_offsets[:-1]]
