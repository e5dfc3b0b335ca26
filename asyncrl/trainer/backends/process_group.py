"""The process group of a backend's ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def join(rank: int, world_size: int, device: torch.device, init_method: str | None, timeout_s: float) -> None:
    """Make this process rank ``rank`` of ``world_size``, which meet at ``init_method``; a single rank needs none.

    Over NCCL on CUDA, with gloo beside it for what is on the host: gradients and optimizer state that were offloaded,
    and checkpoints. Raises ValueError for several ranks without a place to meet."""
    if init_method is None and world_size > 1:
        raise ValueError(f"{world_size} ranks need an init_method at which to meet, such as tcp://host:port")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        store=dist.HashStore() if init_method is None else None,  # a store within this process, for a single rank
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
