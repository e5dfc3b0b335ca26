"""LoRA settings for engines that keep adapters beside their weights."""

from __future__ import annotations

from asyncrl.config.checks import derive, sends_adapters
from asyncrl.config.schema import Config
from asyncrl.models.lora import linear_shapes_at
from asyncrl.param_sync.lora.adapters import ModuleShapes, adapter_spec


def adapted_modules(config: Config) -> ModuleShapes | None:
    """Modules that an adapter may target; None if none is sent."""
    return linear_shapes_at(config.model.path) if sends_adapters(config) else None


def adapted_leaves(config: Config) -> list[str]:
    """Last components of the targeted modules' names, as engines take them."""
    targets = adapter_spec(config.model.lora, adapted_modules(config) or {}, "float32").target_modules
    return sorted({target.rpartition(".")[2] for target in targets})


def adapter_slots(config: Config) -> int:
    """Number of adapters held at once: one, unless requests finish on theirs. Then: one per version within the
    staleness bound (older samples have been trained), the new one, and the latest one even if it has no requests."""
    return derive(config).staleness_bound + 2 if config.param_sync.in_flight == "finish" else 1
