"""Append-only JSON lines in the run folder, and the metrics file that the report is made from.

A process that is killed leaves at most one unfinished last line: `LineFile` starts a new line after it, and
`read_lines` skips it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.telemetry.recorder import Batch

METRICS_FILE = "metrics.jsonl"


class LineFile:
    """A file that takes one JSON object per line and is flushed after every call of `write`."""

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
        """Raises ValueError for a value that is not JSON (NaN among them: see `json_number`)."""
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n" for row in rows]
        if lines:
            # A lone surrogate (half an emoji, decoded from an unfinished response) is no valid UTF-8.
            self.nbytes += self._file.write("".join(lines).encode("utf-8", errors="replace"))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file that may be missing, still be written, or have been cut by a crash.

    Lines that are not a JSON object are skipped: a crash leaves one, and a report without it beats no report."""
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


def is_number(value: Any) -> bool:
    """Python and NumPy numbers and booleans, and arrays or tensors with no dimension."""
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return True
    return getattr(value, "shape", None) == () and hasattr(value, "item")


def json_number(value: Any) -> int | float | None:
    """A plain number; None (JSON's null) for NaN and infinities, which JSON cannot carry."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, (bool, int)):
        return int(plain)
    return float(plain) if math.isfinite(plain) else None


class JsonlSink:
    """Writes ``{"step": …, "time": Unix seconds, name: number, …}`` to metrics.jsonl, one object per call of `metrics`.

    Only numbers are kept. A resumed run appends: for a step that comes twice, the later line counts."""

    def __init__(self, run_dir: Path | str) -> None:
        self._lines = LineFile(Path(run_dir) / METRICS_FILE)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: json_number(value) for name, value in values.items() if is_number(value)}
        self._lines.write([{"step": int(step), "time": round(time.time(), 3)} | numbers])

    def spans(self, batch: Batch) -> None:
        pass

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        self._lines.close()
