"""Sampled trajectories, and some failed ones, in the run folder: trajectories/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.observability.sinks.base import Sink, SinkSpec
from asyncrl.observability.telemetry.recorder import Batch
from asyncrl.observability.trajectories import failed_row
from asyncrl.observability.trajectory_files import read_failed, write_failed, write_step

MAX_FAILED = 500  # of a run: the first ones show what is wrong


class TrajectorySink(Sink):
    """One Parquet file per step, and one of failed samples."""

    def __init__(self, run_dir: Path | str) -> None:
        self._run_dir = Path(run_dir)
        self._failed = read_failed(self._run_dir)

    def trajectories(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            write_step(self._run_dir, rows[0]["step"], rows)

    def spans(self, batch: Batch) -> None:
        if batch.failures and len(self._failed) < MAX_FAILED:
            self._failed += map(failed_row, batch.failures)
            write_failed(self._run_dir, self._failed)


SINK = SinkSpec(open=lambda config, run_dir: TrajectorySink(run_dir), enabled=lambda config: True)
