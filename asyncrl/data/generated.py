"""Prompt files of a generated task: its command, and which of its problems are held out.

A hash of a problem decides: training and held-out problems are disjoint in every file and under every seed.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.disk.files import write_whole

HELDOUT_SHARE = 8  # one problem in this many is held out

P = TypeVar("P", bound=Hashable)

#: (random numbers, number of rows, whether held out) → rows of a prompt file
Rows = Callable[[random.Random, int, bool], Iterable[dict[str, Any]]]


def is_heldout(problem: str) -> bool:
    return zlib.crc32(problem.encode()) % HELDOUT_SHARE == 0


def draw_problems(
    draw: Callable[[random.Random, bool], P], rng: random.Random, count: int, heldout: bool
) -> Iterator[P]:
    """``count`` problems. Held-out ones are all different. Training problems repeat, so that each length stays equally
    frequent: there are few short problems, and without them too few samples would be right to learn from."""
    seen: set[P] = set()
    while count:
        problem = draw(rng, heldout)
        if not (heldout and problem in seen):
            yield problem
            seen.add(problem)
            count -= 1


def write_files(argv: list[str] | None, task: str, rows: Rows, train: int, heldout: int) -> None:
    """The command that writes train.jsonl and heldout.jsonl of a task, each file whole or not at all. ``train`` and
    ``heldout`` are the default numbers of problems."""
    parser = argparse.ArgumentParser(description=f"Write train.jsonl and heldout.jsonl for the {task} task.")
    parser.add_argument("--out", type=Path, required=True, help="output folder; created if missing")
    parser.add_argument("--train", type=int, default=train, help="number of training problems")
    parser.add_argument("--heldout", type=int, default=heldout, help="number of held-out problems")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("heldout", args.heldout), ("train", args.train)):  # make's target for both files comes last
        drawn = rows(random.Random(f"{name}/{args.seed}"), count, name == "heldout")
        write_whole(args.out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in drawn))
    print(f"{args.out}: train.jsonl with {args.train} problems, heldout.jsonl with {args.heldout}")
