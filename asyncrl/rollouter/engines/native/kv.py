"""KV cache: one slot per running sequence, in one allocation that can be freed.

Shape suffixes: S slots, K key/value heads, L context tokens, D head_dim, M hidden size.
"""

from __future__ import annotations

import math
import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.models.config import DecoderConfig


class SlotKV(NamedTuple):
    """A slot's first n positions: ``kv`` [layers, 2, K, n, D] and ``hidden`` [MTP layers, n, M]."""

    kv: Tensor
    hidden: Tensor

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + self.hidden.nbytes

    def copy(self) -> SlotKV:
        return SlotKV(self.kv.clone(), self.hidden.clone())

    def first(self, tokens: int) -> SlotKV:
        """Its first ``tokens`` positions, not copied."""
        return SlotKV(self.kv[:, :, :, :tokens], self.hidden[:, :tokens])


class KVCache:
    """Keys and values of all layers, ``[layers, 2, S, K, L, D]`` in one allocation.

    ``keys[i]`` and ``values[i]`` are layer i's ``[S, K, L, D]``. With ``draft`` the MTP layers follow the trunk's, and
    ``hidden[i]`` [S, L, M] is the hidden-state input of MTP layer i: the trunk's hidden states, then the outputs of the
    previous MTP layer. `release` returns the memory to the system, `restore` allocates it again, empty. Fresh memory is
    zero: attention may multiply masked values by zero, so they must be finite.
    """

    def __init__(
        self,
        config: DecoderConfig,
        slots: int,
        context_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        draft: bool = False,
    ) -> None:
        self.slots, self.context_tokens = slots, context_tokens
        drafting = config.num_mtp_layers if draft else 0
        layers = config.num_layers + drafting
        self._shape = (layers, 2, slots, config.num_kv_heads, context_tokens, config.head_dim)
        self._hidden_shape = (drafting, slots, context_tokens, config.hidden_size)
        self._dtype, self._device = dtype, device
        self._data: Tensor | None = None
        self._hidden: Tensor | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.hidden: list[Tensor] = []
        self.restore()

    @property
    def allocated(self) -> bool:
        return self._data is not None

    @property
    def nbytes(self) -> int:
        """Bytes held; 0 after `release`."""
        return sum(held.nbytes for held in (self._data, self._hidden) if held is not None)

    def release(self) -> int:
        """Free the memory; returns its bytes, 0 if it was already free."""
        freed = self.nbytes
        self._data = self._hidden = None
        self.keys, self.values, self.hidden = [], [], []
        if freed and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def restore(self) -> None:
        """Allocate again, with nothing cached; no effect if allocated."""
        if self._data is not None:
            return
        data, hidden = (_zeros(shape, self._dtype, self._device) for shape in (self._shape, self._hidden_shape))
        self._data, self._hidden = data, hidden
        self.keys, self.values = list(data[:, 0].unbind(0)), list(data[:, 1].unbind(0))
        self.hidden = list(hidden.unbind(0))

    def view(self, slot: int, tokens: int) -> SlotKV:
        """The slot's first ``tokens`` positions, not copied."""
        assert self._data is not None
        assert self._hidden is not None
        return SlotKV(self._data[:, :, slot], self._hidden[:, slot]).first(tokens)

    def clear(self, slot: int) -> None:
        """Zero a slot in all layers."""
        for held in self.view(slot, self.context_tokens):
            held.zero_()

    def load(self, slot: int, saved: SlotKV) -> None:
        """Copy these positions, of another slot or of none, to the first ones of the slot."""
        for held, given in zip(self.view(slot, saved.kv.shape[3]), saved, strict=True):
            held.copy_(given)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of zeros. On a CPU the system makes each page when it is first written, so what is never used costs
    neither time nor memory."""
    if device.type != "cpu" or not (nbytes := math.prod(shape) * dtype.itemsize):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)
