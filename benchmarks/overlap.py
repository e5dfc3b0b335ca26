"""Compares the asynchronous quickstart with pools that never wait, and with synchronous training.

    python -m benchmarks.overlap [--steps 14] [--rounds 3] [key.path=value ...]

Runs configs/quickstart.yaml with a learning rate near zero, so that all runs have the same work. Runs are compared
within a round, since the machine's speed varies over minutes. Each round has these runs:

- alone: one long step of `STEPS_ALONE` optimizer steps. The rollouter first generates all groups, then the trainer
  trains on them. It gives each pool's time per step alone, T_train and T_rollout, without the forward pass for proximal
  logprobs, which only a step of several optimizer steps needs.
- async: the unchanged quickstart, one thread per pool.
- sync: staleness_threshold 0, and an advantage that waits for the whole batch, so that each step generates and then
  trains, with one thread per pool; in the first round once more with two threads per pool, because each pool has the
  machine to itself.
- tail, tail_sync: async and sync with the lengths of `benchmarks.long_tail`; the first with a staleness threshold of 1,
  so that a batch does not wait for the longest answers.

``fraction_of_ideal``: max(T_train, T_rollout) divided by the seconds of an asynchronous step. ``async_over_sync``,
``async_over_sync_two_threads``, ``async_over_sync_tail``: seconds of a synchronous step divided by those of an
asynchronous one. Each ratio belongs to one round; the result is their median. Steps are timed from one report to the
next, from step `SKIPPED` to the last one for which the rollouter still starts groups. No run drops a group; if the
asynchronous run generated fewer groups than it trained, the generated groups count.

``machine``: how fast each of two processes is beside the other, over its speed alone (`benchmarks.machine`): the pools
alone have the machine to themselves, together they share its caches and memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncrl.algorithms.items import ADVANTAGES
from asyncrl.observability.sinks.jsonl import METRICS_FILE, read_jsonl
from asyncrl.observability.sinks.timeline import read_spans
from benchmarks import machine
from benchmarks.long_tail import LIMIT, without_end
from benchmarks.quickstart import ROOT, ensure_inputs, run

SKIPPED = 3  # first steps, which are not timed
AHEAD = 4  # steps before the end at which the rollouter has started all groups; then the queue runs empty
STEPS_ALONE = 5
COMMON = [
    "trainer.optimizer.lr=1e-12",
    "checkpoint.every_steps=0",
    "reporting.report=false",
    "reporting.wandb.mode=disabled",
    "data.validation_files=[]",
]
#: GRPO's advantage, without the promise that lets the trainer begin before a batch is complete
WHOLE_BATCH = dataclasses.replace(ADVANTAGES.find("grpo"), of_groups=False)
SYNC = ["async_training.staleness_threshold=0", "algorithm.advantage=benchmarks.overlap:WHOLE_BATCH"]
TWO_THREADS = ["trainer.threads=2", "rollout.engine.threads=2"]
MEDIAN = 40  # tokens of a long tail's answer
TAIL = [
    "rollout.agent_loop=benchmarks.long_tail:LongTail",
    f"rollout.agent_loop_args.median={MEDIAN}",
    f"rollout.max_response_tokens={LIMIT * MEDIAN}",
    f"rollout.engine.max_context_tokens={LIMIT * MEDIAN + 128}",
    "rollout.engine.warm_kv_mb=0",  # no answer continues
    "reward.function=benchmarks.long_tail:reward",
]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(folder / METRICS_FILE) if "actor/loss" in row]


def alone_s(folder: Path, steps: int) -> tuple[float, float]:
    """Seconds per step of trainer and rollouter, from the spans of the ``alone`` run."""
    spans = read_spans(folder)
    seconds = lambda name: sum(row["end"] - row["start"] for row in spans if row["name"] == name) / steps
    return seconds("trainer/step") - seconds("trainer/logprobs"), seconds("rollout/generate")


def step_s(folder: Path, last: int) -> float:
    """Mean seconds per step from `SKIPPED` to ``last``, by the reports' clock. If fewer groups were generated than
    trained in that time, the generated ones count."""
    rows = {row["step"]: row for row in steps_of(folder)}
    seconds = rows[last]["time"] - rows[SKIPPED]["time"]
    stock = lambda row: row["fully_async/queue/depth"] + row["fully_async/in_flight"] / 2
    trained = (last - SKIPPED) * rows[last]["trainer/groups"]
    generated = trained + stock(rows[last]) - stock(rows[SKIPPED])
    return seconds / (min(trained, generated) / rows[last]["trainer/groups"])


def round_of(folder: Path, steps: int, overrides: list[str], names: Iterable[str]) -> dict[str, float]:
    """Do the runs of one round. Returns seconds per step of each run, and ``own``: the asynchronous run's own
    fraction_of_ideal."""
    checkpoint, data = ROOT / "checkpoints/arith-mimo", ROOT / "data/arithmetic"
    synchronous = (steps - SKIPPED) // 2 + SKIPPED
    options = {
        "alone": ["trainer.total_steps=1", f"async_training.require_batches={STEPS_ALONE}"],
        "async": [f"trainer.total_steps={steps}"],
        "sync": [f"trainer.total_steps={synchronous}", *SYNC],
        "sync_two_threads": [f"trainer.total_steps={synchronous}", *SYNC, *TWO_THREADS],
        "tail": [f"trainer.total_steps={steps}", *TAIL, "async_training.staleness_threshold=1"],
        "tail_sync": [f"trainer.total_steps={synchronous}", *TAIL, *SYNC],
    }
    endless = without_end(checkpoint, folder / "endless")
    found: dict[str, float] = {}
    for name in names:
        (folder / name).mkdir(parents=True)
        policy = endless if name.startswith("tail") else checkpoint
        run(0, policy, data, folder / name, [*COMMON, *options[name], *overrides])
        run_dir = folder / name / "seed-0"
        if name == "alone":
            found["train"], found["rollout"] = alone_s(run_dir, STEPS_ALONE)
        else:
            found[name] = step_s(run_dir, synchronous if "sync" in name.split("_") else steps - AHEAD)
        if name == "async":
            found["own"] = statistics.median(r["perf/fraction_of_ideal"] for r in steps_of(run_dir)[SKIPPED:-AHEAD])
            print(json.loads((run_dir / "summary.json").read_text())["advice"], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=14, help="steps of an asynchronous run; the others have fewer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    if args.steps <= SKIPPED + AHEAD:
        parser.error(f"--steps: expected at least {SKIPPED + AHEAD + 1}, found {args.steps}")
    ensure_inputs(ROOT / "checkpoints/arith-mimo", ROOT / "data/arithmetic")
    shared, rounds = machine.together_over_alone(), []
    with tempfile.TemporaryDirectory(prefix="asyncrl-overlap-") as scratch:
        for k in range(args.rounds):
            names = ["alone", "async", "sync", "tail", "tail_sync"] + (["sync_two_threads"] if k == 0 else [])
            found = round_of(Path(scratch) / str(k), args.steps, args.overrides, names)
            found["fraction_of_ideal"] = max(found["train"], found["rollout"]) / found["async"]
            found["async_over_sync"] = found["sync"] / found["async"]
            found["async_over_sync_tail"] = found["tail_sync"] / found["tail"]
            rounds.append(found)
            print("  ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True)
    median = {name: statistics.median(r[name] for r in rounds if name in r) for name in rounds[0]}
    print(f"alone, seconds per step:  training {median['train']:.2f}  generation {median['rollout']:.2f}")
    print(
        f"together, seconds per step:  async {median['async']:.2f}  sync {median['sync']:.2f}  "
        f"sync with two threads {median['sync_two_threads']:.2f}"
    )
    print(f"long tail, seconds per step:  async {median['tail']:.2f}  sync {median['tail_sync']:.2f}")
    print("this machine, two processes at once over one: " + "  ".join(f"{k} {v:.2f}" for k, v in shared.items()))
    print(f"fraction of ideal as reported by the runs: {median['own']:.3f}")
    print(
        json.dumps(
            {
                "fraction_of_ideal": median["fraction_of_ideal"],
                "async_over_sync": median["async_over_sync"],
                "async_over_sync_two_threads": rounds[0]["sync_two_threads"] / rounds[0]["async"],
                "async_over_sync_tail": median["async_over_sync_tail"],
                "train_alone_s": median["train"],
                "rollout_alone_s": median["rollout"],
                "async_step_s": median["async"],
                "sync_step_s": median["sync"],
                "sync_two_threads_step_s": median["sync_two_threads"],
                "machine": shared,
            }
        )
    )


if __name__ == "__main__":
    main()
