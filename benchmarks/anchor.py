"""Compares the anchors of the loss's ratio (behaviour, proximal): steps and time to 0.85 on the quickstart's task.

    python -m benchmarks.anchor [--seeds 0 1 2] [key.path=value ...]

Runs configs/quickstart.yaml with `algorithm.anchor=behaviour` and with `proximal` (weights truncated at 2),
alternating, so that a change of the machine's speed affects both. Accuracy is that of the generated samples, averaged
over three steps. Steps and seconds of training (without start-up) count until it first reaches 0.85. ``held_out``:
held-out accuracy after the last step. The last line has medians over the seeds; null if most seeds never reach 0.85.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

import numpy as np

from asyncrl.observability.sinks.jsonl import METRICS_FILE, read_jsonl
from benchmarks.quickstart import ROOT, ensure_inputs, run

TARGET = 0.85
MEAN_OF_STEPS = 3
ANCHORS = {
    "behaviour": ["algorithm.anchor=behaviour"],
    "proximal": ["algorithm.anchor=proximal", "algorithm.corrections=[tis]"],
}


def crossing(run_dir: Path) -> tuple[float, float]:
    """(steps, seconds) until the accuracy of generated samples reaches the target; infinite if it never does."""
    rows = [row for row in read_jsonl(run_dir / METRICS_FILE) if "rollout/accuracy" in row]
    accuracy = np.array([row["rollout/accuracy"] for row in rows])
    seconds = np.cumsum([row["perf/step_s"] for row in rows])
    means = np.convolve(accuracy, np.full(MEAN_OF_STEPS, 1 / MEAN_OF_STEPS), mode="valid")
    reached = np.flatnonzero(means >= TARGET)
    if not len(reached):
        return math.inf, math.inf
    at = int(reached[0]) + MEAN_OF_STEPS - 1
    return float(rows[at]["step"]), float(seconds[at])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    checkpoint, data = ROOT / "checkpoints/arith-mimo", ROOT / "data/arithmetic"
    ensure_inputs(checkpoint, data)
    found: dict[str, list[tuple[float, float, float]]] = {anchor: [] for anchor in ANCHORS}
    print(f"{'anchor':<10} seed  steps to {TARGET}  seconds to {TARGET}  held_out", flush=True)
    for seed in args.seeds:
        for anchor, options in ANCHORS.items():
            with tempfile.TemporaryDirectory(prefix="asyncrl-anchor-") as folder:
                summary = run(seed, checkpoint, data, Path(folder), [*options, *args.overrides])
                steps, seconds = crossing(Path(folder) / f"seed-{seed}")
            found[anchor].append((steps, seconds, summary["accuracy_after"]))
            print(f"{anchor:<10} {seed:>4}  {steps:>13.0f}  {seconds:>15.1f}  {found[anchor][-1][2]:>8.3f}", flush=True)
    result: dict[str, float | None] = {}
    for anchor, rows in found.items():
        for name, values in zip(("steps", "s", "held_out"), zip(*rows)):
            median = statistics.median(values)
            result[f"{anchor}_{name}"] = round(median, 3) if math.isfinite(median) else None
    print(json.dumps(result))


if __name__ == "__main__":
    main()
