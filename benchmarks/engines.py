"""Compares the CPU throughput of vLLM and the native engine through the same interface.

Both have the same random model, prompts and lengths, 32 samples at once, one thread for the model, sampling at
temperature 1 with logprobs; the workload is that of benchmarks.native_engine. The engines alternate, and the results
are medians. vLLM's scheduler process occasionally uses a second core; the native engine has no such process.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.engines [--repetitions 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from asyncrl.config.schema import Config, EngineConfig, ModelConfig, RolloutConfig
from asyncrl.models.config import DecoderConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engines.base import Engine
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.engines.vllm.engine import VLLMEngine
from asyncrl.types.versions import PolicyVersion
from benchmarks.native_engine import (
    CONCURRENT,
    CONTEXT_TOKENS,
    EQUAL,
    MIXED,
    MODELS,
    PROMPT_TOKENS,
    run_engine,
    save_random,
)


async def measure(folder: Path, repetitions: int) -> dict[str, float]:
    """Tokens per second of each engine, and the ratio of vLLM to native."""
    options = EngineConfig(slots=CONCURRENT, max_context_tokens=CONTEXT_TOKENS, device="cpu", dtype="float32")
    theirs = EngineConfig(**(vars(options) | {"name": "vllm", "args": {"skip_tokenizer_init": True}}))
    config = Config(model=ModelConfig(path=str(folder)), rollout=RolloutConfig(engine=theirs))
    engines: dict[str, Engine] = {
        "native": NativeEngine(folder, options),
        "vllm": await VLLMEngine.start(config, recorder=Recorder("vllm")),
    }
    vocabulary = DecoderConfig.load(folder).vocab_size
    rng = np.random.default_rng(0)
    figures: dict[str, float] = {}
    try:
        for engine in engines.values():
            await engine.resume(PolicyVersion(0, 0))
        for kind, lengths in (("equal", EQUAL), ("mixed", MIXED)):
            rates: dict[str, list[float]] = {name: [] for name in engines}
            for repetition in range(repetitions + 1):  # the first one warms up
                # new prompts each time: vLLM would find repeated ones in its prefix cache
                prompts = rng.integers(0, vocabulary, (len(lengths), PROMPT_TOKENS)).astype(np.int32)
                for name, engine in engines.items():
                    start_s = time.perf_counter()
                    await run_engine(engine, prompts, lengths)
                    if repetition:
                        rates[name].append(sum(lengths) / (time.perf_counter() - start_s))
            for name in engines:
                figures[f"{name}_{kind}_tokens_per_s"] = round(statistics.median(rates[name]), 1)
            ratios = [vllm / native for vllm, native in zip(rates["vllm"], rates["native"])]
            figures[f"vllm_over_native_{kind}"] = round(statistics.median(ratios), 3)
    finally:
        for engine in engines.values():
            await engine.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_random(MODELS["qwen3_5m"] | {"model_type": "qwen3"}, Path(folder))  # vLLM selects by model_type
        figures = asyncio.run(measure(Path(folder), repetitions))
    for kind in ("equal", "mixed"):
        native, vllm = figures[f"native_{kind}_tokens_per_s"], figures[f"vllm_{kind}_tokens_per_s"]
        print(f"{kind:5}  native {native:8.0f}  vllm {vllm:8.0f} tokens/s  {vllm / native:.2f}x")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
