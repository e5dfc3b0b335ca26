"""Generated arithmetic task with verifiable answers: chains of additions and subtractions, worked from the left.

A problem, and its solution in the demonstrations::

    user:       Compute 7-5+2+4
    assistant:  7-5=2,+2+4
                2+2=4,+4
                4+4=8
                answer: 8

Each line does one operation and repeats the rest, so each term adds more to the solution than the previous one, and
response lengths differ sixfold. A hash of the expression decides whether a problem is held out: training and held-out
problems are disjoint in every file and under every seed, and the warm start of `asyncrl.models.make_checkpoint` sees no
held-out problem either.

Write prompt files with ``python -m asyncrl.data.arithmetic --out DIR --train 8192 --heldout 512 --seed 0``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from asyncrl.types.prompts import Message

STEPS = range(1, 7)  # operations in a problem, uniformly
FIRST_TERMS = range(1, 10)
TERMS = [-5, -4, -3, -2, -1, 1, 2, 3, 4, 5]  # all further terms
TOTALS = range(10)  # every running total: one digit, so one token
HELDOUT_SHARE = 8  # one expression in this many is held out
ERROR_RATE = 0.4  # share of wrong steps in careless demonstrations

_ANSWER = re.compile(r"answer: (-?\d{1,9})")
_SOLUTION = re.compile(r"(?:\d+[+-]\d+=\d+(?:,(?:[+-]\d+)+)?\n)+answer: -?\d+")


@dataclass(frozen=True)
class Problem:
    """``first``, then ``steps``, signed single-digit terms: ``Problem(7, (-5, 2))`` is 7-5+2."""

    first: int
    steps: tuple[int, ...]

    @property
    def expression(self) -> str:
        return f"{self.first}{_signed(self.steps)}"

    @property
    def answer(self) -> int:
        return self.first + sum(self.steps)

    @property
    def heldout(self) -> bool:
        return zlib.crc32(self.expression.encode()) % HELDOUT_SHARE == 0

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": f"Compute {self.expression}"}]


def _signed(terms: Sequence[int]) -> str:
    return "".join(f"{term:+d}" for term in terms)


def draw_problem(rng: random.Random, heldout: bool) -> Problem:
    """Samples a training or held-out problem; the number of steps is uniform."""
    while True:
        steps = rng.choice(STEPS)
        total = first = rng.choice(FIRST_TERMS)
        terms = []
        for _ in range(steps):
            terms.append(rng.choice([t for t in TERMS if total + t in TOTALS]))
            total += terms[-1]
        problem = Problem(first, tuple(terms))
        if problem.heldout == heldout:
            return problem


def solution(problem: Problem, rng: random.Random | None = None, error_rate: float = 0.0) -> str:
    """Worked solution. With ``rng``, a step's result is off by one or two with probability ``error_rate`` (unless a
    total would leave `TOTALS`), and later steps continue from it."""
    lines, total = [], problem.first
    for done, term in enumerate(problem.steps, start=1):
        before, total, rest = total, total + term, problem.steps[done:]
        if rng is not None and rng.random() < error_rate:
            slips = [s for s in (-2, -1, 1, 2) if all(t + s in TOTALS for t in accumulate(rest, initial=total))]
            total += rng.choice(slips or [0])
        lines.append(f"{before}{term:+d}={total}" + (f",{_signed(rest)}" if rest else ""))
    return "\n".join([*lines, f"answer: {total}"])


def final_answer(response: str) -> int | None:
    """N if the last line is ``answer: N``, else None."""
    match = _ANSWER.fullmatch(response.rstrip().rpartition("\n")[2])
    return int(match[1]) if match else None


def is_well_formed(response: str) -> bool:
    """True if the response is lines of worked steps followed by ``answer: N``; the numbers are not checked."""
    return _SOLUTION.fullmatch(response.rstrip()) is not None


def demonstrations(seed: int, careful: bool) -> Iterator[tuple[list[Message], str]]:
    """Endless (messages, response) pairs of training problems; unless ``careful``, `ERROR_RATE` of the steps are wrong.

    A model trained first on careful and then on careless pairs predicts each right result as the most likely token, but
    its sampled solutions are right only as often as the demonstrations, which leaves room for RL."""
    rng = random.Random(f"demonstrations/{seed}/{careful}")
    while True:
        problem = draw_problem(rng, heldout=False)
        yield problem.messages, solution(problem, rng, 0.0 if careful else ERROR_RATE)


def write_prompts(path: Path, count: int, seed: int, heldout: bool) -> None:
    """Writes ``count`` problems as JSONL, atomically: ``prompt`` (chat messages), ``answer``, ``steps``.

    Held-out problems are all different. Training problems repeat, so that all numbers of steps stay equally frequent:
    there are few short problems, and without them too few samples would be right to learn from."""
    rng = random.Random(f"{'heldout' if heldout else 'train'}/{seed}")
    problems: list[Problem] = []
    seen: set[Problem] = set()
    while len(problems) < count:
        problem = draw_problem(rng, heldout)
        if not (heldout and problem in seen):
            problems.append(problem)
            seen.add(problem)
    staged = path.with_name(f"{path.name}.partial")
    with staged.open("w") as file:
        for problem in problems:
            row = {"prompt": problem.messages, "answer": str(problem.answer), "steps": len(problem.steps)}
            file.write(json.dumps(row) + "\n")
    staged.rename(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write train.jsonl and heldout.jsonl for the arithmetic task.")
    parser.add_argument("--out", type=Path, required=True, help="output folder; created if missing")
    parser.add_argument("--train", type=int, default=8192, help="number of training problems")
    parser.add_argument("--heldout", type=int, default=512, help="number of held-out problems")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    write_prompts(args.out / "heldout.jsonl", args.heldout, args.seed, heldout=True)
    write_prompts(args.out / "train.jsonl", args.train, args.seed, heldout=False)  # last: make's target for both files
    print(f"{args.out}: train.jsonl with {args.train} problems, heldout.jsonl with {args.heldout}")


if __name__ == "__main__":
    main()
