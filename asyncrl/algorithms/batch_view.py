"""A whole train step as advantages see it, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BatchView:
    """``S`` samples with ``B`` token sequences of ``R`` response tokens in all.

    ``rewards`` float32 [S], ``group`` int64 [S] (id of each sample's group), ``counted`` bool [S] (it has a trained
    token; others must not affect anything), ``sample`` int64 [B] (sample of each sequence, ascending), ``row_offsets``
    int64 [B+1] (the sequences' bounds in the tokens), ``loss_mask`` bool [R], ``penalty`` float32 [R] (what each token
    cost: its sample's reward is already less by their sum), ``token_rewards`` float32 [R] (what an agent loop gave for
    each turn, at its last token; 0 elsewhere)."""

    rewards: np.ndarray
    group: np.ndarray
    counted: np.ndarray
    sample: np.ndarray
    row_offsets: np.ndarray
    loss_mask: np.ndarray
    penalty: np.ndarray
    token_rewards: np.ndarray

    def of_tokens(self, values_S: np.ndarray) -> np.ndarray:
        """[S] → [R]: each sample's value for the tokens of its sequences."""
        return np.repeat(values_S[self.sample], np.diff(self.row_offsets))

    def over_group(self, values_S: np.ndarray) -> np.ndarray:
        """[S] → [S]: sum over the counted samples of each sample's group, in float64."""
        return np.bincount(self.group, np.where(self.counted, values_S, 0.0))[self.group]

    def penalty_before(self) -> np.ndarray:
        """float64 [R]: penalties of the sample's tokens before each one, in the order of its sequences."""
        before = np.concatenate([[0.0], np.cumsum(self.penalty, dtype=np.float64)])
        first = np.flatnonzero(np.diff(self.sample, prepend=-1))  # sequence of each sample
        return before[:-1] - self.of_tokens(before[self.row_offsets[first]])

    @property
    def group_size(self) -> np.ndarray:
        """float64 [S]: counted samples of each sample's group, at least 1."""
        return np.maximum(self.over_group(np.ones(len(self.group))), 1.0)
