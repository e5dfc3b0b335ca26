"""Shows samples of a run, turn by turn: ``asyncrl trajectories RUN_DIR``.

Only reads, also during the run. Exit status: 0, 1 if a file is damaged, 2 for a bad filter or without a
run's samples.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.observability.trajectories import caption, plural
from asyncrl.observability.trajectory_files import FOLDER, Filter, read

_RANGES = ("--reward", "--tokens", "--step")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="asyncrl trajectories",
        description="Shows samples of a run, turn by turn: what was trained, by which version, for what reward.",
        epilog="RANGE is MIN:MAX, both included; either may be missing, as in --reward 0.5:",
    )
    parser.add_argument("run_dir", type=Path, help=f"run folder, with the Parquet files of {FOLDER}/")
    parser.add_argument("--reward", type=_range, metavar="RANGE", help="reward of the sample")
    parser.add_argument("--tokens", type=_range, metavar="RANGE", help="response tokens, over all sequences")
    parser.add_argument("--step", type=_range, metavar="RANGE", help="train steps")
    parser.add_argument("--source", metavar="NAME", help="data source of the prompt")
    parser.add_argument("--finish", metavar="REASON", help="stop, length, turns, time, tokens, …")
    parser.add_argument("--failed", action="store_const", const="any", dest="failure", help="failed samples")
    parser.add_argument("--failure", metavar="REASON", help="samples that failed for this reason")
    parser.add_argument("--uid", help="samples of this group")
    parser.add_argument("--limit", type=int, default=20, help="at most so many, the last ones (20)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args(_joined(sys.argv[1:] if argv is None else argv))
    if not os.path.isdir(args.run_dir / FOLDER):
        print(f"{args.run_dir}: expected a run folder with {FOLDER}/, found none", file=sys.stderr)
        return 2
    names = ("reward", "tokens", "step", "source", "finish", "failure", "uid")
    found = read(args.run_dir, Filter(**{name: getattr(args, name) for name in names}), max(args.limit, 0))
    for row in found.rows():
        print(json.dumps(row, ensure_ascii=False) if args.json else "\n".join(_lines(row)))
    if not args.json:
        print(f"{len(found)} of {plural(found.selected, 'sample')}")
    for line in found.damaged:
        print(line, file=sys.stderr)
    return 1 if found.damaged else 0


def _joined(argv: Sequence[str]) -> list[str]:
    """``--reward -1:0`` as ``--reward=-1:0``: argparse takes a value that begins with a minus for an option."""
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] in _RANGES:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _range(text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        return float(low or -math.inf), float(high or math.inf) if colon else float(low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected MIN:MAX, found {text!r}") from None


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    facts = [f"group {row['uid']} sample {row['sample']}", f"{row['data_source']}: {row['prompt_id']}"]
    facts += [f"step {row['step']}"] if row["step"] is not None else []
    facts += [f"reward {row['reward']:.3g}"] if row["reward"] is not None else []
    facts += [f"{name} {value:.3g}" for name, value in row["metrics"].items() if value is not None]
    facts += [row["finish"]] if row["finish"] is not None else []
    yield "── " + " · ".join(facts)
    if row["failure"] is not None:
        yield f"failed: {row['failure']}: {row['error']}"
    yield "[prompt]"
    yield row["prompt"] or ""
    for part in row["parts"] or ():
        yield f"[{caption(part)}]"
        yield part["text"]
    yield ""


if __name__ == "__main__":
    sys.exit(main())
