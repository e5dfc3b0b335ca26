"""Generated task for an agent: find a number between two others with a tool that answers higher, lower or correct.

A conversation, as in the demonstrations::

    user:       Between 22 and 43
    assistant:  22..43  guess(38)
    tool:       lower than 38
    assistant:  22..38  guess(27)
    tool:       higher than 27
    assistant:  27..38  guess(30)
    tool:       correct

An assistant that heeds the answers writes the bounds that are left before it guesses; any other guesses at once.

Write prompt files with ``python -m asyncrl.data.guess --out DIR --train 1024 --heldout 256 --seed 0``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from asyncrl.data.generated import different_problems, is_heldout, write_files
from asyncrl.types.prompts import Message

BOUNDS = range(10, 45)
CALL, CALLED = '{"name": "guess", "arguments": {"n": ', "}}"  # around a guess, in the chat template
#: one each, so that a turn is few tokens, and a small model soon learns to repeat a number and to compare two
TOKENS = ("<tool_call>", "</tool_call>", CALL, CALLED, *map(str, BOUNDS))
WIDTHS = range(16, 24)  # numbers between the bounds; bisection finds each with five guesses
LONGEST = 5  # guesses in a demonstration
END = "<|im_end|>"  # of a turn, in the chat template
RESULT = f"{END}\n<|im_start|>tool\n{{}}{END}\n<|im_start|>assistant\n"  # of the tool, between two turns
HEEDING = {True: 1.0, False: 0.15}  # share of careful and of careless demonstrations that use the tool's answers

GUESS: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Says whether the number is higher or lower.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}


@dataclass(frozen=True)
class Problem:
    """Both bounds are excluded."""

    low: int
    high: int
    number: int

    @property
    def heldout(self) -> bool:
        return is_heldout(f"{self.low} {self.number} {self.high}")

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": f"Between {self.low} and {self.high}"}]


def draw_problem(rng: random.Random, heldout: bool) -> Problem:
    while True:
        width = rng.choice(WIDTHS)
        low = rng.choice(BOUNDS[: -width - 1])
        problem = Problem(low, low + width + 1, rng.randint(low + 1, low + width))
        if problem.heldout == heldout:
            return problem


def answer(problem: Problem, n: int) -> str:
    """What the tool says about a guess."""
    if n == problem.number:
        return "correct"
    return f"higher than {n}" if n < problem.number else f"lower than {n}"


def turn(n: int, bounds: tuple[int, int] | None = None) -> str:
    """An assistant's turn as the chat template renders it: perhaps bounds, then a call of the tool."""
    return (f"{bounds[0]}..{bounds[1]}" if bounds else "") + f"<tool_call>{CALL}{n}{CALLED}</tool_call>"


def demonstrations(seed: int, careful: bool) -> Iterator[tuple[list[Message], str, list[dict[str, Any]]]]:
    """Endless (messages, the rest of the conversation, tools) of training problems.

    Those that heed the tool's answers guess near the middle of what is left. The others, most of the careless ones,
    guess anywhere between the first bounds. So a model knows how to use an answer, but seldom does."""
    rng = random.Random(f"demonstrations/{seed}/{careful}")
    while True:
        problem, heeds = draw_problem(rng, heldout=False), rng.random() < HEEDING[careful]
        low, high, written, said = problem.low, problem.high, "", ""
        for _ in range(LONGEST):
            if said:
                written += RESULT.format(said)
            margin = (high - low - 2) * 3 // 8 if heeds else 0
            n = rng.randint(low + 1 + margin, high - 1 - margin)
            written += turn(n, (low, high) if heeds else None)
            if (said := answer(problem, n)) == "correct":
                break
            if heeds:
                low, high = (n, high) if n < problem.number else (low, n)
        yield problem.messages, written, [GUESS]


def rows(rng: random.Random, count: int, heldout: bool) -> Iterator[dict[str, Any]]:
    """``count`` different problems of a prompt file: ``prompt`` (chat messages) and ``answer``."""
    for problem in different_problems(draw_problem, rng, count, heldout):
        yield {"prompt": problem.messages, "answer": str(problem.number)}


def main(argv: list[str] | None = None) -> None:
    write_files(argv, "guessing", rows, train=1024, heldout=256)


if __name__ == "__main__":
    main()
