"""The decoder for generation: fused weights, a KV cache, no autograd, and live views under checkpoint names.

Shape suffixes: N rows (slots), J places per row in one pass, T tokens of one prefill chunk, S slots, L KV length
attended, H heads, K key/value heads, D head_dim, M hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.models.checkpoint import load_decoder
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import rope_table
from asyncrl.models.device_copy import on_device
from asyncrl.rollouter.engines.native.attention import DecodePositions
from asyncrl.rollouter.engines.native.kernels import Linear, unit_rms
from asyncrl.rollouter.engines.native.kv import KVCache

#: (layer, queries [X, H, D]), whose keys and values the cache holds → attended [X, H·D], or None if unused
AttendToCache = Callable[[int, Tensor], Tensor | None]

#: (layer, queries [N, H, D], keys [N, K, D], values [N, K, D]) → attended [N, H·D], or None if unused
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]


class Placed(NamedTuple):
    """Tokens (int64 [N]) at the positions ``start`` … of a slot."""

    tokens: np.ndarray
    slot: int
    start: int


class NativeModel:
    """Weights of one decoder and the two passes that generation needs: `prefill` a chunk, `decode` one token per row
    (`hidden_states`: several).

    Projections with the same input are fused into one matrix. `named_views` are its parts under the safetensors names;
    call `refresh` after writing to them in place. Weights are zeros until `load`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        context_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        float32_head: bool = False,
    ) -> None:
        self.config, self.dtype = config, dtype
        # with its index: "cuda" means each thread's current device
        self.device = torch.empty(0, device=device).device
        self._empty = lambda *shape: torch.zeros(shape, dtype=dtype, device=self.device)
        self.embed = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [_Layer(config, self._empty) for _ in range(config.num_layers)]
        self.norm = self._empty(config.hidden_size)
        head = self.embed if config.tie_word_embeddings else self._empty(*self.embed.shape)
        self.head = Linear(head, float32=float32_head)
        self.draft = [DraftLayer(config, self._empty) for _ in range(config.num_mtp_layers)]
        cos_T1D, sin_T1D = rope_table(config, torch.arange(context_tokens))
        # rotate(x) = x·cos + swap(x)·sin, with the sign of the swapped half in the table
        sin_T1D[..., : config.head_dim // 2].neg_()
        self._rope = torch.stack([cos_T1D, sin_T1D], 1).to(self.device, dtype)  # [context, 2, 1, D]
        self._places = torch.arange(context_tokens, device=self.device)

    def load(self, path: str | Path, mtp_from_trunk: bool = False) -> None:
        """Read a checkpoint folder. Raises CheckpointError as `asyncrl.models.checkpoint.load_decoder` does."""
        views = self.named_views()
        with torch.no_grad():
            for name, parameter in load_decoder(path, self.dtype, mtp_from_trunk).named_parameters():
                views[name].copy_(parameter)
        self.refresh()

    def refresh(self) -> None:
        """Must be called after writing to the views: large matrices are also kept in the kernel's layout."""
        for matrix in (self.head, *(m for layer in [*self.layers, *self.draft] for m in layer.matrices())):
            matrix.refresh()

    def named_views(self) -> dict[str, Tensor]:
        """Safetensors name → live view, of target and draft; without a tied head, see `tied`."""
        views = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        for i, layer in enumerate(self.layers):
            views |= dict(layer.views(f"model.layers.{i}."))
        for i, draft in enumerate(self.draft):
            views |= dict(draft.views(f"model.mtp_layers.{i}."))
        if not self.config.tie_word_embeddings:
            views["lm_head.weight"] = self.head.weight
        return views

    def tied(self) -> dict[str, str]:
        """Name of a tied tensor → the name whose storage it shares."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    def decode(self, tokens_N: Tensor, positions_N: Tensor, kv: KVCache, length: int) -> Tensor:
        """Logits [N, V] after row n's token (int64) at its position, for slots 0 … N−1. Attends to the cache's first
        ``length`` entries, at least every position + 1 (a GPU reads each row's own, up to its position), and writes
        keys and values to each row's slot and position."""
        return self.head(self.hidden_states(tokens_N.unsqueeze(1), positions_N.unsqueeze(1), kv, length))

    def hidden_states(self, tokens_NJ: Tensor, positions_NJ: Tensor, kv: KVCache, length: int) -> Tensor:
        """Like `decode` for J tokens per row at consecutive positions: hidden states [N·J, M] after the final norm."""
        tokens_X, positions_X = tokens_NJ.reshape(-1), positions_NJ.reshape(-1)
        if self.device.type == "cuda":
            from asyncrl.rollouter.engines.native import fused

            rows, places = positions_NJ.shape
            slots_X = torch.arange(rows, device=self.device).repeat_interleave(places, output_size=rows * places)
            attend = lambda i, q_XHD: fused.attend(q_XHD, positions_X, kv.keys[i], kv.values[i], places)
            hidden_XM = self._fused_trunk(tokens_X, slots_X, positions_X, kv, attend)
            assert hidden_XM is not None
            return hidden_XM
        return self._trunk(tokens_X, positions_X, DecodePositions(self.config, kv, positions_NJ, length))

    def prefill(
        self, tokens_T: Tensor, slot: int, start: int, kv: KVCache, valid: int, length: int, keep_hidden: bool = False
    ) -> None:
        """Compute keys and values of ``tokens_T`` (int64) at positions ``start`` … of ``slot`` and store the first
        ``valid`` of them. Attends to the cache's first ``length`` ≥ start + valid places: padding tokens and a fixed
        length give every prompt the same shapes. With ``keep_hidden``, also stores the hidden states for the draft."""
        c = self.config
        positions_T = torch.arange(start, start + len(tokens_T), device=self.device).clamp_(max=len(self._places) - 1)
        causal = start == 0 and length == len(tokens_T)
        seen_TL = None if causal else self._places[:length] <= positions_T.unsqueeze(1)

        def attend(i: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor | None:
            keys_KLD, values_KLD = kv.keys[i][slot], kv.values[i][slot]
            keys_KLD[:, start : start + valid] = k_TKD[:valid].transpose(0, 1)
            values_KLD[:, start : start + valid] = v_TKD[:valid].transpose(0, 1)
            if i == c.num_layers - 1 and not keep_hidden:
                return None  # a prefill only fills the cache
            return _attended(q_THD, keys_KLD[:, :length], values_KLD[:, :length], seen_TL).flatten(1)

        hidden_TM = self._trunk(tokens_T, positions_T, attend)
        if keep_hidden:
            kv.hidden[0][slot, start : start + valid] = hidden_TM[:valid]

    def prefill_together(self, chunks: Sequence[Placed], kv: KVCache, keep_hidden: bool = False) -> None:
        """`prefill` of chunks of different slots in one pass, on a GPU, whose launches cost as much for few tokens as
        for many."""
        c, sizes = self.config, [len(chunk.tokens) for chunk in chunks]
        slots = np.repeat([chunk.slot for chunk in chunks], sizes)
        positions = np.concatenate([chunk.start + np.arange(size) for chunk, size in zip(chunks, sizes)])
        tokens_T = on_device(np.concatenate([chunk.tokens for chunk in chunks]), self.device)
        slots_T, positions_T = on_device(slots, self.device), on_device(positions, self.device)
        seen = [
            None if chunk.start == 0 else self._places[: chunk.start + size] <= positions_N1
            for chunk, size, positions_N1 in zip(chunks, sizes, positions_T.unsqueeze(1).split(sizes))
        ]

        def attend(i: int, q_THD: Tensor) -> Tensor | None:
            if i == c.num_layers - 1 and not keep_hidden:
                return None  # a prefill only fills the cache
            out_THD = torch.empty_like(q_THD)
            for chunk, seen_NL, q_NHD, out_NHD in zip(chunks, seen, q_THD.split(sizes), out_THD.split(sizes)):
                keys_KLD, values_KLD = (x[i][chunk.slot][:, : chunk.start + len(q_NHD)] for x in (kv.keys, kv.values))
                out_NHD.copy_(_attended(q_NHD, keys_KLD, values_KLD, seen_NL))
            return out_THD.view(len(out_THD), -1)

        hidden_TM = self._fused_trunk(tokens_T, slots_T, positions_T, kv, attend)
        if hidden_TM is not None:
            kv.hidden[0].view(-1, c.hidden_size).index_copy_(0, slots_T * kv.context_tokens + positions_T, hidden_TM)

    def rope(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [N, 1, D]."""
        cos_N1D, sin_N1D = self._rope.index_select(0, positions_N).unbind(1)
        return cos_N1D, sin_N1D

    def _trunk(self, tokens_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, M] after the final norm."""
        rope = self.rope(positions_N)
        x_NM = self.embed.index_select(0, tokens_N)
        for i, layer in enumerate(self.layers):
            attended = attend(i, *layer.project(x_NM, *rope))
            if attended is not None:
                layer.finish_(x_NM, attended)
        return unit_rms(x_NM, self.config.rms_norm_eps).mul_(self.norm)

    def _fused_trunk(
        self, tokens_X: Tensor, slots_X: Tensor, positions_X: Tensor, kv: KVCache, attend: AttendToCache
    ) -> Tensor | None:
        """`_trunk` in few kernels, on a GPU. None if ``attend`` needed no result of the last layer."""
        from asyncrl.rollouter.engines.native import fused  # triton comes with torch for GPUs only

        c, added_XM = self.config, None
        x_XM = self.embed.index_select(0, tokens_X)
        for i, layer in enumerate(self.layers):
            qkv_XA = layer.qkv(fused.add_norm(x_XM, added_XM, layer.input_norm, c.rms_norm_eps))
            norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
            keys, values = kv.keys[i], kv.values[i]
            queries_XHD = fused.rotate_and_store(
                qkv_XA, slots_X, positions_X, self._rope, norms, keys, values, c.num_heads, c.rms_norm_eps
            )
            attended_XA = attend(i, queries_XHD)
            if attended_XA is None:
                return None
            hidden_XM = fused.add_norm(x_XM, layer.o(attended_XA), layer.post_norm, c.rms_norm_eps)
            added_XM = layer.down(fused.gated(layer.gate_up(hidden_XM)))
        return fused.add_norm(x_XM, added_XM, self.norm, c.rms_norm_eps)


def _attended(q_THD: Tensor, keys_KLD: Tensor, values_KLD: Tensor, seen_TL: Tensor | None) -> Tensor:
    """Attention of one slot's prefill, [T, H, D]. ``seen``: the places that each query attends to; None: causal."""
    return F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None],
        keys_KLD[None],
        values_KLD[None],
        attn_mask=seen_TL,
        is_causal=seen_TL is None,
        enable_gqa=q_THD.shape[1] != len(keys_KLD),
    )[0].transpose(0, 1)


class _Layer:
    """One block: ``qkv`` stacks q, k and v, ``gate_up`` gate and up."""

    def __init__(self, c: DecoderConfig, empty: Callable[..., Tensor]) -> None:
        self._c = c
        self._split = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim)
        self.input_norm = empty(c.hidden_size)
        qkv_bias = empty(sum(self._split)) if c.qkv_bias else None
        self.qkv = Linear(empty(sum(self._split), c.hidden_size), qkv_bias)
        self.q_norm = empty(c.head_dim) if c.qk_norm else None
        self.k_norm = empty(c.head_dim) if c.qk_norm else None
        self.o = Linear(empty(c.hidden_size, self._split[0]), empty(c.hidden_size) if c.o_bias else None)
        self.post_norm = empty(c.hidden_size)
        self.gate_up = Linear(empty(2 * c.intermediate_size, c.hidden_size))
        self.down = Linear(empty(c.hidden_size, c.intermediate_size))

    def matrices(self) -> tuple[Linear, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    def views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}input_layernorm.weight", self.input_norm
        for kind, fused in (("weight", self.qkv.weight), ("bias", self.qkv.bias)):
            if fused is not None:
                for proj, part in zip("qkv", fused.split(self._split)):
                    yield f"{prefix}self_attn.{proj}_proj.{kind}", part
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{prefix}self_attn.q_norm.weight", self.q_norm
            yield f"{prefix}self_attn.k_norm.weight", self.k_norm
        yield f"{prefix}self_attn.o_proj.weight", self.o.weight
        if self.o.bias is not None:
            yield f"{prefix}self_attn.o_proj.bias", self.o.bias
        yield f"{prefix}post_attention_layernorm.weight", self.post_norm
        gate, up = self.gate_up.weight.chunk(2)
        yield f"{prefix}mlp.gate_proj.weight", gate
        yield f"{prefix}mlp.up_proj.weight", up
        yield f"{prefix}mlp.down_proj.weight", self.down.weight

    def project(self, x_NM: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, D], keys and values [N, K, D] of the block's input."""
        c = self._c
        h_NM = unit_rms(x_NM, c.rms_norm_eps).mul_(self.input_norm)
        qkv_NXD = self.qkv(h_NM).view(len(x_NM), -1, c.head_dim)
        qk_NXD, v_NKD = qkv_NXD.split([c.num_heads + c.num_kv_heads, c.num_kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            qk_NXD = unit_rms(qk_NXD, c.rms_norm_eps)
            qk_NXD[:, : c.num_heads].mul_(self.q_norm)
            qk_NXD[:, c.num_heads :].mul_(self.k_norm)
        qk_NXD = torch.addcmul(qk_NXD * cos_N1D, qk_NXD.roll(c.head_dim // 2, -1), sin_N1D)
        return qk_NXD[:, : c.num_heads], qk_NXD[:, c.num_heads :], v_NKD

    def finish_(self, x_NM: Tensor, attended: Tensor) -> None:
        """Add the block's output to its input ``x_NM`` in place; ``attended`` [N, H·D]."""
        self.o.add_(x_NM, attended)
        h_NM = unit_rms(x_NM, self._c.rms_norm_eps).mul_(self.post_norm)
        gate, up = self.gate_up(h_NM).chunk(2, -1)
        self.down.add_(x_NM, F.silu(gate).mul_(up))


class DraftLayer(_Layer):
    """MiMo's MTP layer: a block with an input projection before it and a norm after it, see `drafter`."""

    def __init__(self, c: DecoderConfig, empty: Callable[..., Tensor]) -> None:
        super().__init__(c, empty)
        self._entry_norms = empty(2, c.hidden_size)  # of hidden state and token, applied at once
        self.hidden_norm, self.token_norm = self._entry_norms
        self.input_proj = Linear(empty(c.hidden_size, 2 * c.hidden_size))
        self.final_norm = empty(c.hidden_size)

    def matrices(self) -> tuple[Linear, ...]:
        return self.input_proj, *super().matrices()

    def enter(self, hidden_NM: Tensor, embed_NM: Tensor) -> Tensor:
        """The block's input [N, M]."""
        joined_N2M = unit_rms(torch.stack([hidden_NM, embed_NM], 1), self._c.rms_norm_eps).mul_(self._entry_norms)
        return self.input_proj(joined_N2M.view(len(hidden_NM), -1))

    def leave(self, x_NM: Tensor, attended: Tensor) -> Tensor:
        """Input [N, M] of the head and of a further draft step, from the block's input (which is overwritten)."""
        self.finish_(x_NM, attended)
        return unit_rms(x_NM, self._c.rms_norm_eps).mul_(self.final_norm)

    def views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from super().views(prefix)
        yield f"{prefix}token_layernorm.weight", self.token_norm
        yield f"{prefix}hidden_layernorm.weight", self.hidden_norm
        yield f"{prefix}input_proj.weight", self.input_proj.weight
        yield f"{prefix}final_layernorm.weight", self.final_norm
