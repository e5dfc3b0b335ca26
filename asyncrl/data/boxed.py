r"""Answers that mathematical texts mark with ``\boxed{…}``."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{…}``, ``\fbox{…}`` or ``\boxed 5`` of ``text``; None without any that is closed.

    >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        if text[start : start + 1] != "{":
            if word := re.match(r"[^\s$.,;]+", text[start:]):
                return word[0]
        elif (end := _closing(text, start)) is not None:
            return text[start + 1 : end].strip()
    return None


def _closing(text: str, start: int) -> int | None:
    """Position of the brace that closes the one at ``start``. An escaped brace is text."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return start + brace.start()
    return None
