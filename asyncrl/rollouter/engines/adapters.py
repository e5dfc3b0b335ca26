"""What a run's LoRA asks of an engine that keeps adapters beside its weights."""

from __future__ import annotations

from asyncrl.config.checks import derive, sends_adapters
from asyncrl.config.schema import Config
from asyncrl.models.lora import linear_shapes_at
from asyncrl.param_sync.adapters import ModuleShapes, adapter_spec


def adapted_modules(config: Config) -> ModuleShapes | None:
    """What an adapter may target; None if none is sent."""
    return linear_shapes_at(config.model.path) if sends_adapters(config) else None


def adapted_leaves(config: Config) -> list[str]:
    """The last words of what it does target, as engines name it."""
    targets = adapter_spec(config.model.lora, adapted_modules(config) or {}, "float32").target_modules
    return sorted({target.rpartition(".")[2] for target in targets})


def adapter_slots(config: Config) -> int:
    """Adapters at once: one, unless requests finish on theirs. Then a new one comes beside those of as many versions as
    samples may be stale: older ones have been trained. One more is the last one's, if it has no requests."""
    return derive(config).staleness_bound + 2 if config.param_sync.in_flight == "finish" else 1
