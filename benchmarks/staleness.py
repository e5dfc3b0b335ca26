"""Compares staleness thresholds by the time in which the quickstart's task is learned.

    python -m benchmarks.staleness [key.path=value ...] [--thresholds 0 0.25 0.5 1 2 4] [--seeds 0] [--write]

Runs configs/quickstart.yaml with each threshold, seed by seed; weights are evaluated after the run, see
`benchmarks.learning_curve`. ``seconds`` and ``steps`` until the target accuracy, ``step_s``, and ``age``, the mean
staleness of the trained groups in versions. How fast a seed learns is luck to a third, so several count: ``--write``
adds each run to benchmarks/results/staleness.json, and puts the medians over all seeds there that have every threshold
into docs/concepts.md. Times are divided by those of threshold 0 with the same seed, so that seeds may come from several
machines.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning_curve import CHECKPOINT, DATA, HEAD, STEPS, TARGET, Curve, run_asyncrl
from benchmarks.quickstart import ROOT, ensure_inputs

PAGE, RESULTS = ROOT / "docs/concepts.md", ROOT / "benchmarks/results/staleness.json"
THRESHOLDS = ["0", "0.25", "0.5", "1", "2", "4"]
SYNCHRONOUS = "0"
_BLOCK = re.compile(r"(<!-- staleness: begin -->\n).*?(<!-- staleness: end -->)", re.DOTALL)

Figures = dict[str, float]
#: seed → threshold → figures
Runs = dict[int, dict[str, Figures]]


def figures_of(curve: Curve) -> Figures:
    seconds, steps = curve.crossing()
    return {"age": curve.age, "steps": steps, "step_s": curve.step_s, "seconds": seconds}


def medians(runs: Runs, thresholds: Sequence[str]) -> dict[str, Figures]:
    """Threshold → medians over seeds; ``relative_…``: divided by the same seed's figure at threshold 0, if it ran. A
    seed that does not reach the target has infinite steps and seconds."""

    def over_seeds(threshold: str) -> Figures:
        figures = [of[threshold] for of in runs.values()]
        found = {name: statistics.median(of[name] for of in figures) for name in figures[0]}
        if SYNCHRONOUS in thresholds:
            for name in ("step_s", "seconds"):
                ratios = (of[threshold][name] / of[SYNCHRONOUS][name] for of in runs.values())
                found[f"relative_{name}"] = statistics.median(ratios)
        return found

    return {threshold: over_seeds(threshold) for threshold in thresholds}


def recorded(runs: Runs) -> Runs:
    """Add runs to those of the results file; returns the seeds there that have every threshold, and learn at 0."""
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed, of in runs.items():
        stored.setdefault(str(seed), {}).update(of)
    RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    complete = {int(seed): of for seed, of in stored.items() if set(THRESHOLDS) <= of.keys()}
    return {seed: of for seed, of in complete.items() if math.isfinite(of[SYNCHRONOUS]["seconds"])}


def page_block(runs: Runs) -> str:
    """A chart and a table."""
    found = medians(runs, THRESHOLDS)
    reached = {threshold: f["relative_seconds"] for threshold, f in found.items() if math.isfinite(f["seconds"])}

    def row(threshold: str) -> str:
        f, steps = found[threshold], sorted(of[threshold]["steps"] for of in runs.values())
        spread = f"{_steps(f['steps'])} ({_steps(steps[0])} to {_steps(steps[-1])})"
        cells = [threshold, f"{f['age']:.2f}", spread, f"{f['relative_step_s']:.2f}", f"{f['relative_seconds']:.2f}"]
        return f"| {' | '.join(cells)} |"

    return "\n".join(
        [
            "```mermaid",
            "xychart-beta",
            f'  title "Time until {TARGET:.0%} accuracy, relative to threshold 0"',
            f'  x-axis "staleness_threshold" [{", ".join(reached)}]',
            f'  y-axis "time" 0 --> {max(reached.values()) * 1.1:.1f}',
            f"  bar [{', '.join(f'{value:.2f}' for value in reached.values())}]",
            "```",
            "",
            "| `staleness_threshold` | mean age, versions | steps | time of a step | time |",
            "|---|---|---|---|---|",
            *map(row, THRESHOLDS),
            "",
            f"Until {TARGET:.0%} accuracy in the quickstart on two CPU cores: medians of {len(runs)} seeds, of the "
            "steps also the range; times relative to threshold 0 (`python -m benchmarks.staleness`).",
            "",
        ]
    )


def _steps(steps: float) -> str:
    return f"{steps:.0f}" if math.isfinite(steps) else f"over {STEPS}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--thresholds", nargs="+", default=THRESHOLDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--write", action="store_true", help="keep the figures, and put them into docs/concepts.md")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    if args.write and args.overrides:
        parser.error("--write: what is kept is of the quickstart as it is; expected no overrides")
    ensure_inputs(CHECKPOINT, DATA)
    print(f"threshold seed    age {HEAD}")
    runs: Runs = {seed: {} for seed in args.seeds}
    for turn, seed in enumerate(args.seeds):
        for threshold in args.thresholds[:: -1 if turn % 2 else 1]:  # a machine that slows down favours neither end
            options = [f"async_training.staleness_threshold={threshold}", *args.overrides]
            with tempfile.TemporaryDirectory(prefix="asyncrl-staleness-") as folder:
                curve = run_asyncrl(seed, Path(folder), options)
            runs[seed][threshold] = figures_of(curve)
            print(f"{threshold:>9} {seed:>4} {curve.age:>6.2f} {curve.row()}", flush=True)
            if args.write and (complete := recorded({seed: {threshold: runs[seed][threshold]}})):
                PAGE.write_text(_BLOCK.sub(lambda match: match[1] + page_block(complete) + match[2], PAGE.read_text()))
    found = medians(runs, args.thresholds)
    for threshold, figures in found.items():
        print(f"{threshold:>9}  " + "  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    best = min(found, key=lambda threshold: found[threshold]["seconds"])
    print(json.dumps({"target": TARGET, "seeds": args.seeds, "best": best, "thresholds": found}))


if __name__ == "__main__":
    main()
