r"""Reward of a mathematical answer: 1 if it equals the prompt's answer as an expression, by the package math-verify.

The answer of a response is its last ``\boxed{…}``, or else the last number or expression that math-verify finds.

math-verify bounds its time by SIGALRM, which only a process's main thread can use: reward workers call functions there.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

from asyncrl.data.boxed import last_boxed
from asyncrl.plugins.registry import UnknownPart
from asyncrl.types.prompts import Prompt

LIMIT_S = 2  # to parse a text, and to compare two expressions; whole seconds
TAIL = 2000  # characters at the end of a response in which an answer without a box is looked for


class MathVerify:
    """``reward`` and ``accuracy`` are 1 or 0; ``boxed`` is 1 if the response has a ``\\boxed{…}``."""

    def prepare(self) -> None:
        """Raises UnknownPart without the package."""
        if importlib.util.find_spec("math_verify") is None:
            raise UnknownPart(
                "reward.function: math_verify needs the package math-verify, which is not installed; "
                "`pip install 'math-verify>=0.9,<0.10'` adds it"
            )

    def __call__(self, prompt: Prompt, response: str) -> dict[str, float]:
        """Raises ValueError if the prompt's answer is not an expression: a fault of the data, not of the response."""
        from math_verify import verify

        expected = _expected(prompt.answer)
        boxed = last_boxed(response)
        found = _parsed(response[-TAIL:] if boxed is None else f"\\boxed{{{boxed}}}")
        correct = float(verify(expected, found, timeout_seconds=LIMIT_S))
        return {"reward": correct, "accuracy": correct, "boxed": float(boxed is not None)}


@lru_cache(maxsize=64)  # a group has one prompt
def _expected(answer: str) -> Any:
    """Raises ValueError if there is none. It is not cached: parsing may have had too little CPU time."""
    if not (found := _parsed(answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}")):
        raise ValueError(f"expected a mathematical expression as the prompt's answer, found {answer!r}")
    return found


def _parsed(text: str) -> Any:
    """Expressions, and their text; empty if there are none, or parsing takes longer than `LIMIT_S`."""
    from math_verify import parse

    return parse(text, parsing_timeout=LIMIT_S)


REWARD = MathVerify()
