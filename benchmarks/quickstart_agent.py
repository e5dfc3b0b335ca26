"""Measures whether the agent of the quickstart learns to use its tool, how fast, and whether its tokens are exact.

    python -m benchmarks.quickstart_agent [--seeds 0 1 2]

Runs configs/quickstart_agent.yaml once per seed, each in its own process, with engines that log what they sample.
``success``: share of held-out numbers that are found (T = 1), before and after training. ``turns_mean``: calls of a
held-out sample after training. ``tokens_exact``: share of trained tokens that are in the engines' log after the same
tokens, with the same logprob and version. ``overlap``: as in `benchmarks.quickstart`. The last line has the worst value
of each figure over the seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.quickstart import ROOT, run
from tests.support.token_audit import audit_tokens

CONFIG = ROOT / "configs/quickstart_agent.yaml"
LOGGED = [
    "rollout.engine.name=tests.support.logged_engine:NATIVE",
    "checkpoint.every_steps=0",
]  # which keeps all groups

BEST_HIGH = ("success_after", "tokens_exact", "overlap")


def ensure_inputs() -> None:
    """Create the client's environment, the checkpoint and the problems, unless they exist."""
    subprocess.run(["make", "--silent", "quickstart-agent-inputs"], cwd=ROOT, check=True, stdout=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    ensure_inputs()
    names = ["success_before", "success_after", "train_s", "turns_mean", "tokens_exact", "overlap"]
    print("seed  " + "  ".join(f"{name:>14}" for name in names), flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-quickstart-agent-") as folder:
        for seed in args.seeds:
            checkpoint, data = ROOT / "checkpoints/guess-mimo", ROOT / "data/guess"
            summary = run(seed, checkpoint, data, Path(folder), [*LOGGED, *args.overrides], CONFIG)
            audit = audit_tokens(Path(folder) / f"seed-{seed}")
            figures = {
                "success_before": summary["accuracy_before"],
                "success_after": summary["accuracy_after"],
                "train_s": summary["duration_s"],
                "turns_mean": summary["turns_after"],
                "tokens_exact": audit.exact / max(audit.trained, 1),
                "overlap": summary["overlap"],
            }
            rows.append(figures)
            print(f"{seed:>4}  " + "  ".join(f"{figures[name]:>14.3f}" for name in names), flush=True)
    worst = {name: (min if name in BEST_HIGH else max)(row[name] for row in rows) for name in names}
    gain = min(row["success_after"] / row["success_before"] for row in rows)
    print(json.dumps(worst | {"success_gain": gain, "seeds": args.seeds}))


if __name__ == "__main__":
    main()
