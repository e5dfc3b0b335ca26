"""How near is the asynchronous quickstart to pools that never wait, and how far ahead of one piece after the other?

    python -m benchmarks.overlap [--steps 40] [key.path=value ...]

Runs configs/quickstart.yaml with a learning rate of almost nothing, so that all runs have the same work, as

- alone: one long step; first the rollouter generates its groups, then the trainer takes them, in as many optimizer
  steps as the steps of the others. What a step takes each pool alone, T_train and T_rollout, comes of it; the forward
  pass for proximal logprobs, which only a step of several optimizer steps needs, is taken off.
- async: as the quickstart is, one thread for each pool.
- sync: staleness_threshold 0, so that each step first generates and then trains, with one thread each; and once more
  with two threads each, as each has the machine to itself.

``fraction_of_ideal``: max(T_train, T_rollout) by the seconds of an asynchronous step. ``async_over_sync`` and
``async_over_sync_two_threads``: seconds of a synchronous step by those of an asynchronous one. Steps are counted from
the `SKIPPED`-th on, and to where the rollouter still starts groups, each step from one report to the next. No group is
dropped in any run; where the asynchronous one generated less than it trained, what it generated counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from asyncrl.reporting.jsonl import METRICS_FILE, read_lines
from asyncrl.reporting.timeline import read_spans
from benchmarks.quickstart import ROOT, ensure_inputs, run

SKIPPED = 6
STEPS_ALONE = 8
COMMON = [
    "trainer.optimizer.lr=1e-12",
    "checkpoint.every_steps=0",
    "reporting.report=false",
    "reporting.wandb.mode=disabled",
    "data.validation_files=[]",
]
TWO_THREADS = ["trainer.threads=2", "rollout.engine.threads=2"]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_lines(folder / METRICS_FILE) if "actor/loss" in row]


def alone_s(folder: Path, steps: int) -> tuple[float, float]:
    """Seconds of a step that trainer and rollouter take, from the spans of the run in which each works alone."""
    spans = read_spans(folder)
    seconds = lambda name: sum(row["end"] - row["start"] for row in spans if row["name"] == name) / steps
    return seconds("trainer/step") - seconds("trainer/logprobs"), seconds("rollout/generate")


def step_s(folder: Path, last: int) -> float:
    """Mean seconds of a step from `SKIPPED` to ``last``, by the clock of the reports; of the asynchronous run no step
    counts beyond what was generated in that time."""
    rows = {row["step"]: row for row in steps_of(folder)}
    seconds = rows[last]["time"] - rows[SKIPPED]["time"]
    stock = lambda row: row["fully_async/queue/depth"] + row["fully_async/in_flight"] / 2
    trained = (last - SKIPPED) * rows[last]["trainer/groups"]
    generated = trained + stock(rows[last]) - stock(rows[SKIPPED])
    return seconds / (min(trained, generated) / rows[last]["trainer/groups"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="of the asynchronous run; the others have fewer")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    checkpoint, data = ROOT / "checkpoints/arith-mimo", ROOT / "data/arithmetic"
    ensure_inputs(checkpoint, data)
    synchronous = (args.steps - SKIPPED) // 2 + SKIPPED
    runs = {
        "alone": ["trainer.total_steps=1", f"async_training.require_batches={STEPS_ALONE}"],
        "async": [f"trainer.total_steps={args.steps}"],
        "sync": [f"trainer.total_steps={synchronous}", "async_training.staleness_threshold=0"],
        "sync2": [f"trainer.total_steps={synchronous}", "async_training.staleness_threshold=0", *TWO_THREADS],
    }
    with tempfile.TemporaryDirectory(prefix="asyncrl-overlap-") as scratch:
        folders = {name: Path(scratch) / name for name in runs}
        for name, options in runs.items():
            folders[name].mkdir()
            run(0, checkpoint, data, folders[name], [*COMMON, *options, *args.overrides])
            print(f"{name}: done", flush=True)
        within = {name: folder / "seed-0" for name, folder in folders.items()}
        train_s, rollout_s = alone_s(within["alone"], STEPS_ALONE)
        ahead = 4  # steps before the end: the rollouter has started all groups, and the queue runs empty
        async_s = step_s(within["async"], args.steps - ahead)
        sync_s, sync2_s = (step_s(within[name], synchronous) for name in ("sync", "sync2"))
        own = [row["perf/fraction_of_ideal"] for row in steps_of(within["async"])[SKIPPED:-ahead]]
        advice = json.loads((within["async"] / "summary.json").read_text())["advice"]
    print(f"alone, seconds of a step:  training {train_s:.2f}  generation {rollout_s:.2f}")
    print(f"together, seconds of a step:  async {async_s:.2f}  sync {sync_s:.2f}  sync with two threads {sync2_s:.2f}")
    print(f"fraction of the ideal by the run's own account: {statistics.median(own):.3f}; {advice}")
    print(
        json.dumps(
            {
                "fraction_of_ideal": max(train_s, rollout_s) / async_s,
                "async_over_sync": sync_s / async_s,
                "async_over_sync_two_threads": sync2_s / async_s,
                "train_alone_s": train_s,
                "rollout_alone_s": rollout_s,
                "async_step_s": async_s,
                "sync_step_s": sync_s,
                "sync_two_threads_step_s": sync2_s,
            }
        )
    )


if __name__ == "__main__":
    main()
