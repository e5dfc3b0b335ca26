"""The decoder that the torch backend trains: a Qwen2/Qwen3/Llama trunk and MiMo's MTP layers.

Parameters have the tensor names of safetensors files, so a state dict is a checkpoint. It runs on packed sequences.
Shape suffixes: T packed tokens, R a subset of them, B sequences, L padded length, H heads, K key/value heads, D
head_dim, M hidden size, I intermediate size, V vocabulary, X any.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from asyncrl.models.chunked import ChunkedAcceptance, ChunkedCrossEntropy, ChunkedScores
from asyncrl.models.config import DecoderConfig
from asyncrl.models.device_copy import on_device
from asyncrl.models.kernels import fuses
from asyncrl.models.layout import PackedLayout


def rope_inverse_frequencies(config: DecoderConfig) -> Tensor:
    """float32 [D/2]: rotary frequencies, with the checkpoint's linear or llama3 scaling.

    llama3: wavelengths over original_context/low_freq_factor are divided by ``factor``, those under
    original_context/high_freq_factor are unchanged, with a linear blend between (Llama 3.1, rope_type "llama3").
    """
    inv = 1.0 / (config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return inv
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return inv / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    context = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv
    blend = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv / factor + blend * inv


def rope_table(config: DecoderConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, 1, D], for integer positions [T]."""
    angles = positions.float()[:, None] * on_device(rope_inverse_frequencies(config), positions.device)
    angles = torch.cat([angles, angles], -1)
    return angles.cos()[:, None, :], angles.sin()[:, None, :]


def apply_rope(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2), the layout of Hugging Face checkpoints."""
    half = x_THD.shape[-1] // 2
    rotated = torch.cat([-x_THD[..., half:], x_THD[..., :half]], -1)
    return x_THD * cos_T1D.to(x_THD.dtype) + rotated * sin_T1D.to(x_THD.dtype)


def rotated_heads(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """[T, H + 2·K, D]: queries and keys after rotation, and values."""
    if fuses(q_THD):
        from asyncrl.models.layer_kernels import RotatedHeads  # needs Triton

        return RotatedHeads.apply(q_THD, k_TKD, v_TKD, *rope)
    return torch.cat([apply_rope(q_THD, *rope), apply_rope(k_TKD, *rope), v_TKD], 1)


def gated(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """silu(gate) · up, [T, I]."""
    if fuses(gate_TI):
        from asyncrl.models.layer_kernels import Gated

        return Gated.apply(gate_TI, up_TI)
    return F.silu(gate_TI) * up_TI


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class KeysValues(NamedTuple):
    """[B, K, L, D] each, keys after rotation."""

    keys: Tensor
    values: Tensor


#: of each block of a layout
BlocksKeysValues = Sequence[KeysValues]


class Attention(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.qk_norm = c.qk_norm

    def forward(
        self, x_TM: Tensor, rope: tuple[Tensor, Tensor], layout: PackedLayout, earlier: Sequence[BlocksKeysValues] = ()
    ) -> tuple[Tensor, BlocksKeysValues]:
        """Causal attention, [T, M], and its keys and values. ``earlier``: keys and values of the n preceding draft
        steps of this layer (see `MTPLayer.draft`). Position p attends to those of the first step up to position p−n, to
        that of the second at p−n+1 and so on, and to its own."""
        q_THD = self.q_proj(x_TM).view(-1, self.heads, self.head_dim)
        k_TKD = self.k_proj(x_TM).view(-1, self.kv_heads, self.head_dim)
        v_TKD = self.v_proj(x_TM).view(-1, self.kv_heads, self.head_dim)
        if self.qk_norm:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        attended, own = [], []
        # one gather for all three, which are padded alike
        for block, qkv_BLXD in enumerate(layout.pad_blocks(rotated_heads(q_THD, k_TKD, v_TKD, rope))):
            q, k, v = qkv_BLXD.transpose(1, 2).split([self.heads, self.kv_heads, self.kv_heads], 1)
            own.append(KeysValues(k, v))
            attended.append(self._attended(q, own[-1], [step[block] for step in earlier]).transpose(1, 2))
        return self.o_proj(layout.unpad_blocks(attended).flatten(1)), own

    def _attended(self, q_BHLD: Tensor, own: KeysValues, earlier: Sequence[KeysValues]) -> Tensor:
        """[B, H, L, D], of one block."""
        grouped = self.heads != self.kv_heads
        if not earlier:
            return F.scaled_dot_product_attention(q_BHLD, *own, is_causal=True, enable_gqa=grouped)
        k, v = (torch.cat(parts, 2) for parts in zip(*earlier, own, strict=True))
        behind = torch.arange(q_BHLD.shape[2], device=q_BHLD.device)
        behind_LL, steps = behind[:, None] - behind, len(earlier)
        mask_LX = torch.cat([behind_LL >= steps, *(behind_LL == back for back in reversed(range(steps)))], 1)
        return F.scaled_dot_product_attention(q_BHLD, k, v, attn_mask=mask_LX, enable_gqa=grouped)


class MLP(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x_TM: Tensor, rope: tuple[Tensor, Tensor], layout: PackedLayout) -> Tensor:
        return self.block(x_TM, rope, layout)[0]

    def block(
        self, x_TM: Tensor, rope: tuple[Tensor, Tensor], layout: PackedLayout, earlier: Sequence[BlocksKeysValues] = ()
    ) -> tuple[Tensor, BlocksKeysValues]:
        attended_TM, own = self.self_attn(self.input_layernorm(x_TM), rope, layout, earlier)
        x_TM = x_TM + attended_TM
        return x_TM + self.mlp(self.post_attention_layernorm(x_TM)), own


class MTPLayer(Layer):
    """MiMo's multi-token-prediction layer: predicts token i+2 from the trunk's normed hidden state at i and the
    embedding of token i+1."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__(c)
        self.token_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.input_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.final_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def draft(
        self,
        hidden_TM: Tensor,
        embed_TM: Tensor,
        rope: tuple[Tensor, Tensor],
        layout: PackedLayout,
        earlier: Sequence[BlocksKeysValues] = (),
    ) -> tuple[Tensor, BlocksKeysValues]:
        """Hidden state [T, M] after ``final_layernorm``, which the shared head and the next draft step read, and this
        step's keys and values.

        ``earlier``: keys and values that this layer returned at smaller depths. While drafting, the KV cache of a
        repeated layer holds the first step's keys up to the start of the draft, then one position of each later
        step."""
        joined = torch.cat([self.hidden_layernorm(hidden_TM), self.token_layernorm(embed_TM)], -1)
        out_TM, own = self.block(self.input_proj(joined), rope, layout, earlier)
        # copies, because an FSDP module must not return views
        return self.final_layernorm(out_TM), [KeysValues(k.clone(), v.clone()) for k, v in own]


class Trunk(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.num_mtp_layers:
            self.mtp_layers = nn.ModuleList([MTPLayer(c) for _ in range(c.num_mtp_layers)])


class DraftTargets(NamedTuple):
    """Targets of one draft depth: ``tokens`` to predict from the packed positions ``places``, int64 [R] each."""

    places: Tensor
    tokens: Tensor


class DraftScores(NamedTuple):
    """float32 scalars of one draft depth: the loss summed over its targets in nats, and the number of targets that are
    the draft's likeliest token."""

    loss: Tensor
    hits: Tensor


class TokenScores(NamedTuple):
    """float32 [R]: log-probability of each target token and entropy of its distribution; the trunk's ``hidden`` states
    [T, M], without gradient; the draft's scores by depth; and the loss, a scalar, that balances the load of experts in
    models that ask for it."""

    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor
    drafts: tuple[DraftScores, ...] = ()
    balance: Tensor | None = None


class Decoder(nn.Module):
    """Trunk, head and MTP layers. `forward` computes everything that a training step needs, so that FSDP's root hooks
    cover the head too."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.activation_checkpointing = False
        self.float32_head = False  #: see `asyncrl.models.chunked.head_logits`

    @torch.no_grad()
    def init_weights(self, seed: int, std: float = 0.02) -> None:
        """Normal(0, std) matrices, zero biases, unit norms; deterministic by seed on every machine."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=generator) * std)
            else:
                p.fill_(0.0 if name.endswith("bias") else 1.0)

    def hidden_states(self, tokens_T: Tensor, layout: PackedLayout) -> Tensor:
        """[T, M] after the final norm."""
        rope = rope_table(self.config, layout.positions)
        x_TM = self.model.embed_tokens(tokens_T)
        for layer in self.model.layers:
            x_TM = self._run(layer, x_TM, rope, layout)
        return self.model.norm(x_TM)

    def draft_states(
        self, hidden_TM: Tensor, tokens_T: Tensor, layout: PackedLayout, depths: int, detach: bool
    ) -> list[Tensor]:
        """[T, M] for each depth 1 … ``depths``: at position p the state from which the head predicts token p+2, in the
        d-th step of a draft that started from the trunk's ``hidden_TM`` at position p+1−d and was fed the actual
        tokens. A sequence's last position and its first d−1 are meaningless.

        This is how engines draft: layer min(d, layers) reads at position p the output of depth d−1 at position p−1
        (depth 1: the trunk's at position p) and the embedding of token p+1; at position 0 both are zeros, except the
        trunk's. ``detach``: no gradient to the embedding or to ``hidden_TM``."""
        layers: Sequence[Any] = self.model.mtp_layers  # type: ignore[assignment]
        weight_VM = self.model.embed_tokens.weight
        if detach:
            hidden_TM, weight_VM = hidden_TM.detach(), weight_VM.detach()
        started_T1 = (layout.positions != 0).unsqueeze(1)
        # a sequence's last position reads the next sequence's first token; no other position reads the result
        embed_TM = F.embedding(tokens_T.roll(-1), weight_VM) * started_T1
        rope = rope_table(self.config, layout.positions)
        steps: dict[int, list[BlocksKeysValues]] = defaultdict(list)  # by layer
        states: list[Tensor] = []
        for depth in range(1, depths + 1):
            index = min(depth, len(layers)) - 1
            if depth > 1:
                hidden_TM = hidden_TM.roll(1, 0) * started_T1
            hidden_TM, own = self._run(layers[index].draft, hidden_TM, embed_TM, rope, layout, tuple(steps[index]))
            steps[index].append(own)
            states.append(hidden_TM)
        return states

    def _run(self, module: Callable[..., Any], *inputs: Any) -> Any:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(module, *inputs, use_reentrant=False)
        return module(*inputs)

    def logits(self, tokens_T: Tensor, layout: PackedLayout) -> Tensor:
        """float32 [T, V], for tests and tiny inputs; training uses `forward`, which never materializes it."""
        return self.lm_head(self.hidden_states(tokens_T, layout)).float()

    def forward(
        self,
        tokens_T: Tensor,
        layout: PackedLayout,
        rows_R: Tensor,
        targets_R: Tensor,
        temperature: float,
        chunk: int = 1024,
        drafts: Sequence[DraftTargets] = (),
        draft_loss: str = "acceptance",
        detach_draft: bool = True,
    ) -> TokenScores:
        """Score ``targets_R`` as the tokens after packed positions ``rows_R``, in chunks of ``chunk`` rows.

        For the other arguments see `score_drafts`; the MTP layers run only for ``drafts``."""
        hidden_TM = self.hidden_states(tokens_T, layout)
        logprobs, entropy = ChunkedScores.apply(
            hidden_TM.index_select(0, rows_R), self.lm_head.weight, targets_R, temperature, chunk, self.float32_head
        )
        scored = self.score_drafts(hidden_TM, tokens_T, layout, drafts, temperature, chunk, draft_loss, detach_draft)
        return TokenScores(logprobs, entropy, hidden_TM.detach(), scored)

    def score_drafts(
        self,
        hidden_TM: Tensor,
        tokens_T: Tensor,
        layout: PackedLayout,
        drafts: Sequence[DraftTargets],
        temperature: float,
        chunk: int = 1024,
        loss: str = "acceptance",
        detach: bool = True,
    ) -> tuple[DraftScores, ...]:
        """Draft losses for depth 1, 2 …, given the trunk's ``hidden_TM`` of these tokens, in chunks of ``chunk``
        targets, at their sampling temperature.

        ``loss``: ``acceptance`` of the draft's tokens by the trunk's distribution (`ChunkedAcceptance`), or
        ``cross_entropy`` of the sampled tokens. ``detach``: no gradient to ``hidden_TM``, the embedding or the head."""
        head_VM = self.lm_head.weight.detach() if detach else self.lm_head.weight
        states = self.draft_states(hidden_TM, tokens_T, layout, len(drafts), detach) if drafts else []
        scores = []
        for draft_TM, (places_R, tokens_R) in zip(states, drafts, strict=True):
            draft_RM = draft_TM.index_select(0, places_R)
            if loss == "acceptance":
                target_RM = hidden_TM.detach().index_select(0, places_R + 1)  # predicts the same token
                found = ChunkedAcceptance.apply(
                    draft_RM, head_VM, target_RM, tokens_R, temperature, chunk, self.float32_head
                )
            else:
                found = ChunkedCrossEntropy.apply(draft_RM, head_VM, tokens_R, temperature, chunk, self.float32_head)
            scores.append(DraftScores(*found))
        return tuple(scores)


class _NoInit(TorchFunctionMode):
    """Leaves out the initialization of new modules. On the meta device it would do nothing but import torch's
    decompositions, for over a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def without_storage(config: DecoderConfig) -> Decoder:
    """A decoder on the meta device: names and shapes only."""
    with torch.device("meta"), _NoInit():
        return Decoder(config)
