"""Packed sequences in megatron-core: what a forward pass is told of them, and attention over them that needs no CUDA.

Shape suffixes: T packed tokens, H heads, K key/value heads, D head_dim, B sequences, L padded length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.models.config import CheckpointError
from asyncrl.models.layout import PackedLayout
from asyncrl.models.uploads import on_device
from asyncrl.trainer.backends.megatron import cpu
from asyncrl.trainer.batches import offsets

cpu.activate()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """What megatron-core and Transformer Engine read of the sequences that lie in one row, and ``layout``, which
    `PackedAttention` reads."""

    layout: PackedLayout

    @classmethod
    def of(cls, lengths: np.ndarray, layout: PackedLayout) -> PackedSequences:
        bounds = on_device(offsets(lengths).astype(np.int32), layout.positions.device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=layout.length,
            max_seqlen_kv=layout.length,
            layout=layout,
        )


class PackedAttention(MegatronModule):
    """The core attention of megatron-core's layers where Transformer Engine is absent: its own has no packed sequences.

    Causal within each sequence, on as many query heads for each key/value head as there are. Raises CheckpointError for
    a configuration that asks for more."""

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
        """[T, H·D]; the sequences are told by ``packed_seq_params`` alone."""
        layout, heads, groups = packed_seq_params.layout, query_THD.shape[1], key_TKD.shape[1]
        # one gather for the three: they are padded alike
        qkv_BXLD = layout.pad(torch.cat([query_THD, key_TKD, value_TKD], 1)).transpose(1, 2)
        q, k, v = qkv_BXLD.split([heads, groups, groups], 1)
        out_BHLD = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=heads != groups
        )
        return layout.unpad(out_BHLD.transpose(1, 2)).flatten(1)


def use_packed_attention(layers: list[ModuleSpec]) -> None:
    """Make it the core attention of these layers' specifications."""
    for layer in layers:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
