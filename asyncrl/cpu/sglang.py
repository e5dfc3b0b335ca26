"""Corrections of SGLang's CPU build, applied in its processes only where the defect is found.

*Pinned memory*: LoRA layers pin their small tensors whatever the device, which torch refuses without an accelerator.
`pinning_is_refused` tries it; the correction leaves them unpinned, which only affects how they are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def correct_cpu_build() -> None:
    if pinning_is_refused():
        for factory in ("tensor", "zeros", "empty", "arange"):
            setattr(torch, factory, _without_pinning(getattr(torch, factory)))
        torch.Tensor.pin_memory = lambda self, *args, **options: self  # type: ignore[method-assign]


def pinning_is_refused() -> bool:
    try:
        torch.zeros(1, pin_memory=True)
    except RuntimeError:
        return True
    return False


def _without_pinning(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return factory(*args, **options)

    return made
