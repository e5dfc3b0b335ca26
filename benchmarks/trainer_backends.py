"""Compares step times and memory of the trainers: the torch backend with the native decoder and with transformers, and
the Megatron backend. The last line is JSON.

One rank with one thread, a random Qwen2 of the quickstart's size, and a batch like the quickstart's: 24 groups of 8
samples of 20 to 120 response tokens, in micro-batches of 2048 tokens; for native and Megatron also with an MTP
draft and its loss. Every measurement has a process of its own; the kinds alternate, and results are medians over steps.
Needs the default environment; Megatron is left out without its own (`make venv-megatron`).

    OMP_NUM_THREADS=1 python -m benchmarks.trainer_backends [--rounds 3] [--steps 5] [--megatron-python PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
DRAFT = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
#: kind → backend, implementation, with a draft
KINDS = {
    "native": ("torch", "native", False),
    "transformers": ("torch", "transformers", False),
    "megatron": ("megatron", "auto", False),
    "native_draft": ("torch", "native", True),
    "megatron_draft": ("megatron", "auto", True),
}
GROUPS, SAMPLES = 24, 8


def make_groups() -> list[bytes]:
    rng = np.random.default_rng(0)
    draw = lambda count: rng.integers(0, MODEL["vocab_size"], count)
    groups = []
    for g in range(GROUPS):
        samples = [
            Sample.single(
                index=i,
                tokens=draw(length),
                logprobs=np.full(length, -6.0),
                loss_mask=np.ones(length, bool),
                spans=[VersionSpan(0, PolicyVersion(0, 0))],
                finish=FinishReason.STOP,
                reward=float(i % 2),
            )
            for i, length in enumerate(rng.integers(20, 121, SAMPLES))
        ]
        groups.append(Group.from_samples(f"g{g}", f"p{g}", 0, draw(24), samples).to_bytes())
    return groups


def measured(kind: str, steps: int) -> dict[str, Any]:
    """Seconds of each step, tokens of a step, and the process's peak memory in MB."""
    backend, implementation, draft = KINDS[kind]
    torch.set_num_threads(1)
    config, groups = Config(), make_groups()
    with tempfile.TemporaryDirectory() as folder:
        decoder = Decoder(DecoderConfig.from_dict(MODEL | (DRAFT if draft else {})))
        decoder.init_weights(seed=0)
        save_checkpoint(folder, decoder.named_parameters(), decoder.config)
        config.model.path, config.model.implementation = folder, implementation  # type: ignore[assignment]
        config.trainer.backend, config.trainer.device = backend, "cpu"
        config.trainer.mini_batch_groups, config.trainer.max_tokens_per_micro_batch = GROUPS, 2048
        config.mtp.enable_train, config.mtp.loss, config.mtp.updates_per_pass = draft, "cross_entropy", 1
        rank, times = TrainerRank(config, 0, 1, None, Recorder("trainer/0")), []
        for step in range(steps + 1):
            start_s = time.perf_counter()
            rank.train(step, groups)
            times.append(time.perf_counter() - start_s)
        rank.close()
    tokens = sum(len(Group.from_buffer(group).tokens) for group in groups)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"step_s": times[1:], "tokens": tokens, "peak_mb": peak_mb}  # the first step warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--megatron-python", default=".venv-megatron/bin/python")
    parser.add_argument("--measure", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options.measure, options.steps)))
        return
    pythons = {"torch": sys.executable, "megatron": options.megatron_python}
    kinds = [kind for kind, (backend, *_) in KINDS.items() if Path(pythons[backend]).is_file()]
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            command = [pythons[KINDS[kind][0]], "-m", "benchmarks.trainer_backends", "--measure", kind]
            command += ["--steps", str(options.steps)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
            found[kind].append(json.loads(done.stdout.splitlines()[-1]))
    figures: dict[str, float] = {}
    print(f"{'':16} {'step s':>8} {'tokens/s':>10} {'peak MB':>8}")
    for kind, runs in found.items():
        step_s = statistics.median(second for run in runs for second in run["step_s"])
        peak_mb = statistics.median(run["peak_mb"] for run in runs)
        figures |= {f"{kind}_tokens_per_s": round(runs[0]["tokens"] / step_s, 1), f"{kind}_peak_mb": round(peak_mb, 1)}
        print(f"{kind:16} {step_s:8.3f} {figures[f'{kind}_tokens_per_s']:10.0f} {peak_mb:8.0f}")
    for kind in ("transformers", "megatron", "megatron_draft"):
        if kind in kinds:
            native = figures[f"native{'_draft' if kind.endswith('_draft') else ''}_tokens_per_s"]
            figures[f"{kind}_over_native"] = round(figures[f"{kind}_tokens_per_s"] / native, 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
