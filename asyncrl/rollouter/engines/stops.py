"""End of a request: at a stop token, or at the token that completes a stop string in the decoded text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asyncrl.rollouter.engines.base import Request

_BROKEN = "\ufffd"  # what a decoder shows for part of a character


class Tokenizer(Protocol):
    def decode(self, token_ids: list[int], **kwargs: bool) -> str: ...


class StopStrings:
    """Finds stop strings. Calls the tokenizer only for tokens that may complete one.

    Only a token whose own text contains the string's last character, or part of a character, can complete it; token
    texts are cached by id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text_of: dict[int, str] = {}

    def found(self, tokens: Sequence[int], start: int, stops: Sequence[str]) -> bool:
        """True if the last of ``tokens`` completes one of ``stops`` in the text of ``tokens[start:]``."""
        last = self._alone(tokens[-1])
        return any(self._completes(tokens, start, stop) for stop in stops if self._may_end(stop, last))

    def _completes(self, tokens: Sequence[int], start: int, stop: str) -> bool:
        # every token decodes to at least one byte; the window's first may be part of a character
        window = list(tokens[max(start, len(tokens) - len(stop.encode()) - 4) :])
        text, before = self._decode(window), self._decode(window[:-1]).rstrip(_BROKEN)
        return text.rfind(stop) + len(stop) > len(before) if stop in text else False

    def _may_end(self, stop: str, last: str) -> bool:
        # a token decoded alone may lose a leading space, so stop strings that end with one are always searched for
        return stop[-1].isspace() or stop[-1] in last or _BROKEN in last

    def _alone(self, token: int) -> str:
        if token not in self._text_of:
            self._text_of[token] = self._decode([token])
        return self._text_of[token]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class RequestEnd:
    """Finds the token at which one request ends. ``strings`` is called only if the request has stop strings. If the
    request was interrupted and continued, a stop string may begin in its earlier tokens."""

    def __init__(self, request: Request, strings: Callable[[], StopStrings]) -> None:
        self._stop_tokens = frozenset(request.sampling.stop_token_ids)
        self._stop_strings = request.sampling.stop_strings
        self._strings = strings() if self._stop_strings else None
        drawn_from = len(request.tokens) - request.resumed
        self._drawn: list[int] = request.tokens[drawn_from:].tolist()

    def within(self, tokens: Sequence[int]) -> int | None:
        """How many of the next ``tokens`` belong to the request if it ends among them, else None."""
        for count, token in enumerate(tokens, 1):
            if token in self._stop_tokens:
                return count
            if self._strings is not None:
                self._drawn.append(token)
                if self._strings.found(self._drawn, 0, self._stop_strings):
                    return count
        return None
