"""The decoder that the torch backend trains: a Qwen2/Qwen3/Llama trunk and MiMo's MTP layers.

Its parameters carry the names of the safetensors files, so a state dict is a checkpoint. It runs on packed sequences.
Shape suffixes: T packed tokens, B sequences, L padded length, H heads, K key/value heads, D head_dim, M hidden size,
V vocabulary, C a chunk of tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asyncrl.models.config import DecoderConfig
from asyncrl.models.layout import PackedLayout


def rope_inverse_frequencies(config: DecoderConfig) -> Tensor:
    """float32 [D/2]: rotary frequencies, with the linear or llama3 stretching that the checkpoint asks for.

    llama3: wavelengths over original_context/low_freq_factor are divided by ``factor``, those under
    original_context/high_freq_factor stay, between them a linear blend (Llama 3.1's config, rope_type "llama3").
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
    angles = positions.float()[:, None] * rope_inverse_frequencies(config).to(positions.device)
    angles = torch.cat([angles, angles], -1)
    return angles.cos()[:, None, :], angles.sin()[:, None, :]


def apply_rope(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2), as Hugging Face checkpoints are laid out."""
    half = x_THD.shape[-1] // 2
    rotated = torch.cat([-x_THD[..., half:], x_THD[..., :half]], -1)
    return x_THD * cos_T1D.to(x_THD.dtype) + rotated * sin_T1D.to(x_THD.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


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

    def forward(self, x_TM: Tensor, rope: tuple[Tensor, Tensor], layout: PackedLayout) -> Tensor:
        q_THD = self.q_proj(x_TM).view(-1, self.heads, self.head_dim)
        k_TKD = self.k_proj(x_TM).view(-1, self.kv_heads, self.head_dim)
        v_TKD = self.v_proj(x_TM).view(-1, self.kv_heads, self.head_dim)
        if self.qk_norm:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        q_THD, k_TKD = apply_rope(q_THD, *rope), apply_rope(k_TKD, *rope)
        # one gather for the three: they are padded alike
        qkv_BLXD = layout.pad(torch.cat([q_THD, k_TKD, v_TKD], 1)).transpose(1, 2)
        q, k, v = qkv_BLXD.split([self.heads, self.kv_heads, self.kv_heads], 1)
        out_BHLD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o_proj(layout.unpad(out_BHLD.transpose(1, 2)).flatten(1))


class MLP(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x_TM: Tensor, rope: tuple[Tensor, Tensor], layout: PackedLayout) -> Tensor:
        x_TM = x_TM + self.self_attn(self.input_layernorm(x_TM), rope, layout)
        return x_TM + self.mlp(self.post_attention_layernorm(x_TM))


class MTPLayer(Layer):
    """MiMo's multi-token-prediction layer: from the trunk's normed hidden state at i and the embedding of token i+1 it
    predicts token i+2."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__(c)
        self.token_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.input_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.final_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def draft(self, hidden_TM: Tensor, embed_TM: Tensor, rope: tuple[Tensor, Tensor], layout: PackedLayout) -> Tensor:
        """Returns the post-``final_layernorm`` hidden state [T, M], which the shared head reads and a further draft
        step takes as its ``hidden``. The embedding at position 0 is zeroed, as the engines do."""
        embed_TM = embed_TM * (layout.positions != 0).unsqueeze(1)
        joined = torch.cat([self.hidden_layernorm(hidden_TM), self.token_layernorm(embed_TM)], -1)
        return self.final_layernorm(super().forward(self.input_proj(joined), rope, layout))


class Trunk(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.num_mtp_layers:
            self.mtp_layers = nn.ModuleList([MTPLayer(c) for _ in range(c.num_mtp_layers)])


class TokenScores(NamedTuple):
    """float32 [T]: log-probability of each target token, and the entropy of the distribution it was drawn from."""

    logprobs: Tensor
    entropy: Tensor


class Decoder(nn.Module):
    """``forward`` does what a training step needs, whole, so that FSDP's hooks on the root cover the head too."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.activation_checkpointing = False

    @torch.no_grad()
    def init_weights(self, seed: int, std: float = 0.02) -> None:
        """Normal(0, std) matrices, zero biases, unit norms; the same for a seed on every machine."""
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
            if self.activation_checkpointing and torch.is_grad_enabled():
                x_TM = checkpoint(layer, x_TM, rope, layout, use_reentrant=False)
            else:
                x_TM = layer(x_TM, rope, layout)
        return self.model.norm(x_TM)

    def logits(self, tokens_T: Tensor, layout: PackedLayout) -> Tensor:
        """float32 [T, V]: for tests and tiny inputs; training reads `forward`, which never holds it whole."""
        return self.lm_head(self.hidden_states(tokens_T, layout)).float()

    def forward(
        self,
        tokens_T: Tensor,
        layout: PackedLayout,
        rows_R: Tensor,
        targets_R: Tensor,
        temperature: float,
        chunk: int = 1024,
    ) -> TokenScores:
        """Score ``targets_R`` as drawn after the tokens at packed places ``rows_R``, in chunks of ``chunk`` rows."""
        hidden_RM = self.hidden_states(tokens_T, layout).index_select(0, rows_R)
        logprobs, entropy = _ChunkedScores.apply(hidden_RM, self.lm_head.weight, targets_R, temperature, chunk)
        return TokenScores(logprobs, entropy)


class _ChunkedScores(torch.autograd.Function):
    """Log-probabilities and entropies of ``softmax(hidden @ W.T / temperature)`` without ever holding [R, V].

    Both passes go over chunks of rows; the backward computes the chunk's logits again. With p the softmax, z the scaled
    logits, H the entropy and g, e the gradients of logprob and entropy::

        dz = g · (onehot − p) − e · p · (log p + H)
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int) -> Any:
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        for lo in range(0, len(targets), chunk):
            rows = slice(lo, lo + chunk)
            logp_CV = _log_softmax(hidden[rows], weight, temperature)
            logprobs[rows] = logp_CV.gather(1, targets[rows, None]).squeeze(1)
            entropy[rows] = -(logp_CV.exp() * logp_CV).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, g: Tensor, e: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, targets, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for lo in range(0, len(targets), ctx.chunk):
            rows = slice(lo, lo + ctx.chunk)
            logp_CV = _log_softmax(hidden[rows], weight, ctx.temperature)
            p_CV = logp_CV.exp()
            entropy_term = (e[rows, None] * p_CV).mul_(logp_CV + entropy[rows, None])
            dz_CV = p_CV.mul_(-g[rows, None]).sub_(entropy_term)
            dz_CV.scatter_add_(1, targets[rows, None], g[rows, None])
            dz_CV = dz_CV.div_(ctx.temperature).to(weight.dtype)
            d_hidden[rows] = dz_CV @ weight
            d_weight += dz_CV.t() @ hidden[rows]
        return d_hidden, d_weight.to(weight.dtype), None, None, None


def _log_softmax(hidden_CM: Tensor, weight_VM: Tensor, temperature: float) -> Tensor:
    logits_CV = F.linear(hidden_CM, weight_VM).float()
    return torch.log_softmax(logits_CV.div_(temperature) if temperature != 1.0 else logits_CV, -1)
