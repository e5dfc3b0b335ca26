"""Packed sequences in megatron-core: a rank's share of a micro-batch, and attention without Transformer Engine.

Context parallel ranks share every sequence in zigzag, as Transformer Engine expects: padded at its end to a multiple of
2 · ranks, it is split into 2 · ranks chunks, and rank i has the i-th from either end. This balances causal attention.

Shape suffixes: T this rank's tokens, P packed positions of the whole micro-batch, R some of these, G the padded tokens
of all ranks concatenated, B sequences, L padded length, H heads, K key/value heads, D head_dim, M hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from asyncrl.models.config import CheckpointError
from asyncrl.models.device_copy import on_device
from asyncrl.models.layout import PackedLayout
from asyncrl.trainer.backends.megatron import packages
from asyncrl.trainer.batches import offsets

packages.prepare()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class Zigzag(NamedTuple):
    """Zigzag layout. For each place of the padded sequences in order: the packed position of its token (padding has the
    last token's), whether it is real, its position in its sequence, the rank that owns it, and its index among that
    rank's tokens. ``lengths`` [B] include padding."""

    source: np.ndarray
    real: np.ndarray
    position: np.ndarray
    owner: np.ndarray
    local: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, ranks: int, multiple: int = 1) -> Zigzag:
        """Each rank gets a multiple of ``multiple`` tokens of each sequence, independently of the rest of the batch."""
        chunks = 2 * ranks if ranks > 1 else 1
        padded = -(-lengths // (chunks * multiple)) * (chunks * multiple)
        each = lambda values_B: np.repeat(values_B, padded)
        position = np.arange(padded.sum()) - each(offsets(padded)[:-1])
        chunk, place = np.divmod(position, each(padded // chunks))
        later = each(padded // chunks) * (chunk >= ranks)
        return cls(
            source=each(offsets(lengths)[:-1]) + np.minimum(position, each(lengths) - 1),
            real=position < each(lengths),
            position=position,
            owner=np.minimum(chunk, chunks - 1 - chunk),
            local=each(offsets(padded)[:-1] // ranks) + place + later,
            lengths=padded,
        )


class Across(NamedTuple):
    """Indices across context parallel ranks. ``keys``: layout of all ranks' gathered tokens [G] in a padded batch;
    ``mask`` bool [B, 1, l, L]: the keys that each own query sees. ``previous`` and ``next`` int64 [T]: index in [G] of
    the token before and after each own one; ``owner`` int64 [P]: rank that owns a packed position."""

    keys: PackedLayout
    mask: Tensor
    previous: Tensor
    next: Tensor
    owner: Tensor

    @classmethod
    def of(cls, cut: Zigzag, mine: np.ndarray, layout: PackedLayout, positions: Tensor) -> Across:
        """``mine``: this rank's places in the zigzag; ``layout`` and ``positions`` of its tokens."""
        put = lambda array: on_device(array, positions.device)
        whole, gathered = PackedLayout.from_lengths(cut.lengths), cut.owner * len(mine) + cut.local
        keys = replace(
            whole,
            pad_index=put(gathered[whole.pad_index.numpy()]),
            pad_mask=put(whole.pad_mask),
            unpad_index=put(whole.unpad_index.numpy()[np.argsort(gathered)]),
        )
        return cls(
            keys=keys,
            mask=layout.pad(positions)[:, None, :, None] >= torch.arange(whole.length, device=positions.device),
            previous=put(gathered[np.maximum(mine - 1, 0)]),
            next=put(gathered[np.minimum(mine + 1, len(gathered) - 1)]),
            owner=put(cut.owner[cut.real]),
        )


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Packed sequence parameters of megatron-core and Transformer Engine, extended by this rank's share.

    ``tokens``, ``following`` (the token after each) and ``positions``: int64 [1, T]; ``layout``: that of their queries.
    ``local`` int64 [P]: a packed position's index among its owner's tokens; None if these are contiguous. ``group``:
    the context parallel ranks; ``across``: None for a single one."""

    tokens: Tensor
    following: Tensor
    positions: Tensor
    layout: PackedLayout
    local: Tensor | None
    group: dist.ProcessGroup
    across: Across | None

    @classmethod
    def of(
        cls,
        tokens_P: Tensor,
        lengths_B: np.ndarray,
        layout: PackedLayout,
        group: dist.ProcessGroup,
        multiple: int = 1,
    ) -> PackedSequences:
        """This rank's share of sequences of ``lengths_B``: a multiple of ``multiple`` tokens of each. ``layout``: of
        the whole sequences."""
        device, following_P, positions = tokens_P.device, tokens_P.roll(-1), layout.positions
        local, across = None, None
        if group.size() > 1 or multiple > 1:
            cut = Zigzag.of(lengths_B, group.size(), multiple)
            mine = np.flatnonzero(cut.owner == group.rank())
            source, positions = (on_device(array[mine], device) for array in (cut.source, cut.position))
            tokens_P, following_P = tokens_P[source], following_P[source]
            layout = PackedLayout.from_lengths(cut.lengths // group.size(), device)
            local = on_device(cut.local[cut.real], device)
            across = Across.of(cut, mine, layout, positions) if group.size() > 1 else None
            lengths_B = cut.lengths
        bounds, longest = on_device(offsets(lengths_B).astype(np.int32), device), int(lengths_B.max())
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            tokens=tokens_P[None],
            following=following_P[None],
            positions=positions[None],
            layout=layout,
            local=local,
            group=group,
            across=across,
        )

    def before(self, states_T1M: Tensor) -> Tensor:
        """[T, 1, M]: the state of each position's predecessor; meaningless at first positions."""
        if self.across is None:
            return states_T1M.roll(1, 0)
        gathered = gather_from_sequence_parallel_region(states_T1M, group=self.group)
        return gathered.index_select(0, self.across.previous)

    def after(self, states_T1M: Tensor) -> Tensor:
        """[T, 1, M]: the state of each position's successor; meaningless at last positions."""
        if self.across is None:
            return states_T1M.roll(-1, 0)
        gathered = gather_from_sequence_parallel_region(states_T1M, group=self.group)
        return gathered.index_select(0, self.across.next)

    def rows(self, states_T1M: Tensor, places_R: Tensor) -> tuple[Tensor, Tensor | slice]:
        """(states [r, M] of the packed positions that this rank has, their indices in ``places_R``)"""
        places_r, mine_r = self.here(places_R)
        return states_T1M.squeeze(1).index_select(0, places_r), mine_r

    def here(self, places_R: Tensor) -> tuple[Tensor, Tensor | slice]:
        """(indices among this rank's tokens [r], their indices in ``places_R``)"""
        mine_r: Tensor | slice = slice(None)
        if self.across is not None:
            mine_r = torch.nonzero(self.across.owner[places_R] == self.group.rank()).squeeze(1)
        return places_R[mine_r] if self.local is None else self.local[places_R[mine_r]], mine_r

    def of_all(self, values_Xr: Tensor, mine_r: Tensor | slice, rows: int) -> Tensor:
        """[X, R]: values of all positions, assembled from those of each rank."""
        if self.across is None:
            return values_Xr
        return _OfAll.apply(values_Xr, mine_r, rows, self.group)


class _OfAll(torch.autograd.Function):
    """All-gather by position. All ranks compute the same function of the result, so the backward pass needs no sum."""

    @staticmethod
    def forward(ctx: Any, values_Xr: Tensor, mine_r: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(mine_r)
        values_XR = values_Xr.new_zeros(len(values_Xr), rows)
        values_XR[:, mine_r] = values_Xr
        dist.all_reduce(values_XR, group=group)
        return values_XR

    @staticmethod
    def backward(ctx: Any, gradient_XR: Tensor) -> Any:  # type: ignore[override]
        (mine_r,) = ctx.saved_tensors
        return gradient_XR[:, mine_r], None, None, None


class PackedAttention(MegatronModule):
    """Core attention for megatron-core's layers without Transformer Engine: its own supports neither packed sequences
    nor context parallelism. Context parallel ranks all-gather keys and values, and reduce-scatter their gradients.

    Causal within each sequence, with any number of query heads per key/value head. Raises CheckpointError for
    configurations that need more."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **placement: Any) -> None:
        super().__init__(config)
        for name, plain in (("window_size", None), ("softmax_type", "vanilla"), ("attention_dropout", 0.0)):
            if (found := getattr(config, name)) != plain:
                raise CheckpointError(
                    f"attention with {name}={found} needs Transformer Engine, which is not installed; expected {plain}"
                )
        self._scale = softmax_scale

    def forward(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedSequences,
        **others: Any,
    ) -> Tensor:
        """[T, H·D]; ``packed_seq_params`` alone describes the sequences."""
        layout, across = packed_seq_params.layout, packed_seq_params.across
        heads, groups = query_THD.shape[1], key_TKD.shape[1]
        if across is None:
            # one gather for all three, which are padded alike
            qkv_BXLD = layout.pad(torch.cat([query_THD, key_TKD, value_TKD], 1)).transpose(1, 2)
            q, k, v = qkv_BXLD.split([heads, groups, groups], 1)
        else:
            kv_GXD = gather_from_sequence_parallel_region(
                torch.cat([key_TKD, value_TKD], 1), group=packed_seq_params.group
            )
            k, v = across.keys.pad(kv_GXD).transpose(1, 2).chunk(2, 1)
            q = layout.pad(query_THD).transpose(1, 2)
        out_BHLD = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if across is None else across.mask,
            is_causal=across is None,
            scale=self._scale,
            enable_gqa=heads != groups,
        )
        return layout.unpad(out_BHLD.transpose(1, 2)).flatten(1)
