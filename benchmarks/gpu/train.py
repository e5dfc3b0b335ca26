"""Train steps: tokens per second and model FLOPs utilization."""

from __future__ import annotations

import statistics
from typing import Any, Literal

import numpy as np
import torch

from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import tensor_shapes
from asyncrl.models.config import DecoderConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from benchmarks.gpu.models import Run

#: dense bfloat16 FLOP/s of the vendor's data sheets, by part of the device's name
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
GROUPS, SAMPLES, TOKENS, PROMPT_TOKENS = 4, 8, 1024, 32


def train(run: Run, implementation: Literal["native", "transformers"]) -> dict[str, Any]:
    """bfloat16 train steps of 32 sequences of 1024 tokens on one rank, optimizer included. ``mfu``: 6 FLOPs per weight
    and token, and 12 · layers · heads · head_dim · half the length per token for attention, over step time and the
    card's dense bfloat16 peak."""
    config, tokens = Config(), 64 if run.tiny else TOKENS
    config.model.path, config.model.implementation = str(run.checkpoint), implementation
    config.trainer.device, config.trainer.mixed_precision = run.device, "bfloat16"
    config.trainer.max_tokens_per_micro_batch, config.trainer.mini_batch_groups = 16 * tokens, GROUPS
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
    c = DecoderConfig.from_dict(run.config)
    buffers = [group(number, tokens, c.vocab_size) for number in range(GROUPS)]
    losses: list[float] = []
    step = lambda: losses.append(rank.train(len(losses), buffers)["actor/loss"])
    seconds = [run.seconds(step) for _ in range(5)][2:]  # the first two compile and choose kernels
    trained = GROUPS * SAMPLES * tokens
    weights = sum(int(np.prod(shape)) for shape in tensor_shapes(run.checkpoint).values())
    flops = trained * (6 * weights + 12 * c.num_layers * c.num_heads * c.head_dim * tokens / 2)
    step_s = statistics.median(seconds)
    figures: dict[str, Any] = {
        "step_s": round(step_s, 4),
        "tokens_per_s": round(trained / step_s),
        "tflops": round(flops / step_s / 1e12, 1),
        "mfu": None,
        "export_s": round(run.median_s(lambda: sum(tensor.nbytes for _, tensor in rank.export()), 3), 4),
        "losses": [round(loss, 5) for loss in losses],
    }
    if run.device == "cuda":
        name = torch.cuda.get_device_name()
        if peak := next((peak for part, peak in PEAKS.items() if part in name), None):
            figures["mfu"] = round(flops / step_s / peak, 3)
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    rank.close()
    return figures


def group(number: int, tokens: int, vocabulary: int) -> bytes:
    """Random tokens with the logprobs of a uniform policy."""
    rng, length = np.random.default_rng(number), tokens - PROMPT_TOKENS
    samples = [
        Sample.single(
            index=index,
            tokens=rng.integers(0, vocabulary, length),
            logprobs=np.full(length, -np.log(vocabulary), np.float32),
            loss_mask=np.ones(length, bool),
            spans=[VersionSpan(0, PolicyVersion(0, 0))],
            finish=FinishReason.STOP,
            reward=float(index % 2),
        )
        for index in range(SAMPLES)
    ]
    prompt = rng.integers(0, vocabulary, PROMPT_TOKENS)
    return Group.from_samples(f"g{number}", f"p{number}", 0, prompt, samples).to_bytes()
