"""Reward of an answer in the same words: 1 if the response is the prompt's answer, but for spaces and case.

    reward:
      function: exact_match
      args:
        pattern: "#### (.*)"    # the answer is the group of its last match; without a pattern, the whole response

A response in which the pattern does not match has no answer, and a reward of 0.
"""

from __future__ import annotations

import re
from typing import Any

from asyncrl.plugins.registry import UnknownPart
from asyncrl.types.prompts import Prompt


class ExactMatch:
    """``reward`` and ``accuracy`` are 1 or 0; ``answered`` is 1 if the response has an answer."""

    def prepare(self, pattern: Any = "") -> None:
        """Raises UnknownPart for a pattern that is not a regular expression with at most one group."""
        check_pattern("reward.args.pattern", pattern)

    def __call__(self, prompt: Prompt, response: str, pattern: str = "") -> dict[str, float]:
        answer = last_match(pattern, response) if pattern else response
        correct = float(answer is not None and normalized(answer) == normalized(prompt.answer))
        return {"reward": correct, "accuracy": correct, "answered": float(answer is not None)}


def check_pattern(option: str, pattern: Any) -> None:
    """Raises UnknownPart unless ``pattern`` is a regular expression with at most one group."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, TypeError) as e:
        raise UnknownPart(f"{option}: expected a regular expression, found {pattern!r} ({e})") from None
    if groups > 1:
        raise UnknownPart(f"{option}: expected at most one group, which is the answer; found {groups} in {pattern!r}")


def last_match(pattern: str, text: str) -> str | None:
    """Group of the last match of ``pattern``, or the whole match if it has no group; None if it does not match."""
    found = list(re.finditer(pattern, text))[-1:]
    return found[0][found[0].re.groups] if found else None


def normalized(text: str) -> str:
    """``text`` in one case, with single spaces."""
    return " ".join(text.casefold().split())


REWARD = ExactMatch()
