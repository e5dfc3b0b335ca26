"""Layout of packed sequences: many sequences in one row, and the conversion between that row and a padded batch.

Linear layers, norms and the head see the packed row [T]; only attention sees the padded batch [B, L]. Plain causal
attention is correct there, since sequences are padded at their end: a real query never attends past itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.device_copy import on_device


@dataclass(frozen=True)
class PackedLayout:
    """``B`` sequences of at most ``L`` tokens, ``T`` tokens in all.

    ``positions`` int64 [T], ``pad_index`` int64 [B*L] (the token at each place of the batch; token 0 for padding),
    ``pad_mask`` bool [B*L] (True for real tokens), ``unpad_index`` int64 [T] (each token's place in the batch).
    """

    batch: int
    length: int
    positions: Tensor
    pad_index: Tensor
    pad_mask: Tensor
    unpad_index: Tensor

    @classmethod
    def from_lengths(cls, lengths: np.ndarray, device: torch.device | str = "cpu") -> PackedLayout:
        lengths = np.asarray(lengths, dtype=np.int64)
        batch, length = len(lengths), int(lengths.max())
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        sequence = np.repeat(np.arange(batch), lengths)
        positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        unpad = sequence * length + positions
        pad = np.zeros(batch * length, dtype=np.int64)
        pad[unpad] = np.arange(len(unpad))
        mask = np.zeros(batch * length, dtype=bool)
        mask[unpad] = True
        put = lambda a: on_device(a, torch.device(device))
        return cls(batch, length, put(positions), put(pad), put(mask), put(unpad))

    def pad(self, x_TX: Tensor) -> Tensor:
        """[T, ...] → [B, L, ...]; padding holds token 0's values, which causal attention never reads."""
        out = _Pad.apply(x_TX, self.pad_index, self.unpad_index)
        return out.view(self.batch, self.length, *x_TX.shape[1:])

    def unpad(self, x_BLX: Tensor) -> Tensor:
        """[B, L, ...] → [T, ...]"""
        flat = x_BLX.reshape(self.batch * self.length, *x_BLX.shape[2:])
        return _Unpad.apply(flat, self.pad_index, self.pad_mask, self.unpad_index)


class _Pad(torch.autograd.Function):
    """Gathers in both passes: the map is one to one, and ``index_select``'s own backward (an ``index_add_``, row by row
    on CPU) is many times slower. The gradient of padding is zero, as no real query reads it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad_index: Tensor, unpad_index: Tensor) -> Tensor:
        ctx.save_for_backward(unpad_index)
        return x.index_select(0, pad_index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (unpad_index,) = ctx.saved_tensors
        return grad.contiguous().view(-1, *grad.shape[1:]).index_select(0, unpad_index), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pad_index: Tensor, pad_mask: Tensor, unpad_index: Tensor) -> Tensor:
        ctx.save_for_backward(pad_index, pad_mask)
        return x.index_select(0, unpad_index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        pad_index, pad_mask = ctx.saved_tensors
        shape = (-1,) + (1,) * (grad.dim() - 1)
        out = grad.index_select(0, pad_index).masked_fill_(~pad_mask.view(shape), 0)
        return out, None, None, None
