"""Layout of packed sequences: many sequences in one row, and the conversion between that row and a padded batch.

Linear layers, norms and the head see the packed row [T]; only attention sees the padded batch [B, L]. Plain causal
attention is correct there, since sequences are padded at their end: a real query never attends past itself.

Sequences that begin with the same tokens may share them: the row then holds these once, and the batch repeats them.
Sequences of different lengths may be padded in several blocks, each to its own longest.
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
    """``T`` tokens in the row, ``N`` written out; ``blocks`` of ``B`` sequences of at most ``L`` tokens, with ``P`` =
    Σ B·L places.

    ``positions`` int64 [T], ``pad_index`` int64 [P] (the token at each place of the blocks; token 0 for padding),
    ``pad_mask`` bool [P] (True for the places that tokens are read from), ``unpad_index`` int64 [T] (that place of
    each token). ``written`` int64 [N]: the token at each position of the sequences written out one after the other;
    ``copies``: int64 tokens and their further places in the blocks, no token twice in one of them.
    """

    blocks: Sequence[tuple[int, int]]
    positions: Tensor
    pad_index: Tensor
    pad_mask: Tensor
    unpad_index: Tensor
    written: Tensor
    copies: Sequence[tuple[Tensor, Tensor]] = ()

    @classmethod
    def from_lengths(
        cls,
        lengths: np.ndarray,
        device: torch.device | str = "cpu",
        shared: Shared | None = None,
        blocks: Sequence[int] = (),
    ) -> PackedLayout:
        """``blocks``: numbers of consecutive sequences that are padded together; empty: all."""
        lengths = np.asarray(lengths, dtype=np.int64)
        counts = np.array(blocks or [len(lengths)])
        longest = np.maximum.reduceat(lengths, np.cumsum(counts) - counts)
        places_B = np.repeat(longest, counts)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        places = (np.cumsum(places_B) - places_B)[sequence] + positions
        owned = positions >= (0 if shared is None else shared.tokens[sequence])
        written = np.cumsum(owned) - 1
        copies = []
        if shared is not None:
            written = np.where(owned, written, written[starts[shared.leader[sequence]] + positions])
            for followers in _rounds(shared):
                of_round = ~owned & np.isin(sequence, followers)
                copies.append((written[of_round], places[of_round]))
        pad = np.zeros(places_B.sum(), dtype=np.int64)
        pad[places] = written
        mask = np.zeros(len(pad), dtype=bool)
        mask[places[owned]] = True
        put = lambda a: on_device(a, torch.device(device))
        return cls(
            list(zip(counts.tolist(), longest.tolist())),
            put(positions[owned]),
            put(pad),
            put(mask),
            put(places[owned]),
            put(written),
            [(put(tokens), put(where)) for tokens, where in copies],
        )

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return sum(batch for batch, _ in self.blocks)

    @property
    def length(self) -> int:
        """Of the longest sequence."""
        return max(length for _, length in self.blocks)

    def pad(self, x_TX: Tensor) -> Tensor:
        """`pad_blocks` of a layout with one block."""
        (x_BLX,) = self.pad_blocks(x_TX)
        return x_BLX

    def unpad(self, x_BLX: Tensor) -> Tensor:
        """`unpad_blocks` of a layout with one block."""
        return self.unpad_blocks([x_BLX])

    def pad_blocks(self, x_TX: Tensor) -> list[Tensor]:
        """[T, ...] → [B, L, ...] of each block; padding holds token 0's values, which causal attention never reads."""
        out = _Pad.apply(x_TX, self.pad_index, self.unpad_index, self.copies)
        one = len(self.blocks) == 1  # without a split, whose backward pass is a copy
        parts = [out] if one else out.split([batch * length for batch, length in self.blocks])
        return [part.view(*block, *x_TX.shape[1:]) for part, block in zip(parts, self.blocks)]

    def unpad_blocks(self, blocks: Sequence[Tensor]) -> Tensor:
        """[B, L, ...] of each block → [T, ...]; of a shared token from one of its places."""
        parts = [x_BLX.reshape(-1, *x_BLX.shape[2:]) for x_BLX in blocks]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
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
