"""What SGLang imports from its kernel package where there is no GPU. Most names are there with nothing behind them:
generation without speculation calls none."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

# SGLang's only attention on CPUs that goes with a draft looks these up as it starts, and calls them to generate.
_OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in ("decode_attention_cpu", "extend_attention_cpu"):
    _OPERATORS.define(f"{_name}() -> ()")


def copy_all_layer_kv_cache_cpu(data_ptrs: Any, strides: Any, tgt_loc: Any, src_loc: Any) -> None:
    """Rows of every layer's cache from source to target places, ``strides`` bytes each; a server with a draft tries it
    out as it starts."""
    for address, stride in zip(data_ptrs.tolist(), strides.tolist()):
        rows = [ctypes.string_at(address + place * stride, stride) for place in src_loc.tolist()]
        for place, row in zip(tgt_loc.tolist(), rows):
            ctypes.memmove(address + place * stride, row, stride)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_"):
        raise AttributeError(name)

    def missing(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: the stand-in of SGLang's CPU tests has no kernels")

    return missing
