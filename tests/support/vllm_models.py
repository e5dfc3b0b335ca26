"""Tiny checkpoints of the families that vLLM serves, and vLLM's own models of them in this process.

A checkpoint's names are those under which transformers saves the model; for the MTP layer, which transformers does not
know, those of the family's published checkpoints.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.model_manager import create_lora_manager
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _VLLM_MODELS
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from asyncrl.cpu.vllm import mla_kernel
from asyncrl.models.checkpoint import read_tensors
from asyncrl.param_sync.digest import dtype_name
from asyncrl.param_sync.manifest import Manifest, TensorSpec
from asyncrl.rollouter.engines.vllm.live_model import LiveModel

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

V, H, LAYERS = 300, 64, 2  # a vocabulary that vLLM pads

_SHARED = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 256,
    "pad_token_id": 257,
    "bos_token_id": None,
}
_SQUARE = {"num_attention_heads": H // 32, "num_key_value_heads": 1}  # vLLM's Qwen2 has no head_dim of its own
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_GROUPED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}


def _mimo_draft(block: Shapes) -> Shapes:
    at = "model.mtp_layers.0."
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    return {at + n: s for n, s in (block | _norms(norms) | {"input_proj.weight": (H, 2 * H)}).items()}


def _numbered_draft(block: Shapes) -> Shapes:
    """Draft of DeepSeek and GLM: one more layer, with copies of the embedding and the head."""
    extra = {"eh_proj.weight": (H, 2 * H), "embed_tokens.weight": (V, H), "shared_head.head.weight": (V, H)}
    norms = ("enorm", "hnorm", "shared_head.norm")
    return {f"model.layers.{LAYERS}.{n}": s for n, s in (block | _norms(norms) | extra).items()}


def _mtp_draft(block: Shapes) -> Shapes:
    """Draft of Qwen."""
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    names = {f"layers.0.{n}": s for n, s in block.items()} | _norms(norms) | {"fc.weight": (H, 2 * H)}
    return {f"mtp.{n}": s for n, s in names.items()}


def _norms(names: tuple[str, ...]) -> Shapes:
    return {f"{name}.weight": (H,) for name in names}


@dataclass(frozen=True)
class Family:
    """A model family. ``architectures``: vLLM's, of the target and of the draft. ``draft`` maps the shapes of the last
    trunk layer to those of the MTP layer. ``extra_config``: options that transformers' config does not know."""

    config: type[transformers.PretrainedConfig]
    architectures: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    draft: Callable[[Shapes], Shapes] | None = None
    extra_config: Mapping[str, Any] = field(default_factory=dict)


_ONE_MTP_LAYER = {"num_nextn_predict_layers": 1}

FAMILIES: dict[str, Family] = {
    "qwen2": Family(transformers.Qwen2Config, ("Qwen2ForCausalLM",), _SQUARE),
    "qwen2, tied": Family(transformers.Qwen2Config, ("Qwen2ForCausalLM",), _SQUARE | {"tie_word_embeddings": True}),
    "qwen3": Family(transformers.Qwen3Config, ("Qwen3ForCausalLM",)),
    "llama": Family(transformers.LlamaConfig, ("LlamaForCausalLM",)),
    "mimo": Family(transformers.Qwen2Config, ("MiMoForCausalLM", "MiMoMTPModel"), _SQUARE, _mimo_draft, _ONE_MTP_LAYER),
    "qwen3_moe": Family(transformers.Qwen3MoeConfig, ("Qwen3MoeForCausalLM",), _EXPERTS | {"num_experts": 4}),
    "glm4_moe": Family(
        transformers.Glm4MoeConfig,
        ("Glm4MoeForCausalLM", "Glm4MoeMTPModel"),
        _EXPERTS | _GROUPED | {"attention_bias": True},
        _numbered_draft,
        _ONE_MTP_LAYER,
    ),
    "deepseek_v3": Family(
        transformers.DeepseekV3Config,
        ("DeepseekV3ForCausalLM", "DeepSeekMTPModel"),
        _EXPERTS | _GROUPED | _LATENT | {"num_key_value_heads": 4, "head_dim": 64},
        _numbered_draft,
        _ONE_MTP_LAYER | {"topk_method": "noaux_tc"},
    ),
    "qwen3_next": Family(
        transformers.Qwen3NextConfig,
        ("Qwen3NextForCausalLM", "Qwen3NextMTP"),
        _EXPERTS | _LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 64},
        _mtp_draft,
        _ONE_MTP_LAYER,
    ),
    "qwen3_5": Family(
        transformers.Qwen3_5TextConfig,
        ("Qwen3_5ForCausalLM", "Qwen3_5MTP"),
        _LINEAR,
        _mtp_draft,
        {"mtp_num_hidden_layers": 1},
    ),
}


def write_checkpoint(folder: Path, family: Family, dtype: torch.dtype = torch.float32) -> None:
    """Write the family's config and `random_weights`, MTP layer included."""
    config = family.config(**(_SHARED | dict(family.options)), dtype=dtype)
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    tensors = read_tensors(folder)
    if family.draft is not None:
        last = re.compile(rf".*layers\.{LAYERS - 1}\.(.+)")
        block = {m[1]: tuple(t.shape) for name, t in tensors.items() if (m := last.fullmatch(name))}
        tensors |= {name: torch.empty(shape, dtype=dtype) for name, shape in family.draft(block).items()}
    write_tensors(folder, random_weights(tensors, 0))
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": list(family.architectures[:1]), **family.extra_config}
    (folder / "config.json").write_text(json.dumps(raw))


def write_tensors(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def random_weights(like: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {n: (0.1 * torch.randn(t.shape, generator=generator)).to(t.dtype) for n, t in sorted(like.items())}


def is_draft(family: Family, name: str) -> bool:
    numbered = family.draft is _numbered_draft and name.startswith(f"model.layers.{LAYERS}.")
    return numbered or name.startswith(("mtp.", "model.mtp_layers."))


def manifest_of(family: Family, tensors: Mapping[str, torch.Tensor]) -> Manifest:
    return Manifest(
        tuple(
            TensorSpec(name, dtype_name(t), tuple(t.shape), "draft" if is_draft(family, name) else "target")
            for name, t in tensors.items()
        )
    )


@dataclass(frozen=True)
class Models:
    """vLLM's models of one checkpoint, as its worker holds them."""

    config: VllmConfig
    target: LiveModel
    draft: LiveModel | None

    def all(self) -> list[LiveModel]:
        return [self.target] if self.draft is None else [self.target, self.draft]


def engine_config(folder: Path, family: Family, dtype: str = "float32", lora: bool = False) -> VllmConfig:
    for architecture in family.architectures:
        _register(architecture)
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    return EngineArgs(
        model=str(folder),
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 24,
        speculative_config=None if family.draft is None else mtp,
        enable_lora=lora,
        max_lora_rank=8,
        attention_backend=mla_kernel(json.loads((folder / "config.json").read_text()), dtype),
    ).create_engine_config()


def load_models(config: VllmConfig) -> Models:
    """Load target and draft from the checkpoint, as vLLM's worker and proposer do."""
    with set_current_vllm_config(config):
        target = get_model(vllm_config=config)
        if config.lora_config is not None:
            device = torch.device(config.device_config.device_type)
            target = create_lora_manager(target, 4, 64, V, config.lora_config, config, device).model
        live = LiveModel("target", target, config.model_config)
        if config.speculative_config is None:
            return Models(config, live, None)
        draft_config = config.speculative_config.draft_model_config
        draft = get_model(vllm_config=config, model_config=draft_config, prefix="draft")
        proposer: Any = types.SimpleNamespace(model=draft, vllm_config=config, use_local_argmax_reduction=False)
        SpecDecodeBaseProposer._maybe_share_embeddings(proposer, target)
        SpecDecodeBaseProposer._maybe_share_lm_head(proposer, target)
        return Models(config, live, LiveModel("draft", draft, draft_config, shared_with=target))


def _register(architecture: str) -> None:
    """Register the architecture by its class; by name vLLM would start a process to inspect it."""
    module, name, *_ = _VLLM_MODELS[architecture]
    with _torchvision():
        cls = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    ModelRegistry.register_model(architecture, cls)


@contextlib.contextmanager
def _torchvision() -> Iterator[None]:
    """Empty torchvision modules if it is not installed: vLLM's Qwen3.5 module imports its vision model, which the text
    model does not use."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    names = [
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ]
    for name in names:
        sys.modules[name] = module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.InterpolationMode = object  # type: ignore[attr-defined]
    sys.modules[names[2]].functional = sys.modules[names[3]]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
