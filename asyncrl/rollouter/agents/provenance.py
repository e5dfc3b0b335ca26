"""Checks on what an agent loop returned: every token that it trains was sampled in that place, and is trained once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from asyncrl.rollouter.agents.base import Completion
from asyncrl.types.samples import FinishReason, Sample, TokenSequence, sequence_problem
from asyncrl.types.versions import VersionSpan


class SampledCall(NamedTuple):
    """A finished call of ``generate``: the length of its context and the `context_digest` of it, the number of tokens
    that it sampled, and its result (None: this process does not have it, as after a restart)."""

    start: int
    context: int
    tokens: int
    result: Completion | None


def context_digest(tokens: np.ndarray) -> int:
    """64-bit digest of int32 [T] tokens."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int32).data)


def sample_problem(
    sample: object, prompt_tokens: np.ndarray, calls: Sequence[SampledCall], max_response_tokens: int
) -> str | None:
    """What is wrong with an agent loop's ``sample`` of a prompt (int32 [P]), if anything.

    A trained token is one that a call sampled after the very tokens before it, with its logprob and version. Each
    token of a call is trained at most once. A loop may drop the last tokens of a call's result. Of a call without a
    result only the place of its tokens is known."""
    if not isinstance(sample, Sample):
        return f"expected a Sample, found {type(sample).__name__}"
    if not isinstance(sample.finish, FinishReason):
        return f"expected a FinishReason, found {sample.finish!r}"
    if not sample.sequences:
        return "expected at least one sequence, found none"
    calls = sorted(calls, key=lambda call: call.result is None)  # those explain no other call's tokens
    trained = [np.zeros(call.tokens, bool) for call in calls]
    for q, sequence in enumerate(sample.sequences):
        if len(sequence.tokens) > max_response_tokens:
            return (
                f"sequence {q}: {len(sequence.tokens)} response tokens; expected at most "
                f"rollout.max_response_tokens = {max_response_tokens}"
            )
        problem = sequence_problem(sequence, len(prompt_tokens)) or _unsampled(sequence, prompt_tokens, calls, trained)
        if problem:
            return f"sequence {q}: {problem}"
    return None


def _unsampled(
    sequence: TokenSequence, prompt_tokens: np.ndarray, calls: Sequence[SampledCall], trained: list[np.ndarray]
) -> str | None:
    """The first trained token that no call explains, if there is one. Marks the tokens of calls that it explains as
    ``trained``."""
    prefix = len(prompt_tokens) if sequence.prefix is None else sequence.prefix
    tokens = np.concatenate([prompt_tokens[:prefix], np.asarray(sequence.tokens, np.int32)])
    unexplained = np.asarray(sequence.loss_mask, bool).copy()
    repeated = np.zeros_like(unexplained)
    for call, taken in zip(calls, trained, strict=True):
        at = call.start - prefix  # of its first token in the response
        count = min(call.tokens, len(tokens) - call.start)
        if at < 0 or count <= 0 or context_digest(tokens[: call.start]) != call.context:
            continue
        sampled = np.ones(count, bool) if call.result is None else _same(sequence, at, count, call.result)
        here = slice(at, at + count)
        repeated[here] |= unexplained[here] & sampled & taken[:count]
        explains = unexplained[here] & sampled & ~taken[:count]
        taken[:count] |= explains
        unexplained[here] &= ~explains
    if not unexplained.any():
        return None
    token = int(np.flatnonzero(unexplained)[0])
    if repeated[token]:
        return f"token {token} is trained twice in this sample; expected loss_mask False for all but one of its uses"
    return (
        f"token {token} is trained, but no call of generate returned it after the tokens before it; expected tokens, "
        "logprobs and versions as generate returned them, and loss_mask False for all others"
    )


def _same(sequence: TokenSequence, at: int, count: int, result: Completion) -> np.ndarray:
    """bool [count]: the sequence has the call's tokens from ``at`` up to there, with their logprobs and versions."""
    here = slice(at, at + count)
    same = np.asarray(sequence.tokens)[here] == result.tokens[:count]
    np.logical_and.accumulate(same, out=same)  # what follows another token was not sampled after it
    logprobs = np.asarray(sequence.logprobs, np.float32)[here]
    return (
        same
        & (logprobs.view(np.int32) == np.asarray(result.logprobs[:count], np.float32).view(np.int32))
        & _same_versions(sequence.spans, at, result.spans, count)
    )


def _same_versions(spans: Sequence[VersionSpan], at: int, sampled: Sequence[VersionSpan], count: int) -> np.ndarray:
    """bool [count]: ``spans``, from token ``at``, name what ``sampled`` the tokens."""
    starts, sampled_starts = [span.start - at for span in spans], [span.start for span in sampled]
    same = np.zeros(count, bool)
    edges = sorted({0, count, *(edge for edge in starts + sampled_starts if 0 < edge < count)})
    for first, end in itertools.pairwise(edges):
        theirs = spans[int(np.searchsorted(starts, first, "right")) - 1]
        ours = sampled[int(np.searchsorted(sampled_starts, first, "right")) - 1]
        same[first:end] = theirs[1:3] == ours[1:3]  # not the replica, which a loop may leave out
    return same
