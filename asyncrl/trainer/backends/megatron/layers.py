"""What stands in megatron-core's layers in place of its own modules: a DeltaNet over packed sequences everywhere, and
others where Transformer Engine is absent."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.trainer.backends.megatron import cpu
from asyncrl.trainer.backends.megatron.delta_net import DeltaNet
from asyncrl.trainer.backends.megatron.packed import PackedAttention

cpu.activate()

from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class ZeroCenteredNorm(torch.nn.RMSNorm):
    """An RMSNorm that multiplies by one more than its weight."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class SharedNorm:
    """torch's norm, also zero-centered, and also where each tensor parallel rank has a part of the tokens
    (``sequence_parallel``), neither of which megatron-core's allows: the gradients of its weight are then marked to be
    summed over these ranks."""

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
    """A specification of megatron-core's, with this project's modules in place of those that cannot do it all."""
    if isinstance(spec, type):
        return IN_PLACE_OF.get(spec, spec)
    if isinstance(spec, list):
        return [without_transformer_engine(part) for part in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = {f.name: without_transformer_engine(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **parts)
    return spec


def with_delta_net(spec: TransformerBlockSubmodules, linear: Sequence[int]) -> TransformerBlockSubmodules:
    """The specification of a stage whose ``linear`` layers have a DeltaNet for their self attention, made of its linear
    layers."""
    layers = []
    for layer, is_linear in zip(spec.layer_specs or [], linear, strict=False):
        if is_linear:
            delta_net = ModuleSpec(DeltaNet, submodules=layer.submodules.self_attention.submodules)
            parts = dataclasses.replace(layer.submodules, self_attention=delta_net)
            layer = dataclasses.replace(layer, submodules=parts)
        layers.append(layer)
    return dataclasses.replace(spec, layer_specs=layers)
