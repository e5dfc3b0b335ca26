"""Sampled trajectories in the run folder: trajectories.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.observability.sinks.base import Sink, SinkSpec
from asyncrl.observability.sinks.jsonl import JsonlFile

TRAJECTORIES_FILE = "trajectories.jsonl"


class TrajectorySink(Sink):
    """Appends one JSON object per sampled trajectory."""

    def __init__(self, run_dir: Path | str) -> None:
        self._lines = JsonlFile(Path(run_dir) / TRAJECTORIES_FILE)

    def trajectories(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._lines.write(rows)

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        self._lines.close()


SINK = SinkSpec(open=lambda config, run_dir: TrajectorySink(run_dir), enabled=lambda config: True)
