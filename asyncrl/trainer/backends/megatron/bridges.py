"""Bridges for Hugging Face folders: configuration, tensor names, and refusal of unsupported models.

A bridge converts a model family: its config.json into a configuration of megatron-core, and its tensors into
parameters. Megatron-Bridge has bridges for many families, but none with MiMo's MTP layers, which are added here to any
trunk. For Qwen3-Next and Qwen3.5 this package has its own bridge (`qwen3_next`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from asyncrl.models.checkpoint import is_draft, mtp_layers_named, tensor_shapes, without_draft
from asyncrl.models.config import CheckpointError, read_config, rope_fields, text_part
from asyncrl.models.decoder import rope_inverse_frequencies
from asyncrl.trainer.backends.megatron import packages
from asyncrl.trainer.backends.megatron.packages import layer_in_mtp
from asyncrl.trainer.backends.megatron.qwen3_next import ARCHITECTURES, Qwen3NextBridge

packages.prepare()

import transformers  # noqa: E402
from megatron.bridge.models.conversion import model_bridge  # noqa: E402
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry  # noqa: E402
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge  # noqa: E402
from megatron.bridge.models.conversion.param_mapping import AutoMapping, MegatronParamMapping  # noqa: E402
from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402

if TYPE_CHECKING:
    from asyncrl.trainer.backends.megatron.mbridge import MBridgeConverter

MTP, TRUNK = "mtp.layers.*.", "decoder.layers.*."  # in megatron-core
HF_MTP, HF_TRUNK = "model.mtp_layers.*.", "model.layers.*."


@MegatronModelBridge.register_bridge(source="MiMoForCausalLM", target=GPTModel, model_type="mimo")
class MiMoBridge(Qwen2Bridge):
    """MiMo as Qwen2, to which `bridge_of` adds MTP layers. Replaces Megatron-Bridge's own bridge (since 0.4), so that
    MiMo is converted alike with every release."""


class SwappedHalves(AutoMapping):
    """Swaps the halves of a matrix's columns: MiMo's ``input_proj`` [M, 2M] reads cat(hidden, embedding),
    megatron-core's ``eh_proj`` cat(embedding, hidden)."""

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: torch.nn.Module) -> Tensor:
        return super().hf_to_megatron(_swapped(hf_weights), megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: torch.nn.Module | None
    ) -> dict[str, Tensor]:
        whole = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: _swapped(weight) for name, weight in whole.items()}


def _swapped(weight: Tensor) -> Tensor:
    first, second = weight.chunk(2, dim=1)
    return torch.cat([second, first], 1)


@dataclass(frozen=True)
class Source:
    """A Hugging Face folder as this backend reads it. ``raw``: content of config.json; ``text``: the same with its text
    part merged in. ``shapes``: all tensors of the model, including a draft to be made from the trunk; ``carried``:
    those of the vision tower, which is not trained but exported with the model."""

    path: Path
    raw: dict[str, Any]
    text: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    carried: dict[str, tuple[int, ...]]
    makes_draft: bool

    @property
    def architecture(self) -> str:
        return (self.raw.get("architectures") or ["?"])[0]

    @property
    def num_mtp_layers(self) -> int:
        return int(self.text.get("num_nextn_predict_layers") or self.text.get("mtp_num_hidden_layers") or 0)

    @property
    def tied(self) -> bool:
        return bool(self.text.get("tie_word_embeddings", False))

    @property
    def dtype(self) -> str:
        return str(self.text.get("dtype") or self.text.get("torch_dtype") or "float32").removeprefix("torch.")


def read_source(path: str | Path, mtp_from_trunk: bool = False, needs_draft: bool = False) -> Source:
    """Read ``path/config.json`` and the headers of its tensors.

    Raises CheckpointError if they are missing or damaged, if MTP layers are needed and absent, and if config.json and
    files disagree on their presence."""
    raw = read_config(path)
    shapes = {name: shape for name, shape in tensor_shapes(path).items() if not name.endswith("rotary_emb.inv_freq")}
    makes_draft = mtp_from_trunk and not any(map(is_draft, shapes))
    if makes_draft:
        raw, shapes = _with_draft(raw, shapes)
    text = text_part(raw)
    if text.keys().isdisjoint(("num_nextn_predict_layers", "mtp_num_hidden_layers")):
        text["mtp_num_hidden_layers"] = mtp_layers_named(shapes)
    carried = {name: shapes.pop(name) for name in list(shapes) if name.startswith("model.visual.")}
    source = Source(Path(path), raw, text, shapes, carried, makes_draft)
    if needs_draft and not source.num_mtp_layers:
        raise without_draft(path)
    if source.tied:
        shapes.pop("lm_head.weight", None)  # some folders store a tied head too
    return source


@dataclass(frozen=True)
class Bridge:
    """``provider``: the model's configuration of megatron-core, still without sharding, precision and kernels.
    ``converter``: weight converter of Megatron-Bridge or mbridge."""

    source: Source
    provider: GPTModelProvider
    converter: MegatronModelBridge | MBridgeConverter

    @property
    def draft_starts_blank(self) -> bool:
        """True if the draft reads zeros for the embedding at a sequence's first position, like MiMo's; Qwen's draft
        reads the token's embedding."""
        return self.source.architecture not in ARCHITECTURES


def bridge_of(source: Source, package: str = "megatron_bridge") -> Bridge:
    """A package's bridge for a folder (``model.bridge``). Raises CheckpointError for a family without one, for a family
    that needs more than megatron-core's GPT model, and for a rope that megatron-core computes differently."""
    if package == "mbridge":
        from asyncrl.trainer.backends.megatron.mbridge import mbridge_of

        provider, converter = mbridge_of(_hf_config(source), source.path)
    else:
        provider, converter = _of_megatron_bridge(source)
    provider.mtp_num_layers = source.num_mtp_layers or None
    _expect_same_layers(provider, source)
    _set_rope(provider, source)
    if "norm_topk_prob" in source.text:
        # not read by the bridge: normalizes the chosen experts' weights to sum to one
        provider.moe_router_pre_softmax = not source.text["norm_topk_prob"]
    return Bridge(source, provider, converter)


def _expect_same_layers(provider: GPTModelProvider, source: Source) -> None:
    """Raise CheckpointError for settings of config.json that a bridge ignores: Qwen's sliding windows, and in mbridge
    any activation."""
    if source.text.get("use_sliding_window") and provider.window_size is None:
        raise CheckpointError(
            f"{source.path}: use_sliding_window is set, which the bridge of {source.architecture} ignores: full "
            "attention would be trained; use another model"
        )
    name, points = source.text.get("hidden_act"), torch.linspace(-4, 4, 17)
    if name in ACT2FN and not torch.allclose(ACT2FN[name](points), provider.activation_func(points), atol=1e-6):
        found = getattr(provider.activation_func, "__name__", provider.activation_func)
        raise CheckpointError(
            f"{source.path}: hidden_act is {name!r}, but the bridge of {source.architecture} uses {found}; use "
            "another model"
        )


def _of_megatron_bridge(source: Source) -> tuple[GPTModelProvider, MegatronModelBridge]:
    if source.architecture in ARCHITECTURES:
        return _of_qwen3_next(source)
    found = {getattr(key, "__name__", key): key for key in model_bridge.get_model_bridge._exact_types}
    if source.architecture not in found:
        raise CheckpointError(
            f"{source.path}: Megatron-Bridge has no bridge for {source.architecture} "
            f"(it has: {', '.join(sorted({*found, *ARCHITECTURES}))}); use trainer.backend=torch, or another model"
        )
    converter = model_bridge.get_model_bridge(found[source.architecture])
    provider = converter.provider_bridge(SimpleNamespace(config=_hf_config(source)))
    if type(provider).provide is not GPTModelProvider.provide:
        raise CheckpointError(
            f"{source.path}: {source.architecture} is built by {type(provider).__name__}, which this backend cannot "
            "run (it runs megatron-core's plain GPT model); use another model"
        )
    variant = getattr(provider, "experimental_attention_variant", None)
    if variant is None and getattr(provider, "multi_latent_attention", False):
        variant = "latent"
    if variant is not None:
        raise CheckpointError(
            f"{source.path}: {source.architecture} has {variant} attention, which this backend cannot train; use "
            "another model"
        )
    if source.num_mtp_layers:
        trunk = converter.mapping_registry
        converter.mapping_registry = lambda: _with_mtp(trunk())
    return provider, converter


def _of_qwen3_next(source: Source) -> tuple[GPTModelProvider, MegatronModelBridge]:
    if source.num_mtp_layers > 1:
        raise CheckpointError(
            f"{source.path}: config.json says {source.num_mtp_layers} MTP layers, which in {source.architecture} share "
            "norms and projection; megatron-core cannot share them between layers, so expected at most 1"
        )
    converter = Qwen3NextBridge(source.text, source.shapes)
    try:
        return converter.provider_bridge(None), converter
    except KeyError as e:
        raise CheckpointError(f"{source.path}: config.json lacks {e}, which {source.architecture} has") from None


def _hf_config(source: Source) -> Any:
    """The transformers config that bridges read. MiMo's own class would run code from its folder; Qwen2's, with one
    more field, is equivalent."""
    if source.architecture == "MiMoForCausalLM":
        config = transformers.Qwen2Config(**{k: v for k, v in source.text.items() if k != "model_type"})
    else:
        config = transformers.AutoConfig.from_pretrained(source.path, trust_remote_code=False)
    config.dtype = torch.float32  # dtype of Megatron's weights, not of the folder's
    return config


def _with_mtp(trunk: MegatronMappingRegistry) -> MegatronMappingRegistry:
    # some bridges, more of them in newer releases, map their own MTP layers; these are replaced by MiMo's
    of_trunk = [mapping for mapping in trunk.mappings if not mapping.megatron_param.startswith("mtp.")]
    return MegatronMappingRegistry(*of_trunk, *_mtp_mappings(trunk))


def _mtp_mappings(trunk: MegatronMappingRegistry) -> Iterator[MegatronParamMapping]:
    """Mappings of MiMo's MTP layer: a trunk layer, with norms and a projection before it and a norm after it."""
    for mapping in trunk.mappings:
        if mapping.megatron_param.startswith(TRUNK):
            of_mtp = copy.copy(mapping)
            of_mtp.megatron_param = f"{MTP}{layer_in_mtp()}.{mapping.megatron_param.removeprefix(TRUNK)}"
            names = mapping.hf_param
            rename = lambda name: HF_MTP + name.removeprefix(HF_TRUNK)
            of_mtp.hf_param = rename(names) if isinstance(names, str) else {k: rename(v) for k, v in names.items()}
            yield of_mtp
    yield AutoMapping(f"{MTP}enorm.weight", f"{HF_MTP}token_layernorm.weight")
    yield AutoMapping(f"{MTP}hnorm.weight", f"{HF_MTP}hidden_layernorm.weight")
    yield AutoMapping(f"{MTP}final_layernorm.weight", f"{HF_MTP}final_layernorm.weight")
    yield SwappedHalves(f"{MTP}eh_proj.weight", f"{HF_MTP}input_proj.weight")


def _with_draft(
    raw: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Configuration and shapes, with the MTP layer that `asyncrl.models.mtp_from_trunk` creates."""
    from asyncrl.models.config import DecoderConfig
    from asyncrl.models.mtp_from_trunk import draft_from_trunk

    config = DecoderConfig.from_dict(raw)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    made = {name: tuple(tensor.shape) for name, tensor in draft_from_trunk(empty, config).items()}
    return config.with_mtp_layers(1).raw, shapes | made


# -- rope ----------------------------------------------------------------------------------------------------------


def _rope(source: Source) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling), read from config.json itself: the bridge reads rope_theta of its config object, which
    transformers 5 lacks, and would default to 10000."""
    rope = rope_fields(source.text)
    return float(rope["rope_theta"]), None if rope["rope_type"] == "default" else rope


def _rotated(source: Source) -> float:
    """Fraction of a head that is rotated; a quarter by default for Qwen3-Next and Qwen3.5."""
    unsaid = 0.25 if source.architecture in ARCHITECTURES else 1.0
    rope = rope_fields(source.text)
    return float(rope.get("partial_rotary_factor", source.text.get("partial_rotary_factor", unsaid)))


def _set_rope(provider: GPTModelProvider, source: Source) -> None:
    base, scaling = _rope(source)
    provider.rotary_base = base
    provider.rope_scaling, provider.seq_len_interpolation_factor = False, None
    provider.rotary_percent = _rotated(source)
    if scaling is None:
        return
    if scaling["rope_type"] == "llama3":
        provider.rope_scaling, provider.rope_scaling_factor = True, float(scaling["factor"])
    elif scaling["rope_type"] == "linear":
        provider.seq_len_interpolation_factor = float(scaling["factor"])
    else:
        raise CheckpointError(
            f"{source.path}: rope type {scaling['rope_type']!r} is not supported (default, linear, llama3)"
        )


def expect_same_rope(source: Source, inverse_frequencies: Tensor, interpolation: float | None) -> None:
    """Compare the rotary frequencies [D/2] of a megatron-core model with those of config.json.

    Raises CheckpointError if they differ: attention would be wrong at every position but the first."""
    base, scaling = _rope(source)
    heads = int(source.text["num_attention_heads"])
    head_dim = int(source.text.get("head_dim") or source.text["hidden_size"] // heads)
    rotated = SimpleNamespace(rope_theta=base, head_dim=int(head_dim * _rotated(source)), rope_scaling=scaling)
    wanted = rope_inverse_frequencies(cast(Any, rotated))
    found = inverse_frequencies.cpu().float() / (interpolation or 1.0)
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-5, atol=0):
        raise CheckpointError(
            f"{source.path}: config.json's rope (base {base:g}, scaling {scaling}) is not the one that megatron-core "
            f"computes (frequencies from {found[0]:.3g} to {found[-1]:.3g}, expected {wanted[0]:.3g} to "
            f"{wanted[-1]:.3g}); megatron-core has no other rope parameters"
        )
