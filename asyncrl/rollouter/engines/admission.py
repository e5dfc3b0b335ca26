"""Detects requests that can never run."""

from __future__ import annotations

import math

from asyncrl.rollouter.engines.base import LEAST_TEMPERATURE, Request


def why_impossible(request: Request, context_tokens: int, vocabulary: int, has_tokenizer: bool) -> str | None:
    """Reason that the request can never run, for its submitter; None if it can."""
    size, p = len(request.tokens), request.sampling
    if size == 0:
        return "the request has no tokens: expected at least one to generate after"
    if size >= context_tokens:
        return (
            f"the request has {size} tokens and the context holds {context_tokens}, which leaves no room for a new "
            f"one: shorten the prompt or raise rollout.engine.max_context_tokens"
        )
    if request.max_new_tokens < 1:
        return f"max_new_tokens is {request.max_new_tokens}, expected at least 1"
    low, high = int(request.tokens.min()), int(request.tokens.max())
    if low < 0 or high >= vocabulary:
        return f"token ids run from {low} to {high}, the model's vocabulary from 0 to {vocabulary - 1}"
    scaled = p.temperature == 0 or p.temperature >= LEAST_TEMPERATURE
    if not scaled or not 0 < p.top_p <= 1 or p.top_k < 0 or not 0 <= p.min_p <= 1:
        return (
            f"expected temperature 0 or ≥ {LEAST_TEMPERATURE:g}, 0 < top_p ≤ 1, top_k ≥ 0 and 0 ≤ min_p ≤ 1, found {p}"
        )
    if p.stop_strings and not has_tokenizer:
        return "the request has stop strings, but the engine was built without a tokenizer to find them"
    if "" in p.stop_strings:
        return "a stop string is empty: it would end every sample at once"
    for token, bias in p.logit_bias:
        if not 0 <= token < vocabulary or not math.isfinite(bias):
            return f"logit_bias: expected tokens from 0 to {vocabulary - 1} and finite numbers, found {token}: {bias}"
    if p.grammar is not None:
        if not has_tokenizer:
            return "the request has a grammar, but the engine was built without a tokenizer to know its tokens' text"
        if not p.grammar.text:
            return f"the request's grammar ({p.grammar.kind}) is empty"
        if not p.stop_token_ids:
            return "the request has a grammar, but no stop token to end its answer with"
        if request.resumed:
            return "a request with a grammar cannot be resumed: start it again"
    return None
