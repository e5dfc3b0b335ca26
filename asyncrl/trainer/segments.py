"""Reductions over the token sequences of a micro-batch, for items of algorithms."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from asyncrl.models.device_copy import on_device


class RowSegments:
    """Implements `asyncrl.algorithms.items.Segments`. ``row_offsets`` int64 [B+1]: the sequences' bounds in ``R``
    response tokens; ``trained`` bool [R]."""

    def __init__(self, row_offsets: np.ndarray, trained: Tensor) -> None:
        self._row_offsets, self.trained = row_offsets, trained

    def sum(self, values: Tensor) -> Tensor:
        lengths = np.diff(self._row_offsets)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(sequence)) - self._row_offsets[sequence]
        sequence_R, place_R = (on_device(index, self.trained.device) for index in (sequence, place))
        # padded rows: the bits of their sums do not depend on an order of atomic additions
        rows = values.new_zeros(len(lengths), int(lengths.max(initial=0)))
        rows = rows.index_put((sequence_R, place_R), values.where(self.trained, values.new_zeros(())))
        return rows.sum(1)[sequence_R]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.sum(self.trained.to(values.dtype)).clamp(min=1)
