"""Measures whether the quickstart learns, how fast, and how much of the time both pools work at once.

    python -m benchmarks.quickstart [--seeds 0 1 2] [--checkpoint DIR] [--data DIR]

Runs configs/quickstart.yaml once per seed (the seed sets the prompt order and the samples), each in its own process,
as a user would. ``accuracy``: share of held-out problems with a correct sampled answer (T = 1). ``valid_format``: share
of well-formed answers. ``overlap``: share of training time in which the trainer computes while at least half of the
rollouter's slots are generating. The last line has the worst value of each figure over the seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def ensure_inputs(checkpoint: Path, data: Path) -> None:
    """Create the checkpoint and the problems unless they exist."""
    if not (checkpoint / "model.safetensors").is_file():
        make = [sys.executable, "-m", "asyncrl.models.make_checkpoint", "--out", str(checkpoint), "--seed", "1"]
        subprocess.run(make, check=True)
    if not (data / "train.jsonl").is_file():
        subprocess.run([sys.executable, "-m", "asyncrl.data.arithmetic", "--out", str(data)], check=True)


def run(
    seed: int,
    checkpoint: Path,
    data: Path,
    folder: Path,
    overrides: list[str],
    config: Path = ROOT / "configs/quickstart.yaml",
) -> dict[str, Any]:
    """Run one quickstart; returns its summary.json. Raises SystemExit if the run fails."""
    run_dir = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "asyncrl.fully_async_main", "--config", str(config)]
    options = [
        f"seed={seed}",
        f"run_dir={run_dir}",
        f"model.path={checkpoint}",
        f"data.train_files=[{data / 'train.jsonl'}]",
        f"data.validation_files=[{data / 'heldout.jsonl'}]",
        "checkpoint.export_hf=none",
        *overrides,
    ]
    with (folder / f"seed-{seed}.log").open("w") as log:
        status = subprocess.run([*command, *options], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
    if status:
        tail = (folder / f"seed-{seed}.log").read_text().splitlines()[-20:]
        raise SystemExit(f"seed {seed}: the run exited {status}\n" + "\n".join(tail))
    return json.loads((run_dir / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints/arith-mimo")
    parser.add_argument("--data", type=Path, default=ROOT / "data/arithmetic")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    ensure_inputs(args.checkpoint, args.data)
    names = ["accuracy_before", "accuracy_after", "valid_format_before", "valid_format_after", "duration_s", "overlap"]
    print("seed  " + "  ".join(f"{n:>19}" for n in names), flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-quickstart-") as folder:
        for seed in args.seeds:
            rows.append(run(seed, args.checkpoint, args.data, Path(folder), args.overrides))
            print(f"{seed:>4}  " + "  ".join(f"{rows[-1][n]:>19.3f}" for n in names), flush=True)
    print(
        json.dumps(
            {
                "accuracy_before": max(r["accuracy_before"] for r in rows),
                "accuracy_after": min(r["accuracy_after"] for r in rows),
                "accuracy_gain": min(r["accuracy_after"] / r["accuracy_before"] for r in rows),
                "valid_format_before": min(r["valid_format_before"] for r in rows),
                "train_s": max(r["duration_s"] for r in rows),
                "overlap": min(r["overlap"] for r in rows),
                "held_out_samples": rows[0]["samples_before"],
                "seeds": args.seeds,
            }
        )
    )


if __name__ == "__main__":
    main()
