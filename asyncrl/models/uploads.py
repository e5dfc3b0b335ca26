"""The way of small arrays from the host to where a model computes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(host: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The array on the device; on the CPU itself, or a view of it.

    To a GPU it goes through pinned memory: from any other, a copy waits until the GPU has done all that was asked of it
    before, and what is asked next then comes late. torch keeps pinned memory until the copy is made."""
    tensor = torch.from_numpy(np.ascontiguousarray(host)) if isinstance(host, np.ndarray) else host
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
