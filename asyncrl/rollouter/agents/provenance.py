"""Checks on what an agent loop returned: every token that it trains was sampled in that place, and is trained once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from asyncrl.rollouter.agents.base import Completion
from asyncrl.types.samples import FinishReason, Sample, TokenSequence, sequence_problem
from asyncrl.types.versions import VersionSpan


class SampledCall(NamedTuple):
    """A finished call of ``generate``: the length of its context and the `tokens_digest` of it, the number of tokens
    that it sampled, and its result, or only the `result_digest` of it: this process does not have it after a
    restart."""

    start: int
    context: int
    tokens: int
    result: Completion | int


def tokens_digest(tokens: np.ndarray) -> int:
    """64-bit digest of int32 [T] tokens."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int32).data)


def untrained_digest(context: int, sampling: Mapping[str, Any]) -> int:
    """64-bit digest of a call whose tokens are not trained: that of its context, and what it samples with."""
    return xxhash.xxh3_64_intdigest(f"{context}/{sorted(sampling.items())}".encode())


def result_digest(tokens: np.ndarray, logprobs: np.ndarray, spans: Sequence[VersionSpan], at: int = 0) -> int:
    """64-bit digest of tokens that were sampled, with their logprobs and versions. The first is at ``at`` in what the
    ``spans`` describe."""
    digest = xxhash.xxh3_64(np.ascontiguousarray(tokens, np.int32).data)
    digest.update(np.ascontiguousarray(logprobs, np.float32).data)
    digest.update(_versions(spans, at, len(tokens)).data)
    return digest.intdigest()


def _versions(spans: Sequence[VersionSpan], at: int, count: int) -> np.ndarray:
    """int64 [count, 3]: lineage and number of the version of each token from ``at``, and whether over mixed KV; not the
    replica, which a loop may leave out."""
    if len(spans) == 1:
        return np.repeat(np.array([(*spans[0].version, spans[0].mixed_kv)], np.int64), count, axis=0)
    of_span = np.searchsorted([span.start for span in spans], np.arange(at, at + count), "right") - 1
    return np.array([(*span.version, span.mixed_kv) for span in spans], np.int64).reshape(-1, 3)[of_span]


def sample_problem(
    sample: object, prompt_tokens: np.ndarray, calls: Sequence[SampledCall], max_response_tokens: int
) -> str | None:
    """What is wrong with an agent loop's ``sample`` of a prompt (int32 [P]), if anything.

    A trained token is one that a call sampled after the very tokens before it, with its logprob and version. Each
    token of a call is trained at most once. A loop may drop the last tokens of a call's result; if it does so with one
    that only a digest is left of, what it keeps is checked by its place alone."""
    if not isinstance(sample, Sample):
        return f"expected a Sample, found {type(sample).__name__}"
    if not isinstance(sample.finish, FinishReason):
        return f"expected a FinishReason, found {sample.finish!r}"
    if not sample.sequences:
        return "expected at least one sequence, found none"
    calls = sorted(calls, key=lambda call: isinstance(call.result, int))  # the others explain no other call's tokens
    trained = [np.zeros(call.tokens, bool) for call in calls]
    for q, sequence in enumerate(sample.sequences):
        if len(sequence.tokens) > max_response_tokens:
            return (
                f"sequence {q}: {len(sequence.tokens)} response tokens; expected at most "
                f"rollout.max_response_tokens = {max_response_tokens}"
            )
        problem = sequence_problem(sequence, len(prompt_tokens))
        if problem is None and not (len(sample.sequences) == 1 and _is_one_result(sequence, prompt_tokens, calls)):
            problem = _unsampled(sequence, prompt_tokens, calls, trained)
        if problem:
            return f"sequence {q}: {problem}"
    return None


def _is_one_result(sequence: TokenSequence, prompt_tokens: np.ndarray, calls: Sequence[SampledCall]) -> bool:
    """True if the sequence is the result of the only call: most samples are, and need no closer look."""
    if len(calls) != 1:
        return False
    prefix = len(prompt_tokens) if sequence.prefix is None else sequence.prefix
    call = calls[0]
    return (
        call.start == prefix and _is_result(sequence, 0, call) and tokens_digest(prompt_tokens[:prefix]) == call.context
    )


def _unsampled(
    sequence: TokenSequence, prompt_tokens: np.ndarray, calls: Sequence[SampledCall], trained: list[np.ndarray]
) -> str | None:
    """The first trained token that no call explains, if there is one. Marks the tokens of calls that it explains as
    ``trained``."""
    prefix = len(prompt_tokens) if sequence.prefix is None else sequence.prefix
    tokens = np.concatenate([prompt_tokens[:prefix], np.asarray(sequence.tokens, np.int32)])
    unexplained = np.asarray(sequence.loss_mask, bool).copy()
    repeated = np.zeros_like(unexplained)
    contexts = _digests(tokens, {call.start for call in calls})
    for call, taken in zip(calls, trained, strict=True):
        at = call.start - prefix  # of its first token in the response
        count = min(call.tokens, len(tokens) - call.start)
        if at < 0 or count <= 0 or contexts[call.start] != call.context:
            continue
        here = slice(at, at + count)
        if count == call.tokens and not taken.any() and _is_result(sequence, at, call):
            taken |= unexplained[here]
            unexplained[here] = False
            continue
        sampled = _same(sequence, at, count, call)
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


def _digests(tokens: np.ndarray, ends: Iterable[int]) -> dict[int, int]:
    """`tokens_digest` of ``tokens[:end]`` for each of the ``ends``, in one pass over the tokens."""
    digest, at, found = xxhash.xxh3_64(), 0, {}
    for end in sorted(ends):
        digest.update(tokens[at:end].data)
        found[end], at = digest.intdigest(), end
    return found


def _is_result(sequence: TokenSequence, at: int, call: SampledCall) -> bool:
    """True if the sequence has all of the call's tokens from ``at``, with their logprobs and versions; False also if
    that takes a closer look, as `_same` has it."""
    result, here = call.result, slice(at, at + call.tokens)
    return (
        not isinstance(result, int)
        and not at
        and len(sequence.tokens) == call.tokens
        and [span[:3] for span in sequence.spans] == [span[:3] for span in result.spans]
        and np.asarray(sequence.tokens, np.int32)[here].tobytes() == result.tokens.tobytes()
        and np.asarray(sequence.logprobs, np.float32)[here].tobytes() == result.logprobs.tobytes()
    )


def _same(sequence: TokenSequence, at: int, count: int, call: SampledCall) -> np.ndarray:
    """bool [count]: the sequence has the call's tokens from ``at`` up to there, with their logprobs and versions."""
    here, result = slice(at, at + count), call.result
    if isinstance(result, int):
        tokens, logprobs = np.asarray(sequence.tokens)[here], np.asarray(sequence.logprobs)[here]
        found = result_digest(tokens, logprobs, sequence.spans, at)
        return np.full(count, count < call.tokens or found == result)
    same = np.asarray(sequence.tokens)[here] == result.tokens[:count]
    np.logical_and.accumulate(same, out=same)  # what follows another token was not sampled after it
    logprobs = np.asarray(sequence.logprobs, np.float32)[here]
    return (
        same
        & (logprobs.view(np.int32) == np.asarray(result.logprobs[:count], np.float32).view(np.int32))
        & (_versions(sequence.spans, at, count) == _versions(result.spans, 0, count)).all(1)
    )
