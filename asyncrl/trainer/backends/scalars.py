"""Metrics of a training step: scalars and vectors that are summed over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def add_scalars(totals: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Add ``values`` to ``totals``, in float64."""
    for name, value in values.items():
        totals[name] = totals[name] + value.double() if name in totals else value.double()


def reduce_scalars(
    values: Mapping[str, Tensor],
    op: dist.ReduceOp.RedOpType,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Reduce ``values`` over a group (None: all ranks): one collective on ``device``, one copy to the host. A vector
    [n] under ``name`` becomes ``name/0`` to ``name/{n − 1}``."""
    if not values:
        return {}
    packed = torch.cat([value.double().reshape(-1) for value in values.values()])
    names = [f"{name}/{i}" if value.ndim else name for name, value in values.items() for i in range(value.numel())]
    if dist.get_world_size(group) > 1:
        packed = packed.to(device)
        dist.all_reduce(packed, op, group=group)
    return dict(zip(names, packed.tolist(), strict=True))
