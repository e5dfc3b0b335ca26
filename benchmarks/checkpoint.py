"""Measures how long training waits for a checkpoint. The last line is JSON.

One rank with one thread, a random model of 19 million float32 parameters and its Adam moments. Measurements alternate;
the results are medians:

- ``stage_s``: wait for an asynchronous checkpoint: the copy of the state into host memory.
- ``sync_s``: wait for a synchronous one: the same copy, written with checksums, flushed to disk and renamed.
- ``wait_share``: ``stage_s`` / ``sync_s``, median of the rounds' ratios.
- ``step_s``, ``step_beside_s``: a training step alone, and one while another thread writes a checkpoint;
  ``save_beside_s``: duration of that write without the copy. They mean little on a busy machine.

Results depend on the disk: ``--folder`` is where checkpoints are written (and deleted again).

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoint [--rounds 5] [--folder runs]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from asyncrl.config.schema import CheckpointConfig, Config
from asyncrl.models.checkpoint import save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.trainer.checkpoints import CheckpointMetadata, CheckpointStore
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
GROUPS, SAMPLES, RESPONSE_TOKENS = 2, 4, 64
MIB = 1024 * 1024


def make_rank(folder: Path) -> TrainerRank:
    model = Decoder(DecoderConfig.from_dict(MODEL))
    model.init_weights(seed=0)
    save_checkpoint(folder, model.named_parameters(), model.config)
    config = Config()
    config.model.path = str(folder)
    config.trainer.device = "cpu"
    config.checkpoint.every_steps = 1
    return TrainerRank(config, 0, 1, None, Recorder("trainer/0"))


def make_groups() -> list[bytes]:
    rng = np.random.default_rng(0)
    draw = lambda count: rng.integers(0, MODEL["vocab_size"], count)
    span = [VersionSpan(0, PolicyVersion(0, 0))]
    groups = []
    for g in range(GROUPS):
        samples = [
            Sample.single(
                index=i,
                tokens=draw(RESPONSE_TOKENS),
                logprobs=np.full(RESPONSE_TOKENS, -9.0),
                loss_mask=np.ones(RESPONSE_TOKENS, bool),
                spans=span,
                finish=FinishReason.STOP,
                reward=float(i % 2),
            )
            for i in range(SAMPLES)
        ]
        groups.append(Group.from_samples(f"g{g}", f"p{g}", 0, draw(16), samples).to_bytes())
    return groups


def seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def measure(folder: Path, rounds: int) -> dict[str, float]:
    rank, groups = make_rank(folder / "model"), make_groups()
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig(keep_last=1))
    step = 0

    def write() -> None:
        partial = store.begin(step)
        rank.write(partial / "state")
        store.complete(partial, CheckpointMetadata(step, PolicyVersion(0, step), step, step))

    def save() -> None:
        rank.stage()
        write()

    def train() -> None:
        rank.train(step, groups)

    found: dict[str, list[float]] = {}
    with ThreadPoolExecutor(1) as thread:
        for step in range(rounds + 1):
            times = {"step_s": seconds(train), "sync_s": seconds(save), "stage_s": seconds(rank.stage)}
            writing = thread.submit(seconds, write)
            times["step_beside_s"] = seconds(train)
            times["save_beside_s"] = writing.result()
            times["wait_share"] = times["stage_s"] / times["sync_s"]
            for name, value in times.items() if step else ():  # the first round warms up
                found.setdefault(name, []).append(value)
    state_bytes = sum(file.stat().st_size for file in (store.all()[-1].path / "state").rglob("*"))
    rank.close()
    medians = {name: round(statistics.median(values), 4) for name, values in found.items()}
    return medians | {"state_mb": round(state_bytes / MIB, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-") as folder:
        found = measure(Path(folder), options.rounds)
    for name, what in {
        "sync_s": "a step waits for a synchronous checkpoint",
        "stage_s": "a step waits for an asynchronous checkpoint",
        "wait_share": "asynchronous wait / synchronous wait",
        "save_beside_s": "asynchronous write to disk, without the copy",
        "step_s": "a training step alone",
        "step_beside_s": "a training step during the write",
        "state_mb": "MiB of weights and optimizer state",
    }.items():
        print(f"{name:14} {found[name]:9.4f}  {what}")
    print(json.dumps({k: found[k] for k in ("wait_share", "sync_s", "stage_s", "state_mb")} | {"all": found}))


if __name__ == "__main__":
    main()
