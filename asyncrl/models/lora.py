"""LoRA in the native decoder: low-rank pairs beside frozen linear layers, saved as PEFT folders.

A layer's weight keeps its name, and its pair is named after it: ``…q_proj.weight``, ``…q_proj.lora_A.weight``,
``…q_proj.lora_B.weight``. PEFT's names are these, prefixed with `PEFT_PREFIX`.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn

from asyncrl.models.checkpoint import tensor_shapes
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder

_LINEAR = re.compile(
    r"(model\.(?:language_model\.)?layers\.\d+\.(?:self_attn|linear_attn|mlp)\.(?:\w+_proj|in_proj_\w+))\.weight"
)
PEFT_PREFIX = "base_model.model."


class LoRALinear(nn.Linear):
    """``base`` with a pair A [r, in], B [out, r]: ``base(x) + alpha / r · B(A(x))``, or ``base(x)`` if not ``adapted``.

    A is given and B starts as zeros, so the policy starts as the base."""

    def __init__(self, base: nn.Linear, a: Tensor, alpha: float) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, len(a), bias=False, device="meta")
        self.lora_B = nn.Linear(len(a), base.out_features, bias=False, device="meta")
        self.lora_A.weight = nn.Parameter(a)
        self.lora_B.weight = nn.Parameter(a.new_zeros(base.out_features, len(a)))
        self.scale, self.adapted = alpha / len(a), True

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.scale * self.lora_B(self.lora_A(x)) if self.adapted else out


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """`linear_shapes_of` the native decoder."""
    with torch.device("meta"):
        return linear_shapes_of(Decoder(config))


def linear_shapes_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Linear layers that an adapter may target, with their weight's [out, in]: attention, linear attention and dense
    feed-forward of the trunk's layers, but neither routers nor experts, shared ones included."""
    linear = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return {name: (m.out_features, m.in_features) for name, m in linear if _LINEAR.fullmatch(f"{name}.weight")}


def linear_shapes_at(path: str | Path) -> dict[str, tuple[int, int]]:
    """`linear_shapes_of` a checkpoint's model; without the native decoder, layers are found by the names of tensors."""
    if (decoder := DecoderConfig.of(path)) is not None:
        return linear_shapes(decoder)
    found = ((_LINEAR.fullmatch(name), shape) for name, shape in tensor_shapes(path).items())
    return {match[1]: (shape[0], shape[1]) for match, shape in found if match}


def first_a(module: str, rank: int, columns: int, seed: int) -> Tensor:
    """float32 [rank, columns]: A of a module's pair, initialized as in PEFT. It depends only on seed and name, not on
    the machine or on other modules."""
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{module}".encode()))
    return nn.init.kaiming_uniform_(torch.empty(rank, columns), a=math.sqrt(5), generator=generator)


def add_adapters(model: nn.Module, modules: Collection[str], rank: int, alpha: float, seed: int) -> None:
    """Add a pair to each of the linear ``modules``, with A from `first_a`. Freezes nothing."""
    for name in modules:
        base = cast(nn.Linear, model.get_submodule(name))
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoRALinear(base, first_a(name, rank, base.in_features, seed), alpha))


def pair_names(module: str) -> tuple[str, str]:
    """Names of A and B."""
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes as its base."""
    adapted = [module for module in model.modules() if isinstance(module, LoRALinear)]
    try:
        for module in adapted:
            module.adapted = False
        yield
    finally:
        for module in adapted:
            module.adapted = True


def save_adapter(
    path: str | Path, tensors: Mapping[str, Tensor], base: str, rank: int, alpha: float, target_modules: Sequence[str]
) -> None:
    """Write adapter_config.json and adapter_model.safetensors (``tensors`` under PEFT's names), as PEFT does; ``base``
    is the base model's folder."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(target_modules),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    file = folder / "adapter_model.safetensors"
    save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, str(file), {"format": "pt"})
    file.chmod(0o644)
