"""Names what holds a GPU's memory when it runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

GIB = 1 << 30


class DeviceMemoryError(torch.OutOfMemoryError):
    """A GPU's memory has run out: one line with what was done, what holds how much, and what to lower."""


@contextlib.contextmanager
def naming_memory(
    device: torch.device, doing: str, held: Callable[[], Mapping[str, int]], advice: str
) -> Iterator[None]:
    """Turn torch's out-of-memory errors in this block into DeviceMemoryError. ``held``: bytes of what is known to lie
    on the device, by name; ``advice``: the options to lower."""
    try:
        yield
    except DeviceMemoryError:
        raise
    except torch.OutOfMemoryError as problem:
        figures = _figures(device)
        raise DeviceMemoryError(line(f"{device}", doing, held(), advice, *figures)) from problem


def line(
    device: str, doing: str, held: Mapping[str, int], advice: str, allocated: int, reserved: int, free: int, total: int
) -> str:
    """The message. Bytes: ``allocated`` to this process's tensors, ``reserved`` by its allocator, and of the whole
    device."""
    parts = {name: nbytes for name, nbytes in held.items() if nbytes}
    parts["activations and workspace"] = max(allocated - sum(parts.values()), 0)
    parts["cached by torch"] = max(reserved - allocated, 0)
    parts["other processes and CUDA itself"] = max(total - free - reserved, 0)
    shares = ", ".join(f"{name} {nbytes / GIB:.2f}" for name, nbytes in parts.items())
    return (
        f"{device} ran out of memory {doing}. Of its {total / GIB:.2f} GiB: {shares}, free {free / GIB:.2f}. "
        f"Lower {advice}"
    )


def tensor_bytes(tree: Any, device: torch.device) -> int:
    """Bytes on ``device`` of all tensors in nested mappings; of sharded ones this rank's part."""
    if isinstance(tree, Mapping):
        return sum(tensor_bytes(value, device) for value in tree.values())
    if not isinstance(tree, torch.Tensor):
        return 0
    local = tree.to_local() if hasattr(tree, "to_local") else tree
    return local.nbytes if local.device == device else 0


def _figures(device: torch.device) -> tuple[int, int, int, int]:
    if device.type != "cuda":
        return 0, 0, 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), free, total
