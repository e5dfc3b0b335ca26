"""Partial samples: all progress of a sample in flight, so that it can resume on another replica or in another process.

A partial sample holds the state that its agent loop saved last and the calls of ``generate`` made since. A snapshot
stores both. When the loop runs again, those calls are replayed, see `asyncrl.rollouter.replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.observability.telemetry.recorder import now_s
from asyncrl.rollouter.agents.base import Completion
from asyncrl.types.columns import Buffer, Layout
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion, VersionSpan

_SNAPSHOT = Layout("snapshot", b"ARLP")
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

    def add(self, tokens: np.ndarray, logprobs: np.ndarray, version: PolicyVersion, mixed_kv: bool) -> None:
        """Append int32 [C] tokens and float32 [C] logprobs, sampled under ``version``."""
        span = VersionSpan(self.count, version, mixed_kv)
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
    _changes: int = 0  # other than generated tokens

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
    def started(self) -> bool:
        return self.state is not None or self.token_count > 0

    @property
    def revision(self) -> tuple[int, int]:
        """Differs between two moments if their snapshots would differ."""
        return self._changes, self.token_count

    def begin(self, arguments: int) -> GenerateCall:
        self.calls.append(GenerateCall(arguments, GeneratedTokens(self.first_version, self.first_token_s)))
        self._changes += 1
        return self.calls[-1]

    def finish(self, call: GenerateCall, reason: FinishReason) -> None:
        call.finish = reason
        self._changes += 1

    def discard(self, call: GenerateCall) -> None:
        """Remove a call that was cancelled or failed; the loop may call again."""
        self.calls.remove(call)
        self._changes += 1

    def save(self, state: bytes, calls: int) -> None:
        """Replace the earlier state and the first ``calls`` calls by ``state``."""
        covered, self.calls = self.calls[:calls], self.calls[calls:]
        if covered:
            first = covered[-1].output
            self.saved_version, self.saved_first_token_s = first.first_version, first.first_token_s
        self.saved_tokens += sum(call.output.count for call in covered)
        self.state = state
        self._changes += 1

    def restart(self, attempt: int | None = None) -> None:
        """Discard all progress. A new ``attempt`` draws other random numbers."""
        self.state, self.saved_tokens, self.saved_version, self.saved_first_token_s = None, 0, None, None
        self.calls = []
        self.attempt = self.attempt if attempt is None else attempt
        self._changes += 1


def pack(uid: str, samples: Sequence[PartialSample]) -> bytes:
    """Snapshot of a group's samples in one buffer. Columns, for ``S`` samples, ``C`` calls, ``T`` tokens, ``V`` spans:

    =============  =======  =======  ===================================================================================
    column         dtype    shape    meaning
    =============  =======  =======  ===================================================================================
    ``samples``    int64    [S, 6]   calls, saved_tokens, saved_version's lineage and number, attempt, bytes of state
    ``states``     uint8    [B]      of all samples
    ``arguments``  uint64   [C]
    ``calls``      int64    [C, 3]   finish, tokens, spans
    ``tokens``     int32    [T]
    ``logprobs``   float32  [T]
    ``spans``      int64    [V, 4]   start, lineage, number, mixed_kv
    =============  =======  =======  ===================================================================================
    """
    calls = [call for s in samples for call in s.calls]
    return _SNAPSHOT.to_bytes(
        {"uid": uid},
        {
            "samples": _table([_sample_row(s) for s in samples], 6),
            "states": np.frombuffer(b"".join(s.state or b"" for s in samples), np.uint8),
            "arguments": np.array([call.arguments for call in calls], np.uint64),
            "calls": _table(
                [(_NONE if c.finish is None else c.finish, c.output.count, len(c.output.spans)) for c in calls], 3
            ),
            "tokens": _joined([part for c in calls for part in c.output.tokens], np.int32),
            "logprobs": _joined([part for c in calls for part in c.output.logprobs], np.float32),
            "spans": _table([(x.start, *x.version, x.mixed_kv) for c in calls for x in c.output.spans], 4),
        },
    )


def unpack(data: Buffer) -> list[PartialSample]:
    """The samples of a snapshot; their tokens are views into ``data``. Raises ValueError for a buffer that is not a
    snapshot or is truncated."""
    _, columns = _SNAPSHOT.from_buffer(data)
    calls = zip(columns["arguments"].tolist(), columns["calls"].tolist(), strict=True)
    states, spans = columns["states"].tobytes(), columns["spans"].tolist()
    state_at = token_at = span_at = 0
    samples: list[PartialSample] = []
    for count, saved_tokens, lineage, number, attempt, state_bytes in columns["samples"].tolist():
        version = None if lineage == _NONE else PolicyVersion(lineage, number)
        sample = PartialSample(None, saved_tokens, version, attempt=attempt)
        if state_bytes != _NONE:
            sample.state = states[state_at : state_at + state_bytes]
            state_at += state_bytes
        for _ in range(count):
            arguments, (finish, tokens, span_count) = next(calls)
            call = sample.begin(arguments)
            output = call.output
            output.spans = [
                VersionSpan(start, PolicyVersion(lineage, number), bool(mixed))
                for start, lineage, number, mixed in spans[span_at : span_at + span_count]
            ]
            if tokens:
                output.first_version = output.first_version or output.spans[0].version
                output.tokens = [columns["tokens"][token_at : token_at + tokens]]
                output.logprobs = [columns["logprobs"][token_at : token_at + tokens]]
            output.count = tokens
            call.finish = None if finish == _NONE else FinishReason(finish)
            token_at, span_at = token_at + tokens, span_at + span_count
        samples.append(sample)
    return samples


def _sample_row(sample: PartialSample) -> tuple[int, ...]:
    version = sample.saved_version or PolicyVersion(_NONE, _NONE)
    state_bytes = _NONE if sample.state is None else len(sample.state)
    return len(sample.calls), sample.saved_tokens, *version, sample.attempt, state_bytes


def _table(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, width)


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
