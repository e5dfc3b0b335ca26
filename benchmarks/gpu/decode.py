"""Decoding: whole steps of the native engine as a share of the memory floor, and transformers beside it."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import numpy as np
import torch

from asyncrl.models.config import DecoderConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engines.base import Request, SamplingParams
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.types.versions import PolicyVersion
from benchmarks.gpu.models import Run, random_model

BATCHES = (1, 8, 64, 256)
STATIC_BATCHES = (1, 64)  # each is compiled for a minute
PROMPT_TOKENS, CONTEXT_TOKENS, STEPS = 896, 2048, 25


@torch.inference_mode()
def decode(run: Run) -> dict[str, Any]:
    """Milliseconds of a step at 1, 8, 64 and 256 requests of about 1000 tokens, the drawing of tokens and all work of
    the CPU included. ``of_floor``: the time in which weights and KV can be read once, at the speed of a large copy,
    divided by the step's."""
    prompt, context, steps = (24, 128, 4) if run.tiny else (PROMPT_TOKENS, CONTEXT_TOKENS, STEPS)
    speed = run.copied_bytes_per_s()
    model = random_model(run, context)
    c, rng = model.config, np.random.default_rng(0)
    weights = sum(view.nbytes for view in model.named_views().values())
    figures: dict[str, Any] = {"copy_gb_per_s": round(speed / 1e9), "weights_gb": round(weights / 1e9, 3)}
    for batch in BATCHES:
        core = Core(model, slots=batch, context_tokens=context, prefill_chunk_tokens=2048, recorder=Recorder("engine"))
        core.start(PolicyVersion(0, 0))
        prompts = rng.integers(0, c.vocab_size, (batch, prompt)).astype(np.int32)
        for _ in range(2):  # the first compiles and records
            core.abort()
            core.submit([Request(f"{i}", f"{i}", p, 0, i, 0, context, SamplingParams()) for i, p in enumerate(prompts)])
            prefill_s = run.seconds(functools.partial(until_all_decode, core, batch))
        several = functools.partial(step, core, steps)
        seconds = run.median_s(several) / steps
        attended = int(core._positions[:batch].sum())
        read = weights + attended * c.num_layers * 2 * c.num_kv_heads * c.head_dim * 2
        figures[f"b{batch}"] = {
            "ms": round(1e3 * seconds, 3),
            "of_floor": round(read / speed / seconds, 3),
            "tokens_per_s": round(batch / seconds),
            "kv_tokens": attended,
            "prefill_tokens_per_s": round(batch * prompt / prefill_s),
        }
        del core
    return figures


def until_all_decode(core: Core, batch: int) -> None:
    while len(core._scheduler.decoding()) < batch:
        core.step()


def step(core: Core, count: int) -> None:
    for _ in range(count):
        core.step()


def transformers_decode(run: Run) -> dict[str, Any]:
    """Milliseconds per token of transformers' `generate` with a static cache and its compiled decode step, at the same
    sizes: the difference between a long and a short generation."""
    import transformers

    prompt, short, long = (24, 4, 12) if run.tiny else (PROMPT_TOKENS, 16, 144)
    config = transformers.Qwen2Config(**{k: v for k, v in run.config.items() if k != "architectures"})
    with torch.device(run.device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    figures: dict[str, Any] = {}
    for batch in STATIC_BATCHES:
        ids = torch.randint(0, DecoderConfig.from_dict(run.config).vocab_size, (batch, prompt), device=run.device)

        def generate(new: int, ids: torch.Tensor = ids) -> None:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=new,
                max_new_tokens=new,
                max_length=None,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                cache_implementation="static",
            )

        generate(short)
        generate(long)
        spans = [run.seconds(lambda: generate(long)) - run.seconds(lambda: generate(short)) for _ in range(3)]
        seconds = statistics.median(spans) / (long - short)
        figures[f"b{batch}"] = {"ms": round(1e3 * seconds, 3), "tokens_per_s": round(batch / seconds)}
    return figures
