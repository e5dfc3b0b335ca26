"""Compares step times of the Megatron backend and the torch backend. The last line is JSON.

One rank with one thread, a random model of the quickstart's size, and a batch like the quickstart's: 24 groups of 8
samples of 20 to 120 response tokens, in micro-batches of 2048 tokens; with and without the draft's loss. Both backends
alternate; the results are medians over steps. Needs the Megatron backend's environment.

    OMP_NUM_THREADS=1 python -m benchmarks.trainer_backends [--rounds 3] [--steps 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

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
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "num_nextn_predict_layers": 1,
}
GROUPS, SAMPLES = 24, 8
BACKENDS = ("torch", "megatron")


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


def step_seconds(model: Path, backend: str, draft: bool, steps: int) -> list[float]:
    config = Config()
    config.model.path = str(model)
    config.trainer.backend, config.trainer.device = backend, "cpu"
    config.trainer.mini_batch_groups, config.trainer.max_tokens_per_micro_batch = GROUPS, 2048
    config.mtp.enable_train, config.mtp.loss, config.mtp.updates_per_pass = draft, "cross_entropy", 1
    rank, groups, times = TrainerRank(config, 0, 1, None, Recorder("trainer/0")), make_groups(), []
    for step in range(steps + 1):
        start_s = time.perf_counter()
        rank.train(step, groups)
        times.append(time.perf_counter() - start_s)
    rank.close()
    return times[1:]  # the first one warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        decoder = Decoder(DecoderConfig.from_dict(MODEL))
        decoder.init_weights(seed=0)
        save_checkpoint(folder, decoder.named_parameters(), decoder.config)
        for _ in range(options.rounds):
            for draft in (False, True):
                for backend in BACKENDS:
                    name = f"{backend}_{'draft_' if draft else ''}step_s"
                    found.setdefault(name, []).extend(step_seconds(Path(folder), backend, draft, options.steps))
    figures = {name: round(statistics.median(times), 4) for name, times in found.items()}
    for kind in ("", "draft_"):
        figures[f"{kind}ratio"] = round(figures[f"megatron_{kind}step_s"] / figures[f"torch_{kind}step_s"], 3)
    for name, value in figures.items():
        print(f"{name:22} {value:8.4f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
