"""Placement of the senders and replicas that a transport must join."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from asyncrl.config.schema import Config


class DevicePlacement(NamedTuple):
    """Machine and GPU of one end. ``device`` is unique in the cluster; None: on the CPU."""

    machine: str
    device: str | None = None

    def __str__(self) -> str:
        return f"{self.machine}/{self.device}" if self.device else f"{self.machine} (CPU)"


Placements = Sequence[DevicePlacement]


def share_a_machine(placements: Placements) -> bool:
    return len({placement.machine for placement in placements}) == 1


def share_a_gpu(placements: Placements) -> bool:
    return placements[0].device is not None and len({placement.device for placement in placements}) == 1


def have_own_gpus(placements: Placements) -> bool:
    devices = {placement.device for placement in placements}
    return None not in devices and len(devices) == len(placements)


def mixed_gpus(placements: Placements) -> str:
    """Note for a route that takes GPUs through host memory because no direct route exists."""
    direct = share_a_gpu(placements) or have_own_gpus(placements)
    on_gpus = any(placement.device for placement in placements)
    return "; their GPUs are neither one shared GPU nor one GPU each" if on_gpus and not direct else ""


def needs_gpus(transport: str, config: Config) -> Iterator[str]:
    """Problems of a transport whose ends must all be on GPUs."""
    devices = {"trainer.device": config.trainer.device, "rollout.engine.device": config.rollout.engine.device}
    for option, device in devices.items():
        if device == "cpu":
            yield f"param_sync.transport: {transport} joins GPUs; expected {option} cuda or auto, found {device}"
