"""Partial samples: all progress of a sample in flight, so that it can resume on another replica or in another process.

A partial sample holds the state that its agent loop saved last and the calls of ``generate`` made since. A snapshot
stores both, in parts: the first is whole, and each further one holds what is new. When the loop runs again, those calls
are replayed, see `asyncrl.rollouter.replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.provenance import result_digest
from asyncrl.types.columns import Buffer, Layout
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion, VersionSpan

_SNAPSHOT = Layout("snapshot", b"ARL2")
_TOKEN_BYTES = 8  # with its logprob
_NONE = -1  # stands for a missing finish reason, or length of a state


@dataclass(eq=False)
class GeneratedTokens:
    """Tokens that a call of ``generate`` has produced so far; the router appends.

    ``first_version`` and ``first_token_s`` (seconds of the node's clock) are those of its first token; None before
    it."""

    first_version: PolicyVersion | None = None
    first_token_s: float | None = None
    count: int = 0
    tokens: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def add(
        self, tokens: np.ndarray, logprobs: np.ndarray, version: PolicyVersion, mixed_kv: bool, replica: str = ""
    ) -> None:
        """Append int32 [C] tokens and float32 [C] logprobs, sampled under ``version`` by ``replica``."""
        span = VersionSpan(self.count, version, mixed_kv, replica)
        if not self.spans or self.spans[-1][1:] != span[1:]:
            self.spans.append(span)
        if self.first_version is None:
            self.first_version = version
        if self.first_token_s is None:
            self.first_token_s = now_s()
        self.tokens.append(tokens.copy())  # a view would keep the whole batch that it came with, in Ray's object store
        self.logprobs.append(logprobs.copy())
        self.count += len(tokens)

    def equals(self, completion: Completion) -> bool:
        """True if these are the completion's tokens, with its logprobs."""
        if self.count != len(completion.tokens):
            return False
        tokens, logprobs = _joined(self.tokens, np.int32), _joined(self.logprobs, np.float32)
        return tokens.tobytes() == completion.tokens.tobytes() and logprobs.tobytes() == completion.logprobs.tobytes()

    @property
    def last_token(self) -> int | None:
        """None before the first token."""
        if self.tokens and len(self.tokens[-1]):
            return int(self.tokens[-1][-1])
        return next((int(part[-1]) for part in reversed(self.tokens) if len(part)), None)

    def completion(self, finish: FinishReason) -> Completion:
        self.tokens, self.logprobs = [_joined(self.tokens, np.int32)], [_joined(self.logprobs, np.float32)]
        return Completion(self.tokens[0], self.logprobs[0], list(self.spans), finish)


@dataclass(eq=False)
class GenerateCall:
    """One call of ``generate``: 64-bit digest and length of its context, its number among the sample's calls with equal
    ones, `limits_digest` of its own limits, its output, and None or why it finished."""

    context: int
    start: int
    ordinal: int
    limits: int
    output: GeneratedTokens
    finish: FinishReason | None = None
    most: int = 0  # tokens that it may have, while this process runs it

    def saved(self) -> SavedCall:
        tokens, logprobs = _joined(self.output.tokens, np.int32), _joined(self.output.logprobs, np.float32)
        return SavedCall(
            self.context, result_digest(tokens, logprobs, self.output.spans), self.start, self.ordinal, len(tokens)
        )


class SavedCall(NamedTuple):
    """A call whose result is in the state that the agent loop saved: digest and length of its context, `result_digest`,
    its number among calls with equal contexts, and the number of its tokens."""

    context: int
    result: int
    start: int
    ordinal: int
    tokens: int


class Position(NamedTuple):
    """How far a sample is: all that it had at this position it still has, unless ``replaced`` differs.

    ``replaced`` counts the changes other than additions. The first ``finished`` of its calls are finished; ``others``:
    tokens, spans and whether it is finished, of each call after them."""

    replaced: int
    finished: int = 0
    others: tuple[tuple[int, int, bool], ...] = ()

    def of(self, call: int) -> tuple[int, int, bool]:
        """Tokens, spans and whether it was finished, of a call after the first ``finished``."""
        at = call - self.finished
        return self.others[at] if at < len(self.others) else (0, 0, False)


_NOWHERE = Position(_NONE)  # of a sample that no part has


@dataclass(eq=False)
class PartialSample:
    """``state`` is what the agent loop saved last, ``calls`` those whose results are not in it.

    ``saved_calls`` are those before; ``saved_first_token_s`` is that of their first token. ``attempt`` counts how often
    the queue refused the group."""

    state: bytes | None = None
    saved_calls: list[SavedCall] = field(default_factory=list)
    saved_first_token_s: float | None = None
    calls: list[GenerateCall] = field(default_factory=list)
    attempt: int = 0
    requests: int = 0  # made by this process; numbers the requests' ids
    #: calls that ended in this process, in order: tokens that one sampled, those that the loop read before its next
    #: one, and the seconds until then
    turns: list[tuple[int, int, float]] = field(default_factory=list)
    _replaced: int = 0

    @property
    def token_count(self) -> int:
        """Tokens generated so far, over all calls."""
        return sum(call.tokens for call in self.saved_calls) + sum(call.output.count for call in self.calls)

    @property
    def first_token_s(self) -> float | None:
        """When this process received the sample's first token, in seconds of the node's clock."""
        received = [self.saved_first_token_s, *(call.output.first_token_s for call in self.calls)]
        return min((at for at in received if at is not None), default=None)

    @property
    def size(self) -> int:
        """Bytes of its state and of the tokens since."""
        return len(self.state or b"") + _TOKEN_BYTES * sum(call.output.count for call in self.calls)

    @property
    def started(self) -> bool:
        return self.state is not None or self.token_count > 0

    @property
    def position(self) -> Position:
        """Differs between two moments if their snapshots would differ."""
        first = 0
        for call in self.calls:  # no generator: this is asked of every sample in flight
            if call.finish is None:
                others = [(c.output.count, len(c.output.spans), c.finish is not None) for c in self.calls[first:]]
                return Position(self._replaced, first, tuple(others))
            first += 1
        return Position(self._replaced, first)

    def begin(self, context: int, start: int, limits: int) -> GenerateCall:
        equals = [call.ordinal for call in self.saved_calls if call.context == context]
        equals += [call.ordinal for call in self.calls if call.context == context]
        self.calls.append(GenerateCall(context, start, max(equals, default=-1) + 1, limits, GeneratedTokens()))
        return self.calls[-1]

    def finish(self, call: GenerateCall, reason: FinishReason) -> None:
        call.finish = reason

    def restore(self, call: GenerateCall, completion: Completion) -> None:
        """Give a call the result that an earlier process received."""
        count, spans = len(completion.tokens), list(completion.spans)
        version = spans[0].version if spans else None
        call.output = GeneratedTokens(version, None, count, [completion.tokens], [completion.logprobs], spans)
        call.finish = completion.finish
        self._replaced += 1

    def start_again(self, call: GenerateCall) -> None:
        """Discard the tokens of a call."""
        call.output = GeneratedTokens()
        self._replaced += 1

    def discard(self, call: GenerateCall) -> None:
        """Remove a call that was cancelled or failed; the loop may call again."""
        self.calls.remove(call)
        self._replaced += 1

    def save(self, state: bytes, covered: Sequence[GenerateCall]) -> None:
        """Replace the earlier state and the calls ``covered`` by ``state``."""
        self.saved_first_token_s = self.first_token_s if covered else self.saved_first_token_s
        self.saved_calls += [c.saved() for c in covered]
        self.calls = [call for call in self.calls if not any(call is other for other in covered)]
        self.state = state
        self._replaced += 1

    def restart(self, attempt: int | None = None) -> None:
        """Discard all progress. A new ``attempt`` draws other random numbers."""
        self.state, self.saved_calls, self.saved_first_token_s, self.calls = None, [], None, []
        self.attempt = self.attempt if attempt is None else attempt
        self._replaced += 1


def pack(uid: str, samples: Sequence[PartialSample], since: Sequence[Position] | None = None) -> bytes:
    """One part of a group's snapshot, in one buffer: what its samples have in addition to their positions ``since``, or
    all that they have (None). Columns, for ``S`` changed samples, ``C`` calls, ``T`` tokens, ``V`` spans:

    =============  =======  =======  ===================================================================================
    column         dtype    shape    meaning
    =============  =======  =======  ===================================================================================
    ``samples``    int64    [S, 7]   index in the group, 1 if nothing of earlier parts is kept, calls before these,
                                     calls, saved_calls, attempt, bytes of state
    ``states``     uint8    [B]      of all samples
    ``contexts``   uint64   [K + C]  of the saved_calls of all samples, then of the calls
    ``limits``     uint64   [C]      of the calls
    ``results``    uint64   [K]      of the saved_calls
    ``saved``      int64    [K, 3]   start, ordinal, tokens
    ``calls``      int64    [C, 5]   start, ordinal, finish, tokens, spans
    ``tokens``     int32    [T]
    ``logprobs``   float32  [T]
    ``spans``      int64    [V, 5]   start, lineage, number, mixed_kv, index in the part's list of replicas
    =============  =======  =======  ===================================================================================
    """
    rows: list[tuple[int, ...]] = []
    states: list[bytes] = []
    saved: list[SavedCall] = []
    news: list[_News] = []
    for index, sample in enumerate(samples):
        before, now = since[index] if since is not None else _NOWHERE, sample.position
        if before == now:
            continue
        whole = before.replaced != now.replaced
        if whole:
            before = _NOWHERE
        state = sample.state if whole else None
        covered = sample.saved_calls if whole else []
        state_bytes = _NONE if state is None else len(state)
        position = index, whole, before.finished, len(sample.calls) - before.finished
        rows.append((*position, len(covered), sample.attempt, state_bytes))
        states.append(state or b"")
        saved += covered
        for number, call in enumerate(sample.calls[before.finished :], before.finished):
            tokens, spans_before, _ = before.of(number)
            news.append(_News(call, call.output.count - tokens, call.output.spans[spans_before:]))
    spans = [span for new in news for span in new.spans]
    replicas = sorted({span.replica for span in spans})
    return _SNAPSHOT.to_bytes(
        {"uid": uid, "replicas": replicas},
        {
            "samples": _table(rows, 7),
            "states": np.frombuffer(b"".join(states), np.uint8),
            "contexts": np.array([*(c.context for c in saved), *(n.call.context for n in news)], np.uint64),
            "limits": np.array([n.call.limits for n in news], np.uint64),
            "results": np.array([c.result for c in saved], np.uint64),
            "saved": _table([call[2:] for call in saved], 3),
            "calls": _table([(n.call.start, n.call.ordinal, _finish(n.call), n.tokens, len(n.spans)) for n in news], 5),
            "tokens": _joined([part for n in news for part in _last(n.call.output.tokens, n.tokens)], np.int32),
            "logprobs": _joined([part for n in news for part in _last(n.call.output.logprobs, n.tokens)], np.float32),
            "spans": _table([(x.start, *x.version, x.mixed_kv, replicas.index(x.replica)) for x in spans], 5),
        },
    )


def unpack(parts: Sequence[Buffer]) -> list[PartialSample]:
    """The samples of a snapshot, from all its parts; their tokens are views into these. Raises ValueError for a buffer
    that is not part of a snapshot or is truncated."""
    samples: dict[int, PartialSample] = {}
    for data in parts:
        _unpack_part(data, samples)
    return [samples[index] for index in range(len(samples))]


def _unpack_part(data: Buffer, samples: dict[int, PartialSample]) -> None:
    meta, columns = _SNAPSHOT.from_buffer(data)
    contexts, results = columns["contexts"].tolist(), columns["results"].tolist()
    saved = [SavedCall(*keys, *rest) for *keys, rest in zip(contexts, results, columns["saved"].tolist())]
    calls = zip(contexts[len(saved) :], columns["limits"].tolist(), columns["calls"].tolist(), strict=True)
    states, spans = columns["states"].tobytes(), columns["spans"].tolist()
    state_at = token_at = span_at = saved_at = 0
    for index, whole, first, count, saved_calls, attempt, state_bytes in columns["samples"].tolist():
        if whole:
            samples[index] = PartialSample(None, saved[saved_at : saved_at + saved_calls], attempt=attempt)
            saved_at += saved_calls
        sample = samples[index]
        if state_bytes != _NONE:
            sample.state = states[state_at : state_at + state_bytes]
            state_at += state_bytes
        for number in range(first, first + count):
            context, limits, (start, ordinal, finish, tokens, span_count) = next(calls)
            if number == len(sample.calls):
                sample.calls.append(GenerateCall(context, start, ordinal, limits, GeneratedTokens()))
            call = sample.calls[number]
            output = call.output
            output.spans += [
                VersionSpan(start, PolicyVersion(lineage, number), bool(mixed), meta["replicas"][replica])
                for start, lineage, number, mixed, replica in spans[span_at : span_at + span_count]
            ]
            if tokens:
                output.first_version = output.first_version or output.spans[0].version
                output.tokens.append(columns["tokens"][token_at : token_at + tokens])
                output.logprobs.append(columns["logprobs"][token_at : token_at + tokens])
            output.count += tokens
            call.finish = None if finish == _NONE else FinishReason(finish)
            token_at, span_at = token_at + tokens, span_at + span_count


def _finish(call: GenerateCall) -> int:
    return _NONE if call.finish is None else call.finish


class _News(NamedTuple):
    """What a part adds to a call."""

    call: GenerateCall
    tokens: int
    spans: Sequence[VersionSpan]


def _last(parts: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """The last ``count`` elements of the concatenated parts."""
    found: list[np.ndarray] = []
    for part in reversed(parts):
        if count <= 0:
            break
        found.append(part[-count:])
        count -= len(part)
    return found[::-1]


def _table(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, width)


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
