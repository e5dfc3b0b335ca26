"""Generated code task: short programs that read integers, change the list step by step, and print something of it.

A problem, and its solution in the demonstrations::

    user:       Read integers. Double each, keep the even ones, print the sum.
    assistant:  ```python
                xs = [int(x) for x in input().split()]
                xs = [2 * x for x in xs]
                xs = [x for x in xs if x % 2 == 0]
                print(sum(xs))
                ```

The column ``tests`` has inputs and expected outputs, for the reward `asyncrl.rollouter.rewards.unit_tests`.

Write prompt files with ``python -m asyncrl.data.programs --out DIR --train 2048 --heldout 128 --seed 0``.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from asyncrl.data.code_tests import Test, tests_text
from asyncrl.data.generated import draw_problems, is_heldout, write_files
from asyncrl.types.prompts import Message

READ = "xs = [int(x) for x in input().split()]"
STEPS = {
    "double each": "xs = [2 * x for x in xs]",
    "square each": "xs = [x * x for x in xs]",
    "add one to each": "xs = [x + 1 for x in xs]",
    "negate each": "xs = [-x for x in xs]",
    "keep the even ones": "xs = [x for x in xs if x % 2 == 0]",
    "keep the odd ones": "xs = [x for x in xs if x % 2 == 1]",
    "keep the positive ones": "xs = [x for x in xs if x > 0]",
    "drop the first": "xs = xs[1:]",
    "drop the last": "xs = xs[:-1]",
    "drop repeated ones": "xs = list(dict.fromkeys(xs))",
    "sort them": "xs = sorted(xs)",
    "reverse them": "xs = xs[::-1]",
}
RESULTS = {
    "print them": "print(*xs)",
    "print the sum": "print(sum(xs))",
    "print how many there are": "print(len(xs))",
    "print the largest": "print(max(xs, default=0))",
    "print the smallest": "print(min(xs, default=0))",
}
LENGTHS = range(1, 5)  # steps of a problem, uniformly
TESTS = 2
ERROR_RATE = 0.35  # share of wrong lines in careless demonstrations


@dataclass(frozen=True)
class Problem:
    """Keys of `STEPS`, and one of `RESULTS`."""

    steps: tuple[str, ...]
    result: str

    @property
    def text(self) -> str:
        return f"Read integers. {', '.join([*self.steps, self.result]).capitalize()}."

    @property
    def heldout(self) -> bool:
        return is_heldout(self.text)

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.text}]

    @property
    def lines(self) -> list[str]:
        return [READ, *(STEPS[step] for step in self.steps), RESULTS[self.result]]


def draw_problem(rng: random.Random, heldout: bool) -> Problem:
    """Samples a training or held-out problem; all its steps are different."""
    while True:
        problem = Problem(tuple(rng.sample(list(STEPS), rng.choice(LENGTHS))), rng.choice(list(RESULTS)))
        if problem.heldout == heldout:
            return problem


def answer(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def careless(lines: list[str], rng: random.Random) -> list[str]:
    """After the first, `ERROR_RATE` of the lines are left out, do something else, or end too early."""
    written = lines[:1]
    for line in lines[1:]:
        others = RESULTS if line in RESULTS.values() else STEPS
        wrong = rng.choice(([], [rng.choice(list(others.values()))], [line[:-1]]))
        written += wrong if rng.random() < ERROR_RATE else [line]
    return written


def demonstrations(seed: int, careful: bool) -> Iterator[tuple[list[Message], str]]:
    """Endless (messages, response) pairs of training problems; unless ``careful``, with mistakes. As with
    `asyncrl.data.arithmetic.demonstrations`, a model that is trained on the former first can still do better."""
    rng = random.Random(f"demonstrations/{seed}/{careful}")
    while True:
        problem = draw_problem(rng, heldout=False)
        yield problem.messages, answer(problem.lines if careful else careless(problem.lines, rng))


def draw_test(problem: Problem, rng: random.Random) -> Test:
    """An input, and what the right program prints."""
    given = " ".join(str(rng.randint(-9, 9)) for _ in range(rng.randint(5, 8)))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec("\n".join(problem.lines), {"input": lambda: given})  # our own lines
    return {"stdin": given + "\n", "stdout": printed.getvalue()}


def rows(rng: random.Random, count: int, heldout: bool) -> Iterator[dict[str, Any]]:
    """Rows of a prompt file: ``prompt`` (chat messages), ``tests``, ``steps`` (their number)."""
    for problem in draw_problems(draw_problem, rng, count, heldout):
        tests = tests_text([draw_test(problem, rng) for _ in range(TESTS)])
        yield {"prompt": problem.messages, "answer": "", "tests": tests, "steps": len(problem.steps)}


def main(argv: list[str] | None = None) -> None:
    write_files(argv, "code", rows, train=2048, heldout=128)


if __name__ == "__main__":
    main()
