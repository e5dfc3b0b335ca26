"""Bridge for Qwen3-Next and Qwen3.5, models with Gated DeltaNet layers: configuration and tensors.

Megatron-Bridge 0.3 supports only Qwen3-Next, only under Transformer Engine's names, and reads config fields that
transformers 5 has moved. This bridge converts both, including the MTP layer, alike for every release.

megatron-core's DeltaNet has one matrix, ``in_proj``, with rows q, k, v, z (output gate), b (write strength) and a
(decay); each tensor parallel rank has those of its heads. Qwen3-Next has two, ``in_proj_qkvz`` and ``in_proj_ba``,
grouped by key head, which Megatron-Bridge converts. Qwen3.5 has four, ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and
``in_proj_a``, with their parts concatenated, which 0.3 does not support.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.trainer.backends.megatron import packages
from asyncrl.trainer.backends.megatron.layout import linear_layers
from asyncrl.trainer.backends.megatron.packages import layer_in_mtp

packages.prepare()

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry  # noqa: E402
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge  # noqa: E402
from megatron.bridge.models.conversion.param_mapping import (  # noqa: E402
    AutoMapping,
    GatedMLPMapping,
    GDNConv1dMapping,
    GDNLinearMapping,
    MegatronParamMapping,
    QKVMapping,
    ReplicatedMapping,
)
from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402

ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
)

#: fields of config.json that megatron-core has under the same names
LINEAR = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
SPLIT = ("qkv", "z", "b", "a")
FUSED = ("qkvz", "ba")

AutoMapping.register_module_type("DeltaNet", "column")


class Qwen3NextBridge(MegatronModelBridge):
    """Bridge of a folder: ``text`` is the text part of its config.json, ``names`` are its tensors."""

    def __init__(self, text: Mapping[str, Any], names: Collection[str]) -> None:
        super().__init__()
        self._text, self._names = text, names

    def provider_bridge(self, hf_pretrained: Any) -> GPTModelProvider:
        text, linear = self._text, linear_layers(self._text)
        experts: dict[str, Any] = {}
        if text.get("num_experts"):
            dense, every = text.get("mlp_only_layers") or (), text.get("decoder_sparse_step", 1)
            experts = {
                "num_moe_experts": text["num_experts"],
                "moe_router_topk": text["num_experts_per_tok"],
                "moe_ffn_hidden_size": text["moe_intermediate_size"],
                "moe_shared_expert_intermediate_size": text["shared_expert_intermediate_size"],
                "moe_shared_expert_gate": True,
                "moe_layer_freq": [int(i not in dense and (i + 1) % every == 0) for i in range(len(linear))],
                "moe_grouped_gemm": True,
                "moe_permute_fusion": True,
            }
        return GPTModelProvider(
            num_layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            ffn_hidden_size=text.get("intermediate_size") or text["moe_intermediate_size"],
            num_attention_heads=text["num_attention_heads"],
            num_query_groups=text["num_key_value_heads"],
            kv_channels=text["head_dim"],
            vocab_size=text["vocab_size"],
            seq_length=text["max_position_embeddings"],
            layernorm_epsilon=text["rms_norm_eps"],
            share_embeddings_and_output_weights=bool(text.get("tie_word_embeddings", False)),
            normalization="RMSNorm",
            layernorm_zero_centered_gamma=True,
            activation_func=F.silu,
            gated_linear_unit=True,
            add_bias_linear=False,
            qk_layernorm=True,
            attention_output_gate=True,
            position_embedding_type="rope",
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=[int(one) for one in linear],
            **{name: text[name] for name in LINEAR},
            **experts,
        )

    def mapping_registry(self) -> MegatronMappingRegistry:
        there = "model."
        if any(name.startswith("model.language_model.") for name in self._names):  # beside a vision tower
            there = "model.language_model."
        mappings = [
            AutoMapping("embedding.word_embeddings.weight", f"{there}embed_tokens.weight"),
            AutoMapping("decoder.final_layernorm.weight", f"{there}norm.weight"),
            AutoMapping("output_layer.weight", "lm_head.weight"),
            *_layer("decoder.layers.*.", f"{there}layers.*."),
            AutoMapping("mtp.layers.0.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
            AutoMapping("mtp.layers.0.hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
            AutoMapping("mtp.layers.0.eh_proj.weight", "mtp.fc.weight"),
            AutoMapping("mtp.layers.0.final_layernorm.weight", "mtp.norm.weight"),
            *_layer(f"mtp.layers.*.{layer_in_mtp()}.", "mtp.layers.*."),
            *delta_net_mappings("decoder.layers.*.self_attention.", f"{there}layers.*.linear_attn.", self._names),
        ]
        return MegatronMappingRegistry(*mappings)


def _layer(here: str, there: str) -> Iterator[MegatronParamMapping]:
    """Mappings of a layer with full attention, dense or with experts. With Transformer Engine norms are part of the
    following linear layer."""
    plain = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }
    for ours, theirs in plain.items():
        yield AutoMapping(here + ours, there + theirs)
    qkv = {part: f"{there}self_attn.{part}_proj.weight" for part in "qkv"}
    yield QKVMapping(f"{here}self_attention.linear_qkv.weight", **qkv)
    yield ReplicatedMapping(f"{here}mlp.shared_experts.gate_weight", f"{there}mlp.shared_expert_gate.weight")
    for ours, theirs in {
        "mlp.linear_{}.weight": "mlp.",
        "mlp.shared_experts.linear_{}.weight": "mlp.shared_expert.",
        "mlp.experts.linear_{}.weight*": "mlp.experts.*.",
        "mlp.experts.local_experts.*.linear_{}.weight": "mlp.experts.*.",
    }.items():
        up = {part: f"{there}{theirs}{part}_proj.weight" for part in ("gate", "up")}
        yield GatedMLPMapping(here + ours.format("fc1"), **up)
        yield AutoMapping(here + ours.format("fc2"), f"{there}{theirs}down_proj.weight")


def delta_net_mappings(here: str, there: str, names: Collection[str]) -> Iterator[MegatronParamMapping]:
    """Mappings of a layer's DeltaNet (``here``: ``…self_attention.``) to the checkpoint's (``there``:
    ``…linear_attn.``), both with ``*`` for the layer's number. ``names``: the checkpoint's tensors, which determine the
    family."""
    split = any(name.endswith("linear_attn.in_proj_qkv.weight") for name in names)
    kind, parts = (SplitInProjection, SPLIT) if split else (GDNLinearMapping, FUSED)
    yield kind(f"{here}in_proj.weight", **{part: f"{there}in_proj_{part}.weight" for part in parts})
    norm = there.removesuffix("linear_attn.") + "input_layernorm.weight"
    yield AutoMapping(f"{here}in_proj.layer_norm_weight", norm)  # with Transformer Engine
    yield GDNConv1dMapping(f"{here}conv1d.weight", f"{there}conv1d.weight")
    yield AutoMapping(f"{here}out_norm.weight", f"{there}norm.weight")
    for name in ("out_proj.weight", "A_log", "dt_bias"):
        yield AutoMapping(f"{here}{name}", f"{there}{name}")


class SplitInProjection(MegatronParamMapping[dict[str, Tensor]]):
    """``in_proj`` ↔ the four matrices of Qwen3.5."""

    def __init__(self, megatron_param: str, qkv: str, z: str, b: str, a: str) -> None:
        super().__init__(megatron_param, {"qkv": qkv, "z": z, "b": b, "a": a})
        self._cut = AutoMapping(megatron_param, megatron_param)

    def hf_to_megatron(self, hf_weights: Mapping[str, Tensor], megatron_module: torch.nn.Module) -> Tensor:
        merged = None
        if self.tp_rank == 0:
            sections = torch.cat([hf_weights[part] for part in SPLIT]).split(_rows(self._get_config(megatron_module)))
            by_rank = zip(*(section.chunk(self.tp_size) for section in sections), strict=True)
            merged = torch.cat([part for parts in by_rank for part in parts])
        return self._cut.hf_to_megatron(merged, megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: torch.nn.Module | None
    ) -> dict[str, Tensor]:
        rows = None if megatron_module is None else _rows(self._get_config(megatron_module))
        rows = self.broadcast_obj_from_pp_rank(rows)
        gathered = self._cut.megatron_to_hf(megatron_weights, megatron_module)
        if not gathered:
            return {}
        (merged,) = gathered.values()
        each = [count // self.tp_size for count in rows]
        by_rank = [part.split(each) for part in merged.chunk(self.tp_size)]
        q, k, v, z, b, a = (torch.cat(parts) for parts in zip(*by_rank, strict=True))
        whole = {"qkv": torch.cat([q, k, v]), "z": z, "b": b, "a": a}
        return {self.hf_param[part]: whole[part] for part in SPLIT}

    def resolve(self, captures: tuple[str, ...]) -> SplitInProjection:
        megatron_param, names = self._resolve_names(captures)
        return type(self)(megatron_param, **names)


def _rows(config: Any) -> list[int]:
    """Rows of q, k, v, z, b and a, over all ranks."""
    keys = config.linear_key_head_dim * config.linear_num_key_heads
    values = config.linear_value_head_dim * config.linear_num_value_heads
    return [keys, keys, values, values, config.linear_num_value_heads, config.linear_num_value_heads]
