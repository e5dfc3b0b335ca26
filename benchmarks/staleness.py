"""Compares staleness thresholds by the time in which the quickstart's task is learned.

    python -m benchmarks.staleness [key.path=value ...] [--thresholds 0 0.25 0.5 1 2 4] [--seeds 0 1] [--write]

Runs configs/quickstart.yaml with each threshold; weights are evaluated after the run, see `benchmarks.learning_curve`.
``seconds`` and ``steps`` until the target accuracy, ``step_s``, and ``age``, the mean staleness of the trained groups
in versions, are medians over seeds. ``--write`` puts them into docs/concepts.md.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.learning_curve import CHECKPOINT, DATA, HEAD, TARGET, Curve, run_asyncrl
from benchmarks.quickstart import ROOT, ensure_inputs

PAGE = ROOT / "docs/concepts.md"
_BLOCK = re.compile(r"(<!-- staleness: begin -->\n).*?(<!-- staleness: end -->)", re.DOTALL)


def figures_of(curves: list[Curve]) -> dict[str, float]:
    found = {
        "seconds": [curve.crossing()[0] for curve in curves],
        "steps": [curve.crossing()[1] for curve in curves],
        "step_s": [curve.step_s for curve in curves],
        "age": [curve.age for curve in curves],
    }
    return {name: statistics.median(values) for name, values in found.items()}


def page_block(found: Mapping[str, Mapping[str, float]]) -> str:
    """A chart and a table."""
    rows = [
        f"| {threshold} | {f['age']:.2f} | {f['steps']:.1f} | {f['step_s']:.2f} | {f['seconds']:.0f} |"
        for threshold, f in found.items()
    ]
    reached = {threshold: f["seconds"] for threshold, f in found.items() if math.isfinite(f["seconds"])}
    return "\n".join(
        [
            "```mermaid",
            "xychart-beta",
            f'  title "Seconds until {TARGET:.0%} accuracy"',
            f'  x-axis "staleness_threshold" [{", ".join(reached)}]',
            f'  y-axis "seconds" 0 --> {max(reached.values()) * 1.1:.0f}',
            f"  bar [{', '.join(f'{seconds:.0f}' for seconds in reached.values())}]",
            "```",
            "",
            f"| `staleness_threshold` | mean age, versions | steps until {TARGET:.0%} | s per step | seconds |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--thresholds", nargs="+", default=["0", "0.25", "0.5", "1", "2", "4"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--write", action="store_true", help="put the figures into docs/concepts.md")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    ensure_inputs(CHECKPOINT, DATA)
    print(f"threshold seed    age {HEAD}")
    curves: dict[str, list[Curve]] = {threshold: [] for threshold in args.thresholds}
    for seed in args.seeds:
        for threshold in args.thresholds:
            options = [f"async_training.staleness_threshold={threshold}", *args.overrides]
            with tempfile.TemporaryDirectory(prefix="asyncrl-staleness-") as folder:
                curve = run_asyncrl(seed, Path(folder), options)
            curves[threshold].append(curve)
            print(f"{threshold:>9} {seed:>4} {curve.age:>6.2f} {curve.row()}", flush=True)
    found = {threshold: figures_of(of) for threshold, of in curves.items()}
    for threshold, figures in found.items():
        print(f"{threshold:>9}  " + "  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    if args.write:
        PAGE.write_text(_BLOCK.sub(lambda match: match[1] + page_block(found) + match[2], PAGE.read_text()))
    best = min(found, key=lambda threshold: found[threshold]["seconds"])
    print(json.dumps({"target": TARGET, "seeds": args.seeds, "best": best, "thresholds": found}))


if __name__ == "__main__":
    main()
