"""Sampled trajectories, and some failed ones, in the run folder: trajectories/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.observability.sinks.base import Sink, SinkSpec
from asyncrl.observability.telemetry.recorder import Batch
from asyncrl.observability.trajectories import failed_row
from asyncrl.observability.trajectory_files import failed_files, row_count, write_failed, write_step

MAX_FAILED = 500  # of a run: the first ones show what is wrong


class TrajectorySink(Sink):
    """A Parquet file for each step, and for each time that samples failed."""

    def __init__(self, run_dir: Path | str) -> None:
        self._run_dir = Path(run_dir)
        files = failed_files(self._run_dir)
        self._failed, self._files = sum(map(row_count, files)), len(files)

    def trajectories(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            write_step(self._run_dir, rows[0]["step"], rows)

    def spans(self, batch: Batch) -> None:
        if rows := [failed_row(failure) for failure in batch.failures[: MAX_FAILED - self._failed]]:
            self._files, self._failed = self._files + 1, self._failed + len(rows)
            write_failed(self._run_dir, self._files, rows)


SINK = SinkSpec(open=lambda config, run_dir: TrajectorySink(run_dir), enabled=lambda config: True)
