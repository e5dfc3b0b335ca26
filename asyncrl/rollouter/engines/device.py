"""Device that an engine runs on."""

from __future__ import annotations

import torch


def resolve_device(name: str) -> str:
    """rollout.engine.device with ``auto`` resolved: ``cuda`` where this process sees a GPU, else ``cpu``."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
