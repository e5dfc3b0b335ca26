"""Recorder of a process's spans, counters and gauges, drained in batches by the driver.

Every process records into one `Recorder`. The driver calls ``drain()`` on each actor about every two seconds, a single
call that doubles as the liveness check, and passes the `Batch` to its sinks. Actors push nothing::

    recorder = Recorder("trainer/0")
    with recorder.span("forward", tokens=4096):
        ...
    recorder.count("rollout/tokens", 17)          # sum since the last drain
    recorder.gauge("queue/depth", 3)              # last value
    batch = recorder.drain()

Times are seconds of the machine's monotonic clock, which all its processes share; `Batch.shifted` puts those of another
machine on the driver's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from asyncrl.observability.telemetry.clock import now_s

MAX_FAILURES = 4  # failed samples kept between two drains
MAX_PROFILED = 32  # groups whose shape is kept between two drains


class Span(NamedTuple):
    """Named interval of time on ``actor``."""

    actor: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]


class Failure(NamedTuple):
    """A sample that failed, for people to read. ``sampled``: tokens and text of each call for it, or of each of its
    sequences if it failed later."""

    uid: str
    prompt_id: str
    data_source: str
    epoch: int
    sample: int
    prompt: str
    failure: str
    error: str
    sampled: list[tuple[int, str]]


@dataclass
class Batch:
    """Recordings of one process since its last drain, at ``at_s`` of its clock. Open spans end at that time and appear
    again, longer, in later batches, so that a pause in progress never reads as zero. An empty one at 0 says that the
    process has not answered."""

    actor: str
    spans: list[Span] = field(default_factory=list)
    open_spans: list[Span] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    profiled: list[Any] = field(default_factory=list)
    at_s: float = 0.0

    def shifted(self, by_s: float) -> Batch:
        """The same with all times later by ``by_s``."""

        def later(spans: list[Span]) -> list[Span]:
            return [span._replace(start_s=span.start_s + by_s, end_s=span.end_s + by_s) for span in spans]

        return replace(self, spans=later(self.spans), open_spans=later(self.open_spans), at_s=self.at_s + by_s)


class Recorder:
    """Thread-safe; a span costs about a microsecond. Keeps at most ``max_spans`` between two drains: the oldest are
    dropped first and counted as ``telemetry/spans_lost``."""

    def __init__(self, actor: str, max_spans: int = 100_000) -> None:
        self.actor = actor
        self._max_spans = max_spans
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._open: dict[int, tuple[str, float, dict[str, Any]]] = {}
        self._next = 0
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._failures: list[Failure] = []
        self._profiled: list[Any] = []

    def begin(self, name: str, **args: Any) -> int:
        """Starts a span that ends elsewhere; returns the token for `end`."""
        with self._lock:
            self._next += 1
            self._open[self._next] = (name, now_s(), args)
            return self._next

    def end(self, token: int) -> float:
        """Ends a span begun with `begin`; returns its seconds."""
        end_s = now_s()
        with self._lock:
            name, start_s, args = self._open.pop(token)
            self._append(Span(self.actor, name, start_s, end_s, args))
        return end_s - start_s

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Records a block as a span; yields the span's args, which the block may extend."""
        token = self.begin(name, **args)
        try:
            yield self._open[token][2]
        finally:
            self.end(token)

    def add_span(self, name: str, start_s: float, end_s: float, **args: Any) -> None:
        with self._lock:
            self._append(Span(self.actor, name, start_s, end_s, args))

    def count(self, name: str, value: float = 1) -> None:
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + value

    def gauge(self, name: str, value: float) -> None:
        with self._lock:
            self._gauges[name] = value

    @property
    def wants_failures(self) -> bool:
        """False once `MAX_FAILURES` came since the last drain: many fail alike, and counters count them all."""
        return len(self._failures) < MAX_FAILURES

    def failed(self, failure: Failure) -> None:
        with self._lock:
            self._failures.append(failure)

    def profiled(self, group: Any) -> None:
        """Keep a finished group's shape for the run's profile, as a JSON value; those after `MAX_PROFILED` are left
        out."""
        with self._lock:
            if len(self._profiled) < MAX_PROFILED:
                self._profiled.append(group)

    def drain(self) -> Batch:
        at = now_s()
        with self._lock:
            still_open = [Span(self.actor, name, start, at, args) for name, start, args in self._open.values()]
            batch = Batch(
                self.actor,
                self._spans,
                still_open,
                self._counters,
                dict(self._gauges),
                self._failures,
                self._profiled,
                at,
            )
            self._spans, self._counters, self._failures, self._profiled = [], {}, [], []
        return batch

    def _append(self, span: Span) -> None:
        self._spans.append(span)
        if len(self._spans) > self._max_spans:
            del self._spans[: self._max_spans // 10]
            self._counters["telemetry/spans_lost"] = (
                self._counters.get("telemetry/spans_lost", 0) + self._max_spans // 10
            )
