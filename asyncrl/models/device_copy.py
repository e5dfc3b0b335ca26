"""Host-to-device copies of small arrays."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(host: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The array on the device; on the CPU the array itself, or a view of it.

    Copies to a GPU from pinned memory: a copy from pageable memory would wait for all queued kernels, and delay those
    launched next. torch keeps the pinned memory until the copy is done."""
    tensor = torch.from_numpy(np.ascontiguousarray(host)) if isinstance(host, np.ndarray) else host
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
