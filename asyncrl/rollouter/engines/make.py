"""The engine that a config names. Each engine's packages are imported only where it is the one."""

from __future__ import annotations

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.rollouter.engine import Engine
from asyncrl.telemetry.recorder import Recorder


async def make_engine(config: Config, recorder: Recorder) -> Engine:
    """One replica's engine, ready and paused. Raises what the engine raises for a checkpoint or options that do not fit
    it."""
    if config.rollout.engine.name == "vllm":
        from asyncrl.rollouter.engines.vllm.engine import VLLMEngine

        return await VLLMEngine.start(config, recorder=recorder)
    if config.rollout.engine.name == "sglang":
        from asyncrl.rollouter.engines.sglang.engine import SGLangEngine

        return await SGLangEngine.start(config, recorder=recorder)
    from asyncrl.rollouter.engines.native.engine import NativeEngine
    from asyncrl.rollouter.tokenizer import PromptTokenizer

    tokenizer = PromptTokenizer(config.model.path, config.data.apply_chat_template)
    return NativeEngine(
        config.model.path,
        config.rollout.engine,
        recorder=recorder,
        tokenizer=tokenizer.hf,
        mtp=config.mtp,
        lora=config.model.lora if sends_adapters(config) else None,
    )
