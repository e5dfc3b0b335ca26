"""Spans, counters and gauges of one process, drained in batches by the driver.

Every process records into one `Recorder`; the driver calls ``drain()`` on each actor about once a second (one call for
everything, which is also a sign of life) and hands the `Batch` to its sinks. Nothing is sent while work is going on::

    recorder = Recorder("trainer/0")
    with recorder.span("forward", tokens=4096):
        ...
    recorder.count("rollout/tokens", 17)          # summed since the last drain
    recorder.gauge("queue/depth", 3)              # the last value
    batch = recorder.drain()

Times are seconds of the node's monotonic clock, shared by all its processes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

now_s = time.monotonic


class Span(NamedTuple):
    """Something that took time: from ``start_s`` to ``end_s`` on ``actor``."""

    actor: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]


@dataclass
class Batch:
    """What one process recorded since it was last drained. Open spans come with their time up to now, and again,
    longer, in later batches: a pause in progress never reads as zero."""

    actor: str
    spans: list[Span] = field(default_factory=list)
    open_spans: list[Span] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


class Sink(Protocol):
    """Where metrics go: console, JSONL, wandb, the report. `Sink`s are called from one thread, in order.

    ``close`` says how the run ended: ``failed`` what broke it, else ``stopped`` what ended it before its last step (a
    signal, the end of the prompts); both None: it went to its end."""

    def metrics(self, step: int, values: Mapping[str, Any]) -> None: ...
    def spans(self, batch: Batch) -> None: ...
    def close(self, failed: str | None, stopped: str | None = None) -> None: ...


class Recorder:
    """Thread-safe and cheap: a span costs about a microsecond. Keeps at most ``max_spans`` between two drains (the
    oldest go first, counted as ``telemetry/spans_lost``)."""

    def __init__(self, actor: str, max_spans: int = 100_000) -> None:
        self.actor = actor
        self._max_spans = max_spans
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._open: dict[int, tuple[str, float, dict[str, Any]]] = {}
        self._next = 0
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}

    def begin(self, name: str, **args: Any) -> int:
        """Start a span that ends elsewhere; give what is returned to `end`."""
        with self._lock:
            self._next += 1
            self._open[self._next] = (name, now_s(), args)
            return self._next

    def end(self, token: int) -> float:
        """End a span begun with `begin`; returns its seconds."""
        end_s = now_s()
        with self._lock:
            name, start_s, args = self._open.pop(token)
            self._append(Span(self.actor, name, start_s, end_s, args))
        return end_s - start_s

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Record the time of a block; the dict it yields may be filled with arguments meanwhile."""
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

    def drain(self) -> Batch:
        at = now_s()
        with self._lock:
            still_open = [Span(self.actor, name, start, at, args) for name, start, args in self._open.values()]
            batch = Batch(self.actor, self._spans, still_open, self._counters, dict(self._gauges))
            self._spans, self._counters = [], {}
        return batch

    def _append(self, span: Span) -> None:
        self._spans.append(span)
        if len(self._spans) > self._max_spans:
            del self._spans[: self._max_spans // 10]
            self._counters["telemetry/spans_lost"] = (
                self._counters.get("telemetry/spans_lost", 0) + self._max_spans // 10
            )
