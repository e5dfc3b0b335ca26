"""A sample under way: all that it has so far, so that it can go on on another replica or in another process.

The agent loop's calls of generate are recorded since it saved its state last. Its snapshot is that state and that
record: whoever calls the loop again answers from the record what it had asked, see `RecordedGenerate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.rollouter.agent_loops.base import Completion
from asyncrl.sample import Buffer, FinishReason, Layout, PolicyVersion, VersionSpan
from asyncrl.telemetry.recorder import now_s

_SNAPSHOT = Layout("snapshot", b"ARLP")
_NONE = -1  # in place of a finish reason, a version's lineage or a state's length


@dataclass(eq=False)
class Drawn:
    """What a call of generate has given so far. The router adds to it, whoever holds it sees it grow.

    ``version`` and ``began_s`` are those of the sample's first token, be it of this call or of an earlier one."""

    version: PolicyVersion | None = None
    began_s: float | None = None
    count: int = 0
    tokens: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def add(self, tokens: np.ndarray, logprobs: np.ndarray, version: PolicyVersion, mixed_kv: bool) -> None:
        """int32 [C] and float32 [C], drawn under ``version``."""
        span = VersionSpan(self.count, version, mixed_kv)
        if not self.spans or self.spans[-1][1:] != span[1:]:
            self.spans.append(span)
        if self.version is None:
            self.version = version
        if self.began_s is None:
            self.began_s = now_s()
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self.count += len(tokens)

    def completion(self, finish: FinishReason) -> Completion:
        self.tokens, self.logprobs = [_joined(self.tokens, np.int32)], [_joined(self.logprobs, np.float32)]
        return Completion(self.tokens[0], self.logprobs[0], list(self.spans), finish)


@dataclass(eq=False)
class Call:
    """A call of generate: a digest (64 bits) of what it ``asked``, and its end, None while it is under way."""

    asked: int
    drawn: Drawn
    finish: FinishReason | None = None


@dataclass(eq=False)
class PartialSample:
    """``state``: saved last by the agent loop. ``calls``: since then. ``drawn_before``: tokens drawn until then, and
    ``version`` and ``began_s`` those of the sample's first token if it is one of these."""

    state: bytes | None = None
    drawn_before: int = 0
    version: PolicyVersion | None = None
    began_s: float | None = None
    calls: list[Call] = field(default_factory=list)
    requests: int = 0  # made by this process: what they are named by
    changes: int = 0  # beside drawn tokens

    @property
    def drawn(self) -> int:
        """Tokens drawn so far, over all calls."""
        return self.drawn_before + sum(call.drawn.count for call in self.calls)

    @property
    def first_token_s(self) -> float | None:
        """When it came, in this process, in seconds of the node's clock."""
        return self.calls[-1].drawn.began_s if self.calls else self.began_s

    @property
    def begun(self) -> bool:
        return self.state is not None or self.drawn > 0

    @property
    def news(self) -> tuple[int, int]:
        """Another value whenever a snapshot would be another one."""
        return self.changes, self.drawn

    def begin(self, asked: int) -> Call:
        last = self.calls[-1].drawn if self.calls else self
        self.calls.append(Call(asked, Drawn(last.version, last.began_s)))
        self.changes += 1
        return self.calls[-1]

    def finish(self, call: Call, reason: FinishReason) -> None:
        call.finish = reason
        self.changes += 1

    def forget(self, call: Call) -> None:
        """It was broken off: the loop may ask again, or end."""
        self.calls.remove(call)
        self.changes += 1

    def save(self, state: bytes, calls: int) -> None:
        """``state`` stands for all before it and the first ``calls`` calls."""
        covered, self.calls = self.calls[:calls], self.calls[calls:]
        if covered:
            self.version, self.began_s = covered[-1].drawn.version, covered[-1].drawn.began_s
        self.drawn_before += sum(call.drawn.count for call in covered)
        self.state = state
        self.changes += 1

    def restart(self) -> None:
        self.state, self.drawn_before, self.version, self.began_s, self.calls = None, 0, None, None, []
        self.changes += 1


def pack(uid: str, samples: Sequence[PartialSample]) -> bytes:
    """A snapshot of a group's samples, one buffer. Columns, of ``S`` samples, ``C`` calls, ``T`` tokens, ``V`` spans:

    ============  =======  =======  ==================================================================
    column        dtype    shape    meaning
    ============  =======  =======  ==================================================================
    ``samples``   int64    [S, 5]   calls, drawn_before, lineage and number of ``version``, bytes of state
    ``states``    uint8    [B]      of all samples
    ``asked``     uint64   [C]
    ``calls``     int64    [C, 3]   finish, tokens, spans
    ``tokens``    int32    [T]
    ``logprobs``  float32  [T]
    ``spans``     int64    [V, 4]   start, lineage, number, mixed_kv
    ============  =======  =======  ==================================================================
    """
    calls = [call for s in samples for call in s.calls]
    none = PolicyVersion(_NONE, _NONE)
    return _SNAPSHOT.to_bytes(
        {"uid": uid},
        {
            "samples": _table(
                [
                    (len(s.calls), s.drawn_before, *(s.version or none), _NONE if s.state is None else len(s.state))
                    for s in samples
                ],
                5,
            ),
            "states": np.frombuffer(b"".join(s.state or b"" for s in samples), np.uint8),
            "asked": np.array([call.asked for call in calls], np.uint64),
            "calls": _table(
                [(_NONE if c.finish is None else c.finish, c.drawn.count, len(c.drawn.spans)) for c in calls], 3
            ),
            "tokens": _joined([part for c in calls for part in c.drawn.tokens], np.int32),
            "logprobs": _joined([part for c in calls for part in c.drawn.logprobs], np.float32),
            "spans": _table([(x.start, *x.version, x.mixed_kv) for c in calls for x in c.drawn.spans], 4),
        },
    )


def unpack(data: Buffer) -> list[PartialSample]:
    """The samples of a snapshot; their tokens are views into ``data``. Raises ValueError if it is none or cut short."""
    _, columns = _SNAPSHOT.from_buffer(data)
    calls = zip(columns["asked"].tolist(), columns["calls"].tolist(), strict=True)
    states, spans = columns["states"].tobytes(), columns["spans"].tolist()
    state_at = token_at = span_at = 0
    samples: list[PartialSample] = []
    for count, drawn_before, lineage, number, state_bytes in columns["samples"].tolist():
        sample = PartialSample(None, drawn_before, None if lineage == _NONE else PolicyVersion(lineage, number))
        if state_bytes != _NONE:
            sample.state = states[state_at : state_at + state_bytes]
            state_at += state_bytes
        for _ in range(count):
            asked, (finish, tokens, span_count) = next(calls)
            call = sample.begin(asked)
            drawn = call.drawn
            drawn.spans = [
                VersionSpan(start, PolicyVersion(lineage, number), bool(mixed))
                for start, lineage, number, mixed in spans[span_at : span_at + span_count]
            ]
            if tokens:
                drawn.version = drawn.version or drawn.spans[0].version
                drawn.tokens = [columns["tokens"][token_at : token_at + tokens]]
                drawn.logprobs = [columns["logprobs"][token_at : token_at + tokens]]
            drawn.count = tokens
            call.finish = None if finish == _NONE else FinishReason(finish)
            token_at, span_at = token_at + tokens, span_at + span_count
        samples.append(sample)
    return samples


def _table(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, width)


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
