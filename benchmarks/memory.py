"""Compares the memory that a plan says a trainer rank needs with its measured peak. The last line is JSON.

On a CPU, one rank, random models of 30 to 60 million parameters, a step of two micro-batches of 8 samples of 256
tokens. Each measurement has a process of its own, whose peak is compared with the plan's sum and what the process held
before. MALLOC_MMAP_THRESHOLD_ makes glibc return freed blocks; by default it keeps holes of up to half of the peak.

    OMP_NUM_THREADS=1 python -m benchmarks.memory
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config
from asyncrl.models.config import ModelConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.run.memory_plan import trainer_bytes
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan

MIB = 2**20
PROMPT, RESPONSE = 24, 232
SIZE = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
#: model_type, more of its config, options
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "native": ("qwen3", {}, {"implementation": "native"}),
    "native, recomputed": ("qwen3", {}, {"implementation": "native", "activation_checkpointing": True}),
    "transformers": ("qwen3", {}, {"implementation": "transformers"}),
    "transformers, recomputed": ("qwen3", {}, {"implementation": "transformers", "activation_checkpointing": True}),
    "with a reference": ("qwen3", {}, {"implementation": "native", "kl_coef": 0.1}),
    "LoRA": ("qwen3", {}, {"implementation": "native", "rank": 16}),
    "experts": ("qwen3_moe", EXPERTS, {"implementation": "transformers"}),
    "deep and narrow": ("qwen3", {"num_hidden_layers": 24, "hidden_size": 256}, {"implementation": "native"}),
}


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_groups() -> list[bytes]:
    rng, groups = np.random.default_rng(0), []
    for g in range(2):
        samples = [
            Sample.single(
                index=i,
                tokens=rng.integers(0, SIZE["vocab_size"], RESPONSE),
                logprobs=np.full(RESPONSE, -6.0),
                loss_mask=np.ones(RESPONSE, bool),
                spans=[VersionSpan(0, PolicyVersion(0, 0))],
                finish=FinishReason.STOP,
                reward=float(i % 2),
            )
            for i in range(8)
        ]
        groups.append(Group.from_samples(f"g{g}", f"p{g}", 0, rng.integers(0, 100, PROMPT), samples).to_bytes())
    return groups


def measured(case: str) -> dict[str, float]:
    """Planned and measured peak of this process, in MiB."""
    kind, more, options = CASES[case]
    torch.set_num_threads(1)
    config = Config()
    config.trainer.device, config.trainer.mini_batch_groups = "cpu", 8
    config.trainer.max_tokens_per_micro_batch, config.checkpoint.every_steps = 8 * (PROMPT + RESPONSE), 0
    config.param_sync.bucket_bytes = 1  # nothing is sent
    for name, value in options.items():
        parts = (config.model, config.model.lora, config.trainer, config.algorithm)
        setattr(next(part for part in parts if hasattr(part, name)), name, value)
    with tempfile.TemporaryDirectory() as folder:
        made = transformers.AutoConfig.for_model(kind, **{**SIZE, **more})
        AutoModelForCausalLM.from_config(made).save_pretrained(folder)
        config.model.path = folder
        found: Any = SimpleNamespace(model=ModelConfig.load(folder), context_tokens=512)
        planned = sum(trainer_bytes(config, found).values())
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before, peak, over = resident_bytes(), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.005):
                peak = max(peak, resident_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
        rank.train(0, make_groups())
        over.set()
        watcher.join()
        rank.close()
    return {"planned": (before + planned) / MIB, "peak": peak / MIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options.measure)))
        return
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    print(f"{'':26} {'planned MiB':>12} {'peak MiB':>10} {'error':>8}")
    errors = {}
    for case in CASES:
        command = [sys.executable, "-m", "benchmarks.memory", "--measure", case]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        found = json.loads(done.stdout.splitlines()[-1])
        errors[case] = found["planned"] / found["peak"] - 1
        print(f"{case:26} {found['planned']:12.0f} {found['peak']:10.0f} {errors[case]:8.1%}", flush=True)
    print(json.dumps({"worst_error": round(max(map(abs, errors.values())), 3), "cases": len(errors)}))


if __name__ == "__main__":
    main()
