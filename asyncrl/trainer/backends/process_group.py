"""Process group of a backend's ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def join(rank: int, world_size: int, device: torch.device, init_method: str | None, timeout_s: float) -> None:
    """Join as rank ``rank`` of ``world_size``. ``init_method``: where the ranks meet; a single rank needs none.

    CUDA uses NCCL, with gloo beside it for host tensors: offloaded gradients and optimizer state, and checkpoints.
    Raises ValueError for several ranks without ``init_method``."""
    if init_method is None and world_size > 1:
        raise ValueError(f"{world_size} ranks need an init_method to meet at, such as tcp://host:port; found none")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        store=dist.HashStore() if init_method is None else None,  # in this process, for a single rank
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
