"""Limits common to the engines built on `asyncrl.rollouter.engines.streaming`."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.schema import Config
from asyncrl.rollouter.engines.base import PAUSE_KV, EngineSpec


class StreamingSpec(EngineSpec):
    pause_kv = PAUSE_KV | {("abort", "keep")}  # its prefix cache is keyed by version
    takes_adapters = True
    finishes_on_adapter = True
    multi_device = True
    speculates = True
    constrains = True
    float32_head = True
    takes_args = True

    def problems(self, config: Config) -> Iterator[str]:
        yield from super().problems(config)
        name = config.rollout.engine.name
        if config.mtp.init_from_trunk and config.mtp.enable_rollout:
            yield (
                f"mtp.init_from_trunk: {name} reads the draft's layers from the checkpoint, which then has none; "
                "expected false, or a checkpoint into which the draft was exported"
            )
