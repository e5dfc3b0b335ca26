"""Layout of packed sequences: many sequences in one row, and the conversion between that row and a padded batch.

Linear layers, norms and the head see the packed row [T]; only attention sees the padded batch [B, L]. Plain causal
attention is correct there, since sequences are padded at their end: a real query never attends past itself.

Sequences that begin with the same tokens may share them: the row then holds these once, and the batch repeats them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.device_copy import on_device


class Shared(NamedTuple):
    """int64 [B] each: sequence b begins with the first ``tokens[b]`` tokens of sequence ``leader[b]``, which shares
    none itself."""

    leader: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class PackedLayout:
    """``B`` sequences of at most ``L`` tokens, ``T`` tokens in the row, ``N`` written out.

    ``positions`` int64 [T], ``pad_index`` int64 [B*L] (the token at each place of the batch; token 0 for padding),
    ``pad_mask`` bool [B*L] (True for the places that tokens are read from), ``unpad_index`` int64 [T] (that place of
    each token). ``written`` int64 [N]: the token at each position of the sequences written out one after the other;
    ``copies``: int64 tokens and their further places in the batch, no token twice in one of them.
    """

    batch: int
    length: int
    positions: Tensor
    pad_index: Tensor
    pad_mask: Tensor
    unpad_index: Tensor
    written: Tensor
    copies: Sequence[tuple[Tensor, Tensor]] = ()

    @classmethod
    def from_lengths(
        cls, lengths: np.ndarray, device: torch.device | str = "cpu", shared: Shared | None = None
    ) -> PackedLayout:
        lengths = np.asarray(lengths, dtype=np.int64)
        batch, length = len(lengths), int(lengths.max())
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        sequence = np.repeat(np.arange(batch), lengths)
        positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        places = sequence * length + positions
        owned = positions >= (0 if shared is None else shared.tokens[sequence])
        written = np.cumsum(owned) - 1
        copies = []
        if shared is not None:
            written = np.where(owned, written, written[starts[shared.leader[sequence]] + positions])
            for followers in _rounds(shared):
                of_round = ~owned & np.isin(sequence, followers)
                copies.append((written[of_round], places[of_round]))
        pad = np.zeros(batch * length, dtype=np.int64)
        pad[places] = written
        mask = np.zeros(batch * length, dtype=bool)
        mask[places[owned]] = True
        put = lambda a: on_device(a, torch.device(device))
        return cls(
            batch,
            length,
            put(positions[owned]),
            put(pad),
            put(mask),
            put(places[owned]),
            put(written),
            [(put(tokens), put(where)) for tokens, where in copies],
        )

    def pad(self, x_TX: Tensor) -> Tensor:
        """[T, ...] → [B, L, ...]; padding holds token 0's values, which causal attention never reads."""
        out = _Pad.apply(x_TX, self.pad_index, self.unpad_index, self.copies)
        return out.view(self.batch, self.length, *x_TX.shape[1:])

    def unpad(self, x_BLX: Tensor) -> Tensor:
        """[B, L, ...] → [T, ...]; of a shared token from one of its places."""
        flat = x_BLX.reshape(self.batch * self.length, *x_BLX.shape[2:])
        return _Unpad.apply(flat, self.pad_index, self.pad_mask, self.unpad_index)


def _rounds(shared: Shared) -> list[np.ndarray]:
    """Sequences that share tokens, no two of one leader in a round."""
    followers = np.flatnonzero(shared.tokens)
    nth = np.array([int((shared.leader[followers[:i]] == shared.leader[b]).sum()) for i, b in enumerate(followers)])
    return [followers[nth == k] for k in range(int(nth.max(initial=-1)) + 1)]


class _Pad(torch.autograd.Function):
    """Gathers in both passes: but for shared tokens the map is one to one, and ``index_select``'s own backward (an
    ``index_add_``, row by row on CPU, and on a GPU in any order) is many times slower. The gradient of padding is zero,
    as no real query reads it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pad_index: Tensor, unpad_index: Tensor, copies: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.save_for_backward(unpad_index)
        ctx.copies = copies
        return x.index_select(0, pad_index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (unpad_index,) = ctx.saved_tensors
        places = grad.contiguous().view(-1, *grad.shape[1:])
        out = places.index_select(0, unpad_index)
        if ctx.copies:
            total = out.float()
            for tokens, where in ctx.copies:  # no token twice, so the order is fixed on a GPU, too
                total.index_add_(0, tokens, places.index_select(0, where).float())
            out = total.to(out.dtype)
        return out, None, None, None


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
