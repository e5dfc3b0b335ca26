"""Messages and tool calls in a trajectory's text, as templates write them that begin a message with ``<|im_start|>``,
such as those of Qwen, MiMo and Hermes. Text of other templates is left as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

START, END = "<|im_start|>", "<|im_end|>"
_ROLES = "(system|user|assistant|tool)\n"
_MARK = re.compile(rf"{re.escape(START)}{_ROLES}|({re.escape(END)}\n?)")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Piece(NamedTuple):
    """Text of a message of this ``role``, empty if unknown. ``call``: a tool call, as ``name(key=value)``."""

    role: str
    text: str
    call: bool = False


class Conversation:
    """Reads the parts of a sequence one after another: a message may begin in one and go on in the next."""

    def __init__(self) -> None:
        self._role = ""

    def read(self, text: str) -> list[Piece]:
        """The messages, or parts of messages, in a part's text."""
        if re.match(_ROLES, text) and END in text:  # a sequence that shares only the first mark with its group's prompt
            text = START + text
        found: list[Piece] = []
        at = 0
        for mark in _MARK.finditer(text):
            found += self._pieces(text[at : mark.start()])
            self._role, at = mark[1] or "", mark.end()
        return [*found, *self._pieces(text[at:])]

    def _pieces(self, text: str) -> Iterator[Piece]:
        at = 0
        for call in _CALL.finditer(text):
            if written := _written(call[1]):
                yield from self._text(text[at : call.start()])
                yield Piece(self._role, written, True)
                at = call.end()
        yield from self._text(text[at:])

    def _text(self, text: str) -> Iterator[Piece]:
        if text.strip():
            yield Piece(self._role, text.strip("\n"))


def _written(call: str) -> str:
    """A tool call in short; empty if it is malformed."""
    try:
        found = json.loads(call)
        arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in found["arguments"].items())
        return f"{found['name']}({arguments})"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
