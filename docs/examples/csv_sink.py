"""A sink: some metrics of each train step as a CSV file, for a spreadsheet.

asyncrl train --config configs/quickstart.yaml 'reporting.sinks=[csv_sink:SINK]'

This folder must be on PYTHONPATH; an installed package needs only its import path.
"""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.observability.sinks.base import Sink, SinkSpec
from asyncrl.observability.telemetry.recorder import Batch

COLUMNS = ("critic/rewards/mean", "fully_async/staleness/max", "perf/step_s")


class CsvSink(Sink):
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", newline="")
        self._rows = csv.writer(self._file)
        if not self._file.tell():  # a resumed run appends
            self._rows.writerow(["step", *COLUMNS, "tokens"])
        self._tokens = 0.0

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        if "actor/loss" in values:  # else a validation result
            self._rows.writerow([step, *(values.get(name, "") for name in COLUMNS), self._tokens])
            self._file.flush()

    def spans(self, batch: Batch) -> None:
        self._tokens += batch.counters.get("rollout/tokens", 0)

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        self._file.close()


def problems(config: Config) -> Iterator[str]:
    if "/" in config.name:
        yield f"name: expected no slash, since the CSV file is named after the run; found {config.name!r}"


SINK = SinkSpec(open=lambda config, run_dir: CsvSink(run_dir / f"{config.name}.csv"), problems=problems)
