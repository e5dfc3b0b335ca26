r"""Answers that mathematical texts mark with ``\boxed{…}``."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_WORD = re.compile(r"[^\s$.,;]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character, which is text


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{…}``, ``\fbox{…}`` or ``\boxed 5`` of ``text``; None without any that is closed.

    >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    closing = _closing(text)
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        if text[start : start + 1] != "{":
            if word := _WORD.match(text, start):
                return word[0]
        elif (end := closing.get(start)) is not None:
            return text[start + 1 : end].strip()
    return None


def _closing(text: str) -> dict[int, int]:
    """Of each brace that is closed, the position of the one that closes it. One pass: a policy may write any number of
    boxes."""
    closing: dict[int, int] = {}
    still_open: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            still_open.append(brace.start())
        elif brace[0] == "}" and still_open:
            closing[still_open.pop()] = brace.start()
    return closing
