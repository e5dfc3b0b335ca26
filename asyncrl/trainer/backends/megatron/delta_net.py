"""Gated DeltaNet over packed sequences: linear attention of Qwen3-Next and Qwen3.5, with tensor parallelism.

megatron-core 0.16's layer takes one sequence per row and needs flash-linear-attention. This one has the same parameters
under the same names. Each sequence starts with an empty state and an empty convolution.

Shape suffixes: T packed tokens, M hidden size, C channels of q, k and v, B sequences, L padded length, N chunks of
S tokens, H value heads, K and V the sizes of a key and of a value; heads and channels are those of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.trainer.backends.megatron import packages
from asyncrl.trainer.backends.megatron.packed import PackedSequences

packages.prepare()

from megatron.core.tensor_parallel import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
except ImportError:  # a package for GPUs
    kernel = None


class DeltaNet(MegatronModule):
    """Replaces self attention in a megatron-core layer, using its linear modules."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        pg_collection: Any,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        ranks = pg_collection.tp.size()
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_heads, self.value_heads = config.linear_num_key_heads // ranks, config.linear_num_value_heads // ranks
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self._qkv = (keys, keys, values)
        #: this rank's rows of in_proj: q, k and v, output gate, write strength, decay
        self._rows = (2 * keys + values, values, self.value_heads, self.value_heads)
        common: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = submodules.linear_qkv(
            config.hidden_size,
            sum(self._rows) * ranks,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        made = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        channels, taps = self._rows[0], config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, bias=False, **made)
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads, **made))
        self.A_log = nn.Parameter(torch.zeros(self.value_heads, **made))
        for cut in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(cut, True, 0, 1)
        self.out_norm = nn.RMSNorm(self.value_dim, config.layernorm_epsilon, **made)
        self.out_proj = submodules.linear_proj(
            values * ranks,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )

    def forward(
        self, hidden_T1M: Tensor, attention_mask: None = None, *, packed_seq_params: PackedSequences, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        """([T, 1, M], bias); ``packed_seq_params`` alone describes the sequences."""
        projected, _ = self.in_proj(hidden_T1M)
        qkv_TC, gate, write_TH, keep_TH = projected.squeeze(1).split(self._rows, -1)
        qkv_TC = self._convolved(qkv_TC, packed_seq_params.positions[0])
        write_TH = write_TH.float().sigmoid()
        decay_TH = -self.A_log.float().exp() * F.softplus(keep_TH.float() + self.dt_bias)
        out_THV = self._attended(qkv_TC, write_TH, decay_TH, packed_seq_params)
        return self.out_proj(self._gated(out_THV, gate).flatten(1).unsqueeze(1))

    def _convolved(self, x_TC: Tensor, position_T: Tensor) -> Tensor:
        """Causal depthwise convolution within each sequence, then SiLU."""
        taps_CW = self.conv1d.weight.float().squeeze(1)
        total_TC = x_TC.float() * taps_CW[:, -1]
        for back in range(1, taps_CW.shape[1]):
            there_T1 = (position_T >= back)[:, None]
            total_TC = total_TC + x_TC.float().roll(back, 0) * there_T1 * taps_CW[:, -1 - back]
        return F.silu(total_TC).to(x_TC.dtype)

    def _attended(self, qkv_TC: Tensor, write_TH: Tensor, decay_TH: Tensor, sequences: PackedSequences) -> Tensor:
        """[T, H, V]"""
        if kernel is not None and qkv_TC.is_cuda:
            q, k, v = (x[None] for x in self._heads(qkv_TC))
            bounds = sequences.cu_seqlens_q.long()
            out, _ = kernel(q, k, v, g=decay_TH[None], beta=write_TH[None], cu_seqlens=bounds)
            return out[0]
        layout = sequences.layout
        # one gather for all three, which are padded alike
        packed = torch.cat([qkv_TC.float(), write_TH, decay_TH], -1)
        qkv_BLC, write_BLH, decay_BLH = layout.pad(packed).split([qkv_TC.shape[1], *self._rows[2:]], -1)
        out_BLHV = gated_delta_rule(*self._heads(qkv_BLC), decay_BLH, write_BLH)
        return layout.unpad(out_BLHV).to(qkv_TC.dtype)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[…, C] → unit-length queries and keys […, H, K], values […, H, V]"""
        q, k, v = qkv.split(self._qkv, -1)
        each = self.value_heads // self.key_heads
        q, k = (_normed(x.unflatten(-1, (-1, self.key_dim))).repeat_interleave(each, -2) for x in (q, k))
        return q, k, v.unflatten(-1, (-1, self.value_dim))

    def _gated(self, out_THV: Tensor, gate: Tensor) -> Tensor:
        # every rank applies the whole norm to its own heads, so the norm's gradients are summed
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight)
        normed = F.rms_norm(out_THV.float(), (self.value_dim,), eps=self.out_norm.eps).to(out_THV.dtype)
        gate_THV = gate.unflatten(-1, (-1, self.value_dim))
        return (weight * normed * F.silu(gate_THV.float())).to(out_THV.dtype)


def gated_delta_rule(
    q_BLHK: Tensor, k_BLHK: Tensor, v_BLHV: Tensor, decay_BLH: Tensor, write_BLH: Tensor, chunk: int = 64
) -> Tensor:
    """[B, L, H, V], computed in float32. A head's state [K, V] starts as zeros. Each token decays it by exp(decay),
    moves its value for the token's key towards the token's value by the fraction ``write``, and reads it with the
    query:

        S_t = e^{g_t} S_{t−1} + k_t β_t (v_t − e^{g_t} S_{t−1}ᵀ k_t)ᵀ        o_t = S_tᵀ q_t / √K

    Within a chunk of tokens, with c the cumulative decay, the writes U solve a triangular system:

        U = (I + tril(diag(β) (K Kᵀ ∘ e^{c_i − c_j}), −1))⁻¹ diag(β) (V − diag(e^c) K S)        (arXiv 2412.06464)

    solved for all chunks at once, up to S, the state before the chunk."""
    length, padding = q_BLHK.shape[1], -q_BLHK.shape[1] % chunk
    chunked = lambda x: F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding)).unflatten(1, (-1, chunk)).transpose(2, 3)
    q, k, v = chunked(q_BLHK * q_BLHK.shape[-1] ** -0.5), chunked(k_BLHK), chunked(v_BLHV)  # [B, N, H, S, …]
    decay_BNHS, write = chunked(decay_BLH).cumsum(-1), chunked(write_BLH).unsqueeze(-1)

    between = (decay_BNHS.unsqueeze(-1) - decay_BNHS.unsqueeze(-2)).tril().exp().tril()  # [B, N, H, S, S]
    faded = decay_BNHS.exp().unsqueeze(-1)
    system = write * (k @ k.mT) * between  # with an implied unit diagonal
    wanted = torch.cat([write * v, write * faded * k], -1)
    written, unwritten = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    within = (q @ k.mT) * between
    q = q * faded
    left = decay_BNHS[..., -1:]
    k = k * (left - decay_BNHS).exp().unsqueeze(-1)

    state_BHKV = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1])
    outs = []
    for n in range(q.shape[1]):
        new = written[:, n] - unwritten[:, n] @ state_BHKV
        outs.append(q[:, n] @ state_BHKV + within[:, n] @ new)
        state_BHKV = state_BHKV * left[:, n].exp().unsqueeze(-1) + k[:, n].mT @ new
    return torch.stack(outs, 1).transpose(2, 3).flatten(1, 2)[:, :length]


def _normed(x: Tensor) -> Tensor:
    """Normalize to unit length along the last dimension, as flash-linear-attention does."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
