"""Generated arithmetic task with verifiable answers: chains of additions and subtractions, worked from the left.

A problem, and its solution in the demonstrations::

    user:       Compute 7-5+2+4
    assistant:  7-5=2,+2+4
                2+2=4,+4
                4+4=8
                answer: 8

Each line does one operation and repeats the rest, so each term adds more to the solution than the previous one, and
response lengths differ sixfold. The warm start of `asyncrl.models.make_checkpoint` sees no held-out problem.

Write prompt files with ``python -m asyncrl.data.arithmetic --out DIR --train 8192 --heldout 512 --seed 0``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from asyncrl.data.generated import draw_problems, is_heldout, write_files
from asyncrl.types.prompts import Message

STEPS = range(1, 7)  # operations in a problem, uniformly
FIRST_TERMS = range(1, 10)
TERMS = [-5, -4, -3, -2, -1, 1, 2, 3, 4, 5]  # all further terms
TOTALS = range(10)  # every running total: one digit, so one token
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
        return is_heldout(self.expression)

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


def rows(rng: random.Random, count: int, heldout: bool) -> Iterator[dict[str, Any]]:
    """Rows of a prompt file: ``prompt`` (chat messages), ``answer``, ``steps`` (their number)."""
    for problem in draw_problems(draw_problem, rng, count, heldout):
        yield {"prompt": problem.messages, "answer": str(problem.answer), "steps": len(problem.steps)}


def main(argv: list[str] | None = None) -> None:
    write_files(argv, "arithmetic", rows, train=8192, heldout=512)


if __name__ == "__main__":
    main()
