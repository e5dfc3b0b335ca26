"""Stop strings: does the token just drawn complete one of them in the decoded text?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_BROKEN = "\ufffd"  # what a decoder shows for a part of a character


class Tokenizer(Protocol):
    def decode(self, token_ids: list[int], **kwargs: bool) -> str: ...


class StopStrings:
    """Finds stop strings with one tokenizer call per token that may matter, and none for the others.

    A stop string can only be completed by a token whose own text holds its last character, or a part of a character;
    whether a token is of that kind is remembered per token id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text_of: dict[int, str] = {}

    def found(self, tokens: Sequence[int], start: int, stops: Sequence[str]) -> bool:
        """Whether the last of ``tokens`` completes one of ``stops`` in the text of ``tokens[start:]``."""
        last = self._alone(tokens[-1])
        return any(self._completes(tokens, start, stop) for stop in stops if self._may_end(stop, last))

    def _completes(self, tokens: Sequence[int], start: int, stop: str) -> bool:
        # every token decodes to at least one byte, and the first of the window may be a part of a character
        window = list(tokens[max(start, len(tokens) - len(stop.encode()) - 4) :])
        text, before = self._decode(window), self._decode(window[:-1]).rstrip(_BROKEN)
        return text.rfind(stop) + len(stop) > len(before) if stop in text else False

    def _may_end(self, stop: str, last: str) -> bool:
        # a token decoded alone may lose a leading space, so a stop string that ends with one is always looked for
        return stop[-1].isspace() or stop[-1] in last or _BROKEN in last

    def _alone(self, token: int) -> str:
        if token not in self._text_of:
            self._text_of[token] = self._decode([token])
        return self._text_of[token]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
