"""Micro-batches as tensors: what the decoder's forward pass takes, made from a rank's NumPy batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.layout import PackedLayout
from asyncrl.trainer.backend import TrainBatch


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch on the device: ``tokens``, int64 [T], ``rows`` and ``targets``, int64 [R].

    ``places`` int64 [R] says which response rows of the whole batch these are (empty for a placeholder)."""

    batch: TrainBatch
    places: np.ndarray
    tokens: Tensor
    layout: PackedLayout
    rows: Tensor
    targets: Tensor

    @classmethod
    def of(cls, whole: TrainBatch, sequences: list[int], device: torch.device) -> MicroBatch:
        bounds = whole.row_offsets
        places = np.concatenate([np.arange(bounds[b], bounds[b + 1]) for b in sequences])
        return cls._on(device, whole.select(sequences), places)

    @classmethod
    def placeholder(cls, whole: TrainBatch, device: torch.device) -> MicroBatch:
        """One token of weight zero: a rank that has run out of sequences takes part in the collectives with it."""
        batch = TrainBatch(
            tokens=np.zeros(1, np.int32),
            cu_seqlens=np.array([0, 1]),
            rows=np.zeros(1, np.int64),
            targets=np.zeros(1, np.int32),
            row_offsets=np.array([0, 1]),
            loss_mask=np.zeros(1, np.bool_),
            columns={name: np.zeros(1, values.dtype) for name, values in whole.columns.items()},
            sequence_columns={name: np.zeros(1, values.dtype) for name, values in whole.sequence_columns.items()},
        )
        return cls._on(device, batch, np.empty(0, np.int64))

    @classmethod
    def _on(cls, device: torch.device, batch: TrainBatch, places: np.ndarray) -> MicroBatch:
        put = lambda array: torch.from_numpy(array.astype(np.int64, copy=False)).to(device)
        return cls(
            batch=batch,
            places=places,
            tokens=put(batch.tokens),
            layout=PackedLayout.from_lengths(batch.lengths, device),
            rows=put(batch.rows),
            targets=put(batch.targets),
        )
