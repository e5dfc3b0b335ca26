"""Spans on disk, in bounded space: who did what when, for the report's timeline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncrl.reporting.jsonl import LineFile, is_number, json_number, read_lines
from asyncrl.telemetry.recorder import Batch, Span, now_s

SPANS_FILE = "spans.jsonl"
PREVIOUS_SPANS_FILE = "spans.previous.jsonl"


def merge_short(spans: Iterable[Span], short_s: float, gap_s: float) -> list[tuple[Span, int]]:
    """Join neighbours of one (actor, name) that are short and close, such as decode steps; returns (span, how many).

    Two join if both pieces take less than ``short_s`` and at most ``gap_s`` lies between them, so a long span (a train
    step) keeps its edges. A joined span has no args. Sorted by start."""
    merged: list[tuple[Span, int]] = []
    last: dict[tuple[str, str], int] = {}  # (actor, name) → where its latest span is in `merged`
    latest_s: dict[tuple[str, str], float] = {}  # (actor, name) → seconds of the latest piece
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


class Timeline:
    """A sink that writes one line per span to spans.jsonl: ``{"actor", "name", "start", "end"}`` in Unix seconds, with
    ``count`` where short ones were joined and ``args`` where there are any.

    At half of ``max_bytes`` the file becomes spans.previous.jsonl and a new one begins, whose first line says what was
    let go: the end of a run can always be seen, however long the run was.
    """

    def __init__(
        self, run_dir: Path | str, max_bytes: int = 64 * 1024 * 1024, short_s: float = 0.05, gap_s: float = 0.01
    ) -> None:
        self._path = Path(run_dir) / SPANS_FILE
        self._lines = LineFile(self._path)
        self._max_bytes = max_bytes
        self._short_s, self._gap_s = short_s, gap_s
        self._to_unix_s = time.time() - now_s()
        self._open: dict[str, list[Span]] = {}

    def spans(self, batch: Batch) -> None:
        self._open[batch.actor] = batch.open_spans
        self._write(batch.spans)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        pass

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        """Spans that are still open are written as they were last seen, marked ``open``."""
        self._write((span for spans in self._open.values() for span in spans), {"open": True})
        self._lines.close()

    def _write(self, spans: Iterable[Span], marks: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._lines.write(
            self._row(span, count) | dict(marks) for span, count in merge_short(spans, self._short_s, self._gap_s)
        )
        if self._lines.nbytes >= self._max_bytes // 2:
            self._lines.close()
            previous = self._path.with_name(PREVIOUS_SPANS_FILE)
            lost = previous.exists()
            self._path.replace(previous)
            self._lines = LineFile(self._path)
            if lost:
                self._lines.write([{"note": f"older spans were let go: the timeline keeps {self._max_bytes} bytes"}])

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
    """The rows that a `Timeline` kept, oldest file first, notes left out."""
    rows = [row for name in (PREVIOUS_SPANS_FILE, SPANS_FILE) for row in read_lines(Path(run_dir) / name)]
    return [row for row in rows if {"actor", "name", "start", "end"} <= row.keys()]
