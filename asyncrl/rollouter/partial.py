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

from asyncrl.observability.telemetry.recorder import now_s
from asyncrl.rollouter.agents.base import Completion
from asyncrl.types.columns import Buffer, Layout
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion, VersionSpan

_SNAPSHOT = Layout("snapshot", b"ARLP")
_TOKEN_BYTES = 8  # with its logprob
_NONE = -1  # stands for a missing finish reason, lineage of a version, or length of a state


@dataclass(eq=False)
class GeneratedTokens:
    """Tokens that a call of ``generate`` has produced so far; the router appends.

    ``first_version`` and ``first_token_s`` (seconds of the node's clock) are those of the sample's first token, of this
    call or an earlier one; None before it."""

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
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self.count += len(tokens)

    @property
    def last_token(self) -> int | None:
        """None before the first token."""
        return next((int(part[-1]) for part in reversed(self.tokens) if len(part)), None)

    def completion(self, finish: FinishReason) -> Completion:
        self.tokens, self.logprobs = [_joined(self.tokens, np.int32)], [_joined(self.logprobs, np.float32)]
        return Completion(self.tokens[0], self.logprobs[0], list(self.spans), finish)


@dataclass(eq=False)
class GenerateCall:
    """One call of ``generate``: a 64-bit digest of its arguments, its output, and None or why it finished."""

    arguments: int
    output: GeneratedTokens
    finish: FinishReason | None = None


class Position(NamedTuple):
    """How far a sample is: all that it had at this position it still has, unless ``replaced`` differs.

    ``replaced`` counts the changes other than additions. ``tokens``, ``spans`` and ``finished`` are those of the last
    of its ``calls``."""

    replaced: int
    calls: int
    tokens: int
    spans: int
    finished: bool


_NOWHERE = Position(_NONE, 0, 0, 0, finished=False)  # of a sample that no part has


@dataclass(eq=False)
class PartialSample:
    """``state`` is what the agent loop saved last, ``calls`` what it called since.

    ``saved_tokens`` counts the tokens generated before ``state`` was saved; ``saved_version`` and
    ``saved_first_token_s`` are those of the sample's first token if it is among them. ``attempt`` counts how often the
    queue refused the group."""

    state: bytes | None = None
    saved_tokens: int = 0
    saved_version: PolicyVersion | None = None
    saved_first_token_s: float | None = None
    calls: list[GenerateCall] = field(default_factory=list)
    attempt: int = 0
    requests: int = 0  # made by this process; numbers the requests' ids
    _replaced: int = 0

    @property
    def token_count(self) -> int:
        """Tokens generated so far, over all calls."""
        return self.saved_tokens + sum(call.output.count for call in self.calls)

    @property
    def first_version(self) -> PolicyVersion | None:
        return self.calls[-1].output.first_version if self.calls else self.saved_version

    @property
    def first_token_s(self) -> float | None:
        """When this process received the sample's first token, in seconds of the node's clock."""
        return self.calls[-1].output.first_token_s if self.calls else self.saved_first_token_s

    @property
    def size(self) -> int:
        """Bytes of its state and of the tokens since."""
        return len(self.state or b"") + _TOKEN_BYTES * (self.token_count - self.saved_tokens)

    @property
    def started(self) -> bool:
        return self.state is not None or self.token_count > 0

    @property
    def position(self) -> Position:
        """Differs between two moments if their snapshots would differ."""
        if not self.calls:
            return Position(self._replaced, 0, 0, 0, finished=False)
        last = self.calls[-1]
        return Position(
            self._replaced, len(self.calls), last.output.count, len(last.output.spans), last.finish is not None
        )

    def begin(self, arguments: int) -> GenerateCall:
        self.calls.append(GenerateCall(arguments, GeneratedTokens(self.first_version, self.first_token_s)))
        return self.calls[-1]

    def finish(self, call: GenerateCall, reason: FinishReason) -> None:
        call.finish = reason

    def discard(self, call: GenerateCall) -> None:
        """Remove a call that was cancelled or failed; the loop may call again."""
        self.calls.remove(call)
        self._replaced += 1

    def save(self, state: bytes, calls: int) -> None:
        """Replace the earlier state and the first ``calls`` calls by ``state``."""
        covered, self.calls = self.calls[:calls], self.calls[calls:]
        if covered:
            first = covered[-1].output
            self.saved_version, self.saved_first_token_s = first.first_version, first.first_token_s
        self.saved_tokens += sum(call.output.count for call in covered)
        self.state = state
        self._replaced += 1

    def restart(self, attempt: int | None = None) -> None:
        """Discard all progress. A new ``attempt`` draws other random numbers."""
        self.state, self.saved_tokens, self.saved_version, self.saved_first_token_s = None, 0, None, None
        self.calls = []
        self.attempt = self.attempt if attempt is None else attempt
        self._replaced += 1


def pack(uid: str, samples: Sequence[PartialSample], since: Sequence[Position] | None = None) -> bytes:
    """One part of a group's snapshot, in one buffer: what its samples have in addition to their positions ``since``, or
    all that they have (None). Columns, for ``S`` changed samples, ``C`` calls, ``T`` tokens, ``V`` spans:

    =============  =======  =======  ===================================================================================
    column         dtype    shape    meaning
    =============  =======  =======  ===================================================================================
    ``samples``    int64    [S, 9]   index in the group, 1 if nothing of earlier parts is kept, calls before these,
                                     calls, saved_tokens, saved_version's lineage and number, attempt, bytes of state
    ``states``     uint8    [B]      of all samples
    ``arguments``  uint64   [C]
    ``calls``      int64    [C, 3]   finish, tokens, spans
    ``tokens``     int32    [T]
    ``logprobs``   float32  [T]
    ``spans``      int64    [V, 5]   start, lineage, number, mixed_kv, index in the part's list of replicas
    =============  =======  =======  ===================================================================================
    """
    rows: list[tuple[int, ...]] = []
    states: list[bytes] = []
    news: list[_News] = []
    for index, sample in enumerate(samples):
        before, now = since[index] if since is not None else _NOWHERE, sample.position
        if before == now:
            continue
        whole = before.replaced != now.replaced
        if whole:
            before = _NOWHERE
        first = before.calls - (before.calls > 0 and not before.finished)  # a call in progress goes on
        state = sample.state if whole else None
        version = sample.saved_version or PolicyVersion(_NONE, _NONE)
        state_bytes = _NONE if state is None else len(state)
        position = index, whole, first, now.calls - first
        rows.append((*position, sample.saved_tokens, *version, sample.attempt, state_bytes))
        states.append(state or b"")
        for number, call in enumerate(sample.calls[first:], first):
            goes_on = number < before.calls
            tokens = call.output.count - (before.tokens if goes_on else 0)
            news.append(_News(call, tokens, call.output.spans[before.spans if goes_on else 0 :]))
    spans = [span for new in news for span in new.spans]
    replicas = sorted({span.replica for span in spans})
    return _SNAPSHOT.to_bytes(
        {"uid": uid, "replicas": replicas},
        {
            "samples": _table(rows, 9),
            "states": np.frombuffer(b"".join(states), np.uint8),
            "arguments": np.array([new.call.arguments for new in news], np.uint64),
            "calls": _table([(_NONE if (f := n.call.finish) is None else f, n.tokens, len(n.spans)) for n in news], 3),
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
    calls = zip(columns["arguments"].tolist(), columns["calls"].tolist(), strict=True)
    states, spans = columns["states"].tobytes(), columns["spans"].tolist()
    state_at = token_at = span_at = 0
    for index, whole, first, count, saved_tokens, lineage, number, attempt, state_bytes in columns["samples"].tolist():
        if whole:
            version = None if lineage == _NONE else PolicyVersion(lineage, number)
            samples[index] = PartialSample(None, saved_tokens, version, attempt=attempt)
        sample = samples[index]
        if state_bytes != _NONE:
            sample.state = states[state_at : state_at + state_bytes]
            state_at += state_bytes
        for number in range(first, first + count):
            arguments, (finish, tokens, span_count) = next(calls)
            call = sample.calls[number] if number < len(sample.calls) else sample.begin(arguments)
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
