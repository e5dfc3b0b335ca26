"""Attention over KV slots, one slot per row: one position per row in decode, several when drafts are verified.

Shape suffixes: N rows (slots), J positions of each row, X = N·J of them row by row, L KV length attended, H heads, K
key/value heads, G heads per key/value head, D head_dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.models.config import DecoderConfig
from asyncrl.rollouter.engines.native.kv import KVCache

# of one slot and key/value head, in a kernel's shared memory. Recorded passes have fewer, of the draft those of
# mtp.num_speculative_tokens + 1 places, so that none depends on a length
_MOST_QUERIES = 512


class DecodePositions:
    """Cache positions of one pass's rows. Writes their keys and values; each position attends to its own slot up to
    itself. Row n has slot ``first + n``. The first ``length`` ≥ every position + 1 entries are attended."""

    def __init__(self, c: DecoderConfig, kv: KVCache, positions_NJ: Tensor, length: int, first: int = 0) -> None:
        self._c, self._kv, self._length = c, kv, length
        self._n, self._j = positions_NJ.shape
        self._positions_NJ = positions_NJ
        self._bias: Tensor | None = None
        self._slots = slice(first, first + self._n)
        self._heads = slice(first * c.num_kv_heads, (first + self._n) * c.num_kv_heads)
        heads = torch.arange(self._heads.start, self._heads.stop, device=positions_NJ.device)
        heads_N1K = heads.view(self._n, 1, -1)
        # [N·J·K] rows of [S·K·context, D]
        self._into = (heads_N1K * kv.context_tokens + positions_NJ.unsqueeze(2)).view(-1)
        self._scale = 1.0 / math.sqrt(c.head_dim)

    def write(self, layer: int, k_XKD: Tensor, v_XKD: Tensor) -> None:
        d = self._c.head_dim
        self._kv.keys[layer].view(-1, d).index_copy_(0, self._into, k_XKD.reshape(-1, d))
        self._kv.values[layer].view(-1, d).index_copy_(0, self._into, v_XKD.reshape(-1, d))

    def attend(self, layer: int, q_XHD: Tensor) -> Tensor:
        """[X, H·D], over the current cache."""
        c, n, j = self._c, self._n, self._j
        if q_XHD.is_cuda and j * (c.num_heads // c.num_kv_heads) <= _MOST_QUERIES:
            from asyncrl.rollouter.engines.native import fused  # triton comes with torch for GPUs only

            keys_NKLD, values_NKLD = self._kv.keys[layer][self._slots], self._kv.values[layer][self._slots]
            return fused.attend(q_XHD.contiguous(), self._positions_NJ.reshape(-1), keys_NKLD, values_NKLD, j)
        groups = c.num_heads // c.num_kv_heads
        keys = self._kv.keys[layer].view(-1, self._kv.context_tokens, c.head_dim)[self._heads, : self._length]
        values = self._kv.values[layer].view(-1, self._kv.context_tokens, c.head_dim)[self._heads, : self._length]
        if j == 1:
            q = q_XHD.reshape(-1, groups, c.head_dim)
        else:
            q = q_XHD.reshape(n, j, -1, groups * c.head_dim).transpose(1, 2).reshape(-1, j * groups, c.head_dim)
        # with few queries per row, two batched products beat torch's fused kernel on a CPU
        scores = torch.baddbmm(self._biased(q.dtype), q, keys.transpose(1, 2), alpha=self._scale)  # [N·K, J·G, L]
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        out = torch.bmm(weights, values)
        if j == 1:
            return out.view(n, -1)
        return out.view(n, -1, j, groups * c.head_dim).transpose(1, 2).reshape(n * j, -1)

    def __call__(self, layer: int, q_XHD: Tensor, k_XKD: Tensor, v_XKD: Tensor) -> Tensor:
        self.write(layer, k_XKD, v_XKD)
        return self.attend(layer, q_XHD)

    def _biased(self, dtype: torch.dtype) -> Tensor:
        """0 where attended, −∞ elsewhere: [N·K, 1 or J·G, L]."""
        if self._bias is None:
            c, n, j, length = self._c, self._n, self._j, self._length
            seen_NJL = torch.arange(length, device=self._into.device) <= self._positions_NJ.unsqueeze(2)
            bias_NJL = torch.zeros((), dtype=dtype, device=self._into.device).where(seen_NJL, -math.inf)
            if j == 1:
                self._bias = bias_NJL[:, None].expand(n, c.num_kv_heads, 1, length).reshape(-1, 1, length)
            else:
                groups = c.num_heads // c.num_kv_heads
                bias = bias_NJL[:, None, :, None].expand(n, c.num_kv_heads, j, groups, length)
                self._bias = bias.reshape(-1, j * groups, length)
        return self._bias
