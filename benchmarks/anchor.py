"""Compares the anchors of the loss's ratio (behaviour, proximal): steps and time to 0.85 on the quickstart's task.

    python -m benchmarks.anchor [key.path=value ...] [--seeds 0 1 2]

Runs configs/quickstart.yaml with `algorithm.anchor=behaviour` and with `proximal` (weights truncated at 2),
alternating, so that a change of the machine's speed affects both. Weights are evaluated after the run, see
`benchmarks.learning_curve`. ``held_out``: accuracy after its last step. The last line has medians over the seeds; null
if most seeds never reach 0.85.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

from benchmarks.learning_curve import CHECKPOINT, DATA, HEAD, STEPS, Curve, run_asyncrl
from benchmarks.quickstart import ensure_inputs

ANCHORS = {
    "behaviour": ["algorithm.anchor=behaviour"],
    "proximal": ["algorithm.anchor=proximal", "algorithm.corrections=[tis]"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    ensure_inputs(CHECKPOINT, DATA)
    curves: dict[str, list[Curve]] = {anchor: [] for anchor in ANCHORS}
    print(f"{'anchor':<10} seed {HEAD}", flush=True)
    for seed in args.seeds:
        for anchor, options in ANCHORS.items():
            with tempfile.TemporaryDirectory(prefix="asyncrl-anchor-") as folder:
                curve = run_asyncrl(seed, Path(folder), [*options, *args.overrides])
            curves[anchor].append(curve)
            print(f"{anchor:<10} {seed:>4} {curve.row()}", flush=True)
    result: dict[str, float | None] = {}
    for anchor, of in curves.items():
        rows = [(*reversed(curve.crossing()), curve.accuracy[STEPS]) for curve in of]
        for name, values in zip(("steps", "s", "held_out"), zip(*rows)):
            median = statistics.median(values)
            result[f"{anchor}_{name}"] = round(median, 3) if math.isfinite(median) else None
    print(json.dumps(result))


if __name__ == "__main__":
    main()
