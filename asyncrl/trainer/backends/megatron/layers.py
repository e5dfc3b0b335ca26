"""Replacement modules for megatron-core's layers: DeltaNet over packed sequences, and modules for layers without
Transformer Engine."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.trainer.backends.megatron import packages
from asyncrl.trainer.backends.megatron.delta_net import DeltaNet
from asyncrl.trainer.backends.megatron.packed import PackedAttention

packages.prepare()

from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class ZeroCenteredNorm(torch.nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class SharedNorm:
    """torch's norm with two features that megatron-core's wrapper lacks: zero-centered weights, and sequence
    parallelism, which marks the weight's gradients to be summed over tensor parallel ranks."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:  # type: ignore[misc]
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm: torch.nn.Module
        if config.layernorm_zero_centered_gamma and config.normalization == "RMSNorm":
            norm = ZeroCenteredNorm(hidden_size, eps)
        else:
            norm = WrappedTorchNorm(plain, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


IN_PLACE_OF = {DotProductAttention: PackedAttention, WrappedTorchNorm: SharedNorm}


def without_transformer_engine(spec: Any) -> Any:
    """A megatron-core layer spec with asyncrl's replacements for modules that need Transformer Engine."""
    if isinstance(spec, type):
        return IN_PLACE_OF.get(spec, spec)
    if isinstance(spec, list):
        return [without_transformer_engine(part) for part in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = {f.name: without_transformer_engine(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **parts)
    return spec


def with_delta_net(spec: TransformerBlockSubmodules, linear: Sequence[int]) -> TransformerBlockSubmodules:
    """A stage's spec with DeltaNet as self attention of its ``linear`` layers, using their linear modules."""
    layers = []
    for layer, is_linear in zip(spec.layer_specs or [], linear, strict=False):
        if is_linear:
            delta_net = ModuleSpec(DeltaNet, submodules=layer.submodules.self_attention.submodules)
            parts = dataclasses.replace(layer.submodules, self_attention=delta_net)
            layer = dataclasses.replace(layer, submodules=parts)
        layers.append(layer)
    return dataclasses.replace(spec, layer_specs=layers)
