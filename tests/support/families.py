"""Tiny checkpoints of model families, with weights that make windows, caps and sinks matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from asyncrl.models.causal_lm import choose_attention, flash_lacks
from asyncrl.models.layout import PackedLayout
from asyncrl.models.scoring import ScoringModel, scoring
from asyncrl.models.tokenizer import train_tokenizer

VOCAB, WINDOW = 320, 5

_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 128,  # of heads of 32, the smallest of vLLM's CPU kernels
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "use_cache": False,
}
_WINDOW = {"sliding_window": WINDOW}
_TWO_OF_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GROUPED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}


@dataclass(frozen=True)
class Family:
    """``kind``: model_type in config.json. ``without``: options, or tensors set to a value, that switch off what the
    family is here for; they must change its logprobs. ``vllm``: why vLLM's CPU build cannot be held against it.
    ``exact``: up to which differences of logprobs, in nats, are rounding."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, Any] = field(default_factory=dict)
    vllm: str = ""
    exact: float = 1e-5


_WIDE = {"sliding_window": 256}
_RECURRENT = 5e-5  # transformers' own logprobs of such a model are 2e-5 away from those of float64

FAMILIES: dict[str, Family] = {
    "Qwen2": Family("qwen2"),
    "Qwen3": Family("qwen3"),
    "Llama 3": Family("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0,
                                                    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                    "original_max_position_embeddings": 32}}),
    "Mistral": Family("mistral", _WINDOW, _WIDE),
    "Gemma": Family("gemma", {"tie_word_embeddings": True}),
    "Gemma 2": Family(
        "gemma2",
        {**_WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {"attn_logit_softcapping": None},
    ),
    "Gemma 3": Family("gemma3_text", {**_WINDOW, "query_pre_attn_scalar": 64, "sliding_window_pattern": 2}, _WIDE),
    "Phi 3": Family("phi3", _WINDOW, _WIDE),
    "GLM 4": Family("glm4"),
    "GLM 4.5": Family("glm4_moe", _GROUPED),
    "gpt-oss": Family("gpt_oss", {**_WINDOW, **_TWO_OF_FOUR}, {"sinks": -1e9},
                      "vLLM's loader of its experts bypasses vLLM's own reload of weights"),
    "OLMo 2": Family("olmo2"),
    "OLMo 3": Family("olmo3", _WINDOW, _WIDE),
    "OLMoE": Family("olmoe", {**_EXPERTS, "intermediate_size": 48}),
    "SmolLM3": Family("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, {"no_rope_layers": [1, 1, 1, 1]}),
    "Granite": Family(
        "granite",
        {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 4.0, "attention_multiplier": 0.3},
        {"logits_scaling": 1.0},
    ),
    "Granite MoE": Family(
        "granitemoe", _TWO_OF_FOUR, vllm="vLLM's loader cuts its experts apart, which a sync does not know"
    ),
    "Mixtral": Family("mixtral", _TWO_OF_FOUR),
    "Qwen3 MoE": Family("qwen3_moe", _EXPERTS),
    "Qwen3-Next": Family("qwen3_next", {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 48},
                         vllm="vLLM's CPU kernel of gated delta nets computes in bfloat16 only", exact=_RECURRENT),
    "Qwen3.5": Family("qwen3_5_text", _LINEAR, exact=_RECURRENT,
                      vllm="vLLM imports its vision part, which needs torchvision"),
    "Command R7B": Family("cohere2", {**_WINDOW, "tie_word_embeddings": True, "logit_scale": 0.5}, _WIDE,
                          "a window of vLLM's has one token more than transformers'"),
    "StarCoder 2": Family("starcoder2", _WINDOW, _WIDE),
    "EXAONE 4": Family("exaone4", {**_WINDOW, "sliding_window_pattern": 2}, _WIDE),
    "ERNIE 4.5": Family("ernie4_5"),
    "Seed-OSS": Family("seed_oss"),
    "Hunyuan": Family("hunyuan_v1_dense"),
    "MiniMax M2": Family(
        "minimax_m2",
        {**_TWO_OF_FOUR, "rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
        vllm="vLLM's own reload of weights fails on its routing bias",
    ),
    "LFM 2": Family(
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * 2, "conv_dim": 128, "block_dim": 128, "block_ff_dim": 192,
         "block_auto_adjust_ff_dim": False},
        vllm="vLLM, started from the same files, computes other logprobs",
    ),
    "DeepSeek V3": Family(
        "deepseek_v3",
        {**_GROUPED, "num_key_value_heads": 4, "head_dim": 64, "q_lora_rank": 32, "kv_lora_rank": 512,
         "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "topk_method": "noaux_tc"},
        vllm="vLLM's CPU build, started from the same files, computes other logprobs",
    ),
    "Nemotron": Family("nemotron"),
}  # fmt: skip


def model_of(family: Family, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """The family's model as transformers computes it: eager attention, no dropout, random weights by a fixed seed."""
    config = CONFIG_MAPPING[family.kind](**{**_SHARED, **family.options, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
            else:
                p.copy_(torch.rand(p.shape, generator=generator) * 0.5 + 0.75)
    return model.to(dtype).train(False)


def write(family: Family, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Write the family's checkpoint; returns its model."""
    model = model_of(family, dtype)
    model.save_pretrained(folder)
    train_tokenizer([""], vocab_size=VOCAB).save_pretrained(folder)
    return model


def without(family: Family) -> PreTrainedModel:
    """The family's model with what its ``without`` says switched off."""
    options = {name: value for name, value in family.without.items() if name != "sinks"}
    model = model_of(family, **options)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".sinks") and "sinks" in family.without:
                p.fill_(family.without["sinks"])
    return model


def sequences(count: int = 4, longest: int = 17) -> list[Tensor]:
    """Random token ids, int64, of different lengths."""
    generator = torch.Generator().manual_seed(2)
    lengths = [longest, *torch.randint(5, longest, (count - 1,), generator=generator).tolist()]
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def plain_logprobs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """float32 [L−1]: log-probability of each token of one sequence but the first."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)


def together(model: ScoringModel, tokens: Sequence[Tensor], chunk: int = 7) -> Tensor:
    """float32: the sequences' `plain_logprobs`, one after the other, from one pass over all of them."""
    lengths = np.array([len(t) for t in tokens])
    starts = np.cumsum(lengths) - lengths
    rows = torch.from_numpy(np.concatenate([np.arange(s, s + n - 1) for s, n in zip(starts, lengths, strict=True)]))
    targets = torch.cat([t[1:] for t in tokens])
    return model(torch.cat(list(tokens)), PackedLayout.from_lengths(lengths), rows, targets, 1.0, chunk).logprobs


@torch.no_grad()
def difference(family: Family) -> tuple[str, float]:
    """The attention with which the family is trained on a CPU, and the largest difference (nats) between logprobs of
    sequences scored together and of each alone with eager attention. Both ways to score them together count, where
    flash attention may take all sequences as one row."""
    tokens, reference, model = sequences(), model_of(family), model_of(family)
    expected = torch.cat([plain_logprobs(reference, t) for t in tokens])
    attention, packs = choose_attention(model, "auto", False), flash_lacks(model) == ""
    scored = scoring(model, attention=attention)
    found = float((together(scored, tokens) - expected).abs().max())
    if packs:
        scored.set_attn_implementation("eager")
        scored.packs = True
        found = max(found, float((together(scored, tokens) - expected).abs().max()))
    return attention, found
