"""Gated DeltaNet of Qwen3-Next and Qwen3.5: the names and rows of its input projection, here and in checkpoints.

megatron-core has one matrix, ``in_proj``, whose rows are q, k, v, z (the output's gate), b and a (how much is written,
and forgotten); of each tensor parallel rank those of its heads. Qwen3-Next has two, ``in_proj_qkvz`` and
``in_proj_ba``, grouped by key head, which Megatron-Bridge converts. Qwen3.5 has four, ``in_proj_qkv``, ``in_proj_z``,
``in_proj_b`` and ``in_proj_a``, each with its parts one after another, which it does not know.

Models with such layers are not trained yet (`refuse_delta_net`); what is here is what a bridge for one needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from asyncrl.models.config import CheckpointError
from asyncrl.trainer.backends.megatron import cpu

cpu.activate()

from megatron.bridge.models.conversion.param_mapping import (  # noqa: E402
    AutoMapping,
    GDNConv1dMapping,
    GDNLinearMapping,
    MegatronParamMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
)

SPLIT = ("qkv", "z", "b", "a")
FUSED = ("qkvz", "ba")


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


def delta_net_mappings(layer: str, hf_layer: str, names: Collection[str]) -> Iterator[MegatronParamMapping]:
    """For the DeltaNet of a layer (``…self_attention.``) and of the checkpoint's (``…linear_attn.``), both with ``*``
    for its number; ``names``: the checkpoint's tensors, which tell the family."""
    split = any(name.endswith("linear_attn.in_proj_qkv.weight") for name in names)
    kind, parts = (SplitInProjection, SPLIT) if split else (GDNLinearMapping, FUSED)
    yield kind(f"{layer}in_proj.weight", **{part: f"{hf_layer}in_proj_{part}.weight" for part in parts})
    yield GDNConv1dMapping(f"{layer}conv1d.weight", f"{hf_layer}conv1d.weight")
    yield RMSNorm2ZeroCenteredRMSNormMapping(f"{layer}out_norm.weight", f"{hf_layer}norm.weight")
    for name in ("out_proj.weight", "A_log", "dt_bias"):
        yield AutoMapping(f"{layer}{name}", f"{hf_layer}{name}")


def refuse_delta_net(path: Any, text: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a model (``text``: the text part of its config.json) that has such layers."""
    if text.get("linear_num_value_heads") or "linear_attention" in (text.get("layer_types") or ()):
        raise CheckpointError(
            f"{path}: the model has Gated DeltaNet layers; those of megatron-core 0.16 take no packed sequences, which "
            "this backend trains on, and need flash-linear-attention, which needs a GPU; use another model"
        )


def _rows(config: Any) -> list[int]:
    """Of q, k, v, z, b and a, over all ranks."""
    keys = config.linear_key_head_dim * config.linear_num_key_heads
    values = config.linear_value_head_dim * config.linear_num_value_heads
    return [keys, keys, values, values, config.linear_num_value_heads, config.linear_num_value_heads]
