"""What stands in megatron-core's layers where Transformer Engine is absent."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from asyncrl.trainer.backends.megatron import cpu
from asyncrl.trainer.backends.megatron.packed import PackedAttention

cpu.activate()

from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class SharedNorm:
    """torch's norm, also where each tensor parallel rank has a part of the tokens (``sequence_parallel``), which
    megatron-core's does not allow: the gradients of its weight are then marked to be summed over these ranks."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:  # type: ignore[misc]
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm: torch.nn.Module = WrappedTorchNorm(plain, hidden_size, eps)
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
