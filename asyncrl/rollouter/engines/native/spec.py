"""The native engine's spec: its limits and how it starts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from asyncrl.config.checks import sends_adapters, warm_kv_bytes
from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engines.base import Engine, EngineSpec


class NativeSpec(EngineSpec):
    staging = frozenset({"bucket", "full"})
    takes_adapters = True
    deterministic = True
    speculates = True
    constrains = True
    float32_head = True
    native_decoder = True
    preallocates_kv = True

    def problems(self, config: Config) -> Iterator[str]:
        yield from super().problems(config)
        if config.mtp.enable_rollout and config.rollout.engine.deterministic:
            yield (
                "mtp.enable_rollout: does not work with rollout.engine.deterministic: the number of accepted draft "
                "tokens changes the computed shapes; expected one of the two to be false"
            )

    async def start(self, config: Config, recorder: Recorder) -> Engine:
        from asyncrl.rollouter.engines.native.engine import NativeEngine
        from asyncrl.rollouter.tokenizer import PromptTokenizer

        @cache
        def load_tokenizer() -> Any:
            return PromptTokenizer.of(config).hf

        if config.rollout.stop_strings or config.rollout.agent.enabled:
            load_tokenizer()  # takes seconds, which most runs do not need, and no request should wait for
        return NativeEngine(
            config.model.path,
            config.rollout.engine,
            recorder=recorder,
            load_tokenizer=load_tokenizer,
            mtp=config.mtp,
            lora=config.model.lora if sends_adapters(config) else None,
            warm_bytes=warm_kv_bytes(config),
            float32_head=config.model.float32_head,
        )


ENGINE = NativeSpec()
