"""Micro-batches as tensors: the forward pass's input, made from a rank's NumPy batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.decoder import DraftTargets
from asyncrl.models.device_copy import on_device
from asyncrl.models.layout import PackedLayout, Shared
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.batches import shareable
from asyncrl.trainer.draft_loss import draft_targets

PADDING = -1  # index of a placeholder's sequence


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch on the device: ``tokens``, int64 [T], ``rows`` and ``targets``, int64 [R]. Tokens of
    a group's prompt may be there once for all of its sequences.

    ``sequences``: their indices in the whole batch (``[PADDING]`` for a placeholder); ``places`` int64 [R]: their
    response rows in the whole batch (empty for a placeholder)."""

    batch: TrainBatch
    sequences: list[int]
    places: np.ndarray
    tokens: Tensor
    layout: PackedLayout
    rows: Tensor
    targets: Tensor

    @classmethod
    def of(
        cls, whole: TrainBatch, sequences: list[int], device: torch.device, blocks: Sequence[int] = ()
    ) -> MicroBatch:
        """``blocks``: numbers of consecutive sequences that attention pads together, where the sequences of a group
        share their prompt; empty: none shares any, and all are padded together."""
        bounds = whole.row_offsets
        places = np.concatenate([np.arange(bounds[b], bounds[b + 1]) for b in sequences])
        batch = whole.select(sequences)
        return cls._on(device, batch, sequences, places, shared_prompts(batch) if blocks else None, blocks)

    @classmethod
    def placeholder(cls, whole: TrainBatch, device: torch.device) -> MicroBatch:
        """One token of weight zero, for a rank that has run out of sequences but must take part in collectives."""
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
        return cls._on(device, batch, [PADDING], np.empty(0, np.int64))

    def drafts(self, depths: int) -> list[DraftTargets]:
        """The draft's targets at each depth; empty for a placeholder."""
        device = self.tokens.device
        return [
            DraftTargets(*(_on_device(array, device) for array in draft_targets(self.batch, depth)))
            for depth in range(1, depths + 1)
        ]

    @classmethod
    def _on(
        cls,
        device: torch.device,
        batch: TrainBatch,
        sequences: list[int],
        places: np.ndarray,
        shared: Shared | None = None,
        blocks: Sequence[int] = (),
    ) -> MicroBatch:
        layout = PackedLayout.from_lengths(batch.lengths, device, shared, blocks)
        tokens, rows = _on_device(batch.tokens, device), _on_device(batch.rows, device)
        if shared is not None:
            rows = layout.written.index_select(0, rows)
            tokens = tokens.new_empty(len(layout.positions)).scatter_(0, layout.written, tokens)
        return cls(
            batch=batch,
            sequences=sequences,
            places=places,
            tokens=tokens,
            layout=layout,
            rows=rows,
            targets=_on_device(batch.targets, device),
        )


def shared_prompts(batch: TrainBatch) -> Shared:
    """What the sequences of each group share of their prompt."""
    group, tokens = batch.sequence_columns["group"], shareable(batch)
    by_tokens = np.lexsort((-tokens, group))  # the longest first
    first = by_tokens[np.unique(group[by_tokens], return_index=True)[1]]
    leader = first[np.searchsorted(group[first], group)]
    return Shared(leader, np.where(leader == np.arange(len(batch)), 0, tokens))


def _on_device(array: np.ndarray, device: torch.device) -> Tensor:
    return on_device(array.astype(np.int64, copy=False), device)
