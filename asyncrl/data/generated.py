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
MOST_DRAWS = 100_000  # without a new problem: there is none left

P = TypeVar("P", bound=Hashable)

#: (random numbers, number of rows, whether held out) → rows of a prompt file
Rows = Callable[[random.Random, int, bool], Iterable[dict[str, Any]]]


class TooFewProblems(ValueError):
    """A task has fewer different problems than a file is to have."""


def is_heldout(problem: str) -> bool:
    return zlib.crc32(problem.encode()) % HELDOUT_SHARE == 0


def draw_problems(
    draw: Callable[[random.Random, bool], P], rng: random.Random, count: int, heldout: bool
) -> Iterator[P]:
    """``count`` problems. Held-out ones are all different, see `different_problems`. Training problems repeat, so that
    each length stays equally frequent: there are few short problems, and without them too few samples would be right to
    learn from."""
    if heldout:
        yield from different_problems(draw, rng, count, heldout)
    else:
        for _ in range(count):
            yield draw(rng, heldout)


def different_problems(
    draw: Callable[[random.Random, bool], P], rng: random.Random, count: int, heldout: bool
) -> Iterator[P]:
    """``count`` different problems. Raises TooFewProblems once none has been new for `MOST_DRAWS` draws."""
    seen: set[P] = set()
    for _ in range(count):
        draws = (draw(rng, heldout) for _ in range(MOST_DRAWS))
        new = next((problem for problem in draws if problem not in seen), None)
        if new is None:
            raise TooFewProblems(f"expected at most {len(seen)} different problems, found {count}")
        seen.add(new)
        yield new


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
        try:
            lines = [json.dumps(row) + "\n" for row in drawn]
        except TooFewProblems as e:
            parser.exit(2, f"--{name}: {e}\n")
        write_whole(args.out / f"{name}.jsonl", "".join(lines))
    print(f"{args.out}: train.jsonl with {args.train} problems, heldout.jsonl with {args.heldout}")
