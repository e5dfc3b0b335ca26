"""Token masks of grammars, by llguidance: which tokens may come next, so that the whole answer matches::

grammars = Grammars(tokenizer, vocabulary)
matcher = grammars.matcher(Grammar("regex", "[0-9]{3}"), stop_token_ids)
matcher.fill(words)         # the mask for the next token
matcher.advance(token)      # after every token but the stop token
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.rollouter.engines.base import Grammar

_COMPILED = 64  # grammars that are kept: a large one takes up to a second to compile


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that allows no further token."""


class Grammars:
    """Compiles grammars for a Hugging Face tokenizer and a model's vocabulary. The first one takes about a second more,
    in which llguidance reads the tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._compiled = functools.lru_cache(_COMPILED)(self._compile)

    def compile(self, grammar: Grammar) -> None:
        """Ahead of `matcher`, which then takes no time; from any thread. A grammar that is refused raises there."""
        self._compiled(grammar)

    def matcher(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> Matcher:
        """For a new answer. Raises GrammarError."""
        compiled = self._compiled(grammar)
        if isinstance(compiled, str):
            raise GrammarError(compiled)
        return Matcher(compiled.deep_copy(), self._tokens.eos_token, stop_token_ids, self._vocabulary)

    @functools.cached_property
    def _tokens(self) -> Any:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary)

    def _compile(self, grammar: Grammar) -> Any:
        """A refusal is a text, which is kept as well: other samples may ask for the same."""
        try:
            from llguidance import LLMatcher

            compiled = LLMatcher(self._tokens, _own_form(grammar), log_level=0)
        except Exception as e:  # parsers and tokenizers raise many types
            return f"the grammar ({grammar.kind}) is refused: {e}"
        if compiled.is_error():
            return f"the grammar ({grammar.kind}) is refused: {compiled.get_error()}"
        return compiled


class Matcher:
    """Where one answer stands in its grammar. ``end``: the token by which llguidance would end it; those of the request
    take its place."""

    def __init__(self, state: Any, end: int, stop_token_ids: Sequence[int], vocabulary: int) -> None:
        self._state = state
        self._stops = _bits([token for token in stop_token_ids if 0 <= token < vocabulary], vocabulary)
        self._others = ~(self._stops | _bits([end], vocabulary))

    def fill(self, words_W: np.ndarray) -> None:
        """Set int32 [W] ``words`` to the next token's mask, see `TokenMasks`. Raises GrammarError if there is none."""
        self._state.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
        if self._state.is_error():
            raise GrammarError(f"the grammar cannot be followed further: {self._state.get_error()}")
        words_W &= self._others
        if self._state.is_accepting():
            words_W |= self._stops
        if not words_W.any():
            raise GrammarError("no token of the vocabulary continues the text within its grammar")

    def advance(self, token: int) -> None:
        """The answer continues with ``token``, which the last mask allowed."""
        self._state.consume_token(token)


def _own_form(grammar: Grammar) -> str:
    """The grammar as llguidance reads it."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))


def _bits(tokens: Sequence[int], vocabulary: int) -> np.ndarray:
    """int32 [W] with the bits of these tokens."""
    flags = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
