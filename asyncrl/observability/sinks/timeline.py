"""Spans in the run folder, bounded in size, for the report's timeline and the trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncrl.observability.number_format import is_number, json_number
from asyncrl.observability.sinks.base import Sink, SinkSpec
from asyncrl.observability.sinks.jsonl import JsonlFile, read_jsonl
from asyncrl.observability.telemetry.clock import now_s, unix_s
from asyncrl.observability.telemetry.recorder import Batch, Span

SPANS_FILE = "spans.jsonl"
PREVIOUS_SPANS_FILE = "spans.previous.jsonl"


def merge_short(spans: Iterable[Span], short_s: float, gap_s: float) -> list[tuple[Span, int]]:
    """Joins short, close spans of one (actor, name), such as decode steps; returns (span, number of spans joined).

    Two spans join if both take less than ``short_s`` and at most ``gap_s`` lies between them, so long spans such as
    train steps keep their edges. A joined span has no args. Sorted by start."""
    merged: list[tuple[Span, int]] = []
    last: dict[tuple[str, str], int] = {}  # (actor, name) → index of its latest span in `merged`
    latest_s: dict[tuple[str, str], float] = {}  # (actor, name) → duration of its latest piece
    for span in sorted(spans, key=lambda span: span.start_s):
        key, seconds = (span.actor, span.name), span.end_s - span.start_s
        if key in last:
            before, count = merged[last[key]]
            if latest_s[key] < short_s and seconds < short_s and span.start_s - before.end_s <= gap_s:
                joined = before._replace(end_s=max(before.end_s, span.end_s), args={})
                merged[last[key]] = (joined, count + 1)
                latest_s[key] = seconds
                continue
        last[key], latest_s[key] = len(merged), seconds
        merged.append((span, 1))
    return merged


class TimelineSink(Sink):
    """Writes one line per span to spans.jsonl: ``{"actor", "name", "start", "end"}`` in Unix seconds, with ``count``
    for joined spans and ``args`` if there are any.

    At half of ``max_bytes`` the file becomes spans.previous.jsonl, replacing the previous one, and a new file begins,
    so that the end of the run is kept. If that deleted spans, the new file's first line says so.
    """

    def __init__(
        self, run_dir: Path | str, max_bytes: int = 64 * 1024 * 1024, short_s: float = 0.05, gap_s: float = 0.01
    ) -> None:
        self._path = Path(run_dir) / SPANS_FILE
        self._lines = JsonlFile(self._path)
        self._max_bytes = max_bytes
        self._short_s, self._gap_s = short_s, gap_s
        self._to_unix_s = unix_s() - now_s()
        self._open: dict[str, list[Span]] = {}

    def spans(self, batch: Batch) -> None:
        self._open[batch.actor] = batch.open_spans
        self._write(batch.spans)

    def left(self, actor: str) -> None:
        self._write(self._open.pop(actor, ()), {"open": True})

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        """Writes spans that are still open, with their duration at the last drain and marked ``open``."""
        self._write((span for spans in self._open.values() for span in spans), {"open": True})
        self._lines.close()

    def _write(self, spans: Iterable[Span], marks: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._lines.write(
            self._row(span, count) | dict(marks) for span, count in merge_short(spans, self._short_s, self._gap_s)
        )
        if self._lines.nbytes >= self._max_bytes // 2:
            self._lines.close()
            previous = self._path.with_name(PREVIOUS_SPANS_FILE)
            deletes = previous.exists()
            self._path.replace(previous)
            self._lines = JsonlFile(self._path)
            if deletes:
                self._lines.write([{"note": f"older spans were deleted: the timeline keeps {self._max_bytes} bytes"}])

    def _row(self, span: Span, count: int) -> dict[str, Any]:
        row: dict[str, Any] = {
            "actor": span.actor,
            "name": span.name,
            "start": round(span.start_s + self._to_unix_s, 6),
            "end": round(span.end_s + self._to_unix_s, 6),
        }
        if count > 1:
            row["count"] = count
        if span.args:
            row["args"] = {k: json_number(v) if is_number(v) else str(v) for k, v in span.args.items()}
        return row


def read_spans(run_dir: Path | str) -> list[dict[str, Any]]:
    """Rows of the spans in a run folder, older file first, without notes."""
    rows = [row for name in (PREVIOUS_SPANS_FILE, SPANS_FILE) for row in read_jsonl(Path(run_dir) / name)]
    return [row for row in rows if {"actor", "name", "start", "end"} <= row.keys()]


SINK = SinkSpec(open=lambda config, run_dir: TimelineSink(run_dir), enabled=lambda config: True)
