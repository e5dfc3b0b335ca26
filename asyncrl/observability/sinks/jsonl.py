"""Append-only JSON lines in the run folder, and the sink that writes metrics.jsonl.

A process that is killed leaves at most one incomplete last line: `JsonlFile` starts a new line after it, and
`read_jsonl` skips it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.observability.number_format import json_numbers
from asyncrl.observability.sinks.base import Sink, SinkSpec
from asyncrl.observability.telemetry.clock import unix_s

METRICS_FILE = "metrics.jsonl"


class JsonlFile:
    """File of one JSON object per line, flushed after every `write`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self.nbytes = self._file.seek(0, 2)
        if self.nbytes:
            self._file.seek(-1, 2)
            if self._file.read(1) != b"\n":
                self.nbytes += self._file.write(b"\n")

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raises ValueError for values that JSON cannot represent, NaN included: see `json_number`."""
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n" for row in rows]
        if lines:
            # A lone surrogate (half an emoji, decoded from a truncated response) is invalid UTF-8.
            self.nbytes += self._file.write("".join(lines).encode("utf-8", errors="replace"))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON lines file, which may be missing, incomplete, or still being written.

    Lines without a JSON object, such as a crash leaves, are skipped."""
    if not path.exists():
        return []
    rows = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


class JsonlSink(Sink):
    """Appends ``{"step": …, "time": Unix seconds, name: number, …}`` to metrics.jsonl, one object per `metrics` call.

    Values other than numbers are dropped. A resumed run appends; if a step repeats, the later line counts."""

    def __init__(self, run_dir: Path | str) -> None:
        self._lines = JsonlFile(Path(run_dir) / METRICS_FILE)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        self._lines.write([{"step": int(step), "time": round(unix_s(), 3)} | json_numbers(values)])

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        self._lines.close()


SINK = SinkSpec(open=lambda config, run_dir: JsonlSink(run_dir), enabled=lambda config: True)
