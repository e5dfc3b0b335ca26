"""The metrics of a whole run, over all its drivers, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any

from asyncrl.observability.number_format import is_number
from asyncrl.observability.sinks.jsonl import METRICS_FILE, read_jsonl

SUMMARY_FILE = "summary.json"  #: in a run's folder: how it ended, and its overall figures

#: metric name → (steps, values); values may be None where a step has no number
Series = Mapping[str, tuple[Sequence[int], Sequence[float | None]]]


def read_series(run_dir: Path) -> tuple[Series, list[float]]:
    """(the metrics, Unix times of the first and the last line) of metrics.jsonl. Where a resume goes back, later steps
    count no more. If a step repeats, the last value of each name counts."""
    by_step: dict[int, dict[str, Any]] = {}
    times: list[float] = []
    trained = 0  # the last step
    for row in read_jsonl(run_dir / METRICS_FILE):
        if not isinstance(row.get("step"), int):
            continue
        if "perf/step_s" in row:  # of a train step; validations may be late
            if row["step"] <= trained:
                by_step = {step: values for step, values in by_step.items() if step <= row["step"]}
            trained = row["step"]
        by_step.setdefault(row["step"], {}).update(row)
        if is_number(row.get("time")):
            times = [*times[:1], row["time"]]
    series: dict[str, tuple[list[int], list[float | None]]] = {}
    for step in sorted(by_step):
        for name, value in by_step[step].items():
            if name not in ("step", "time") and (value is None or is_number(value)):
                steps, values = series.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return series, times


def totals(series: Series) -> dict[str, float]:
    """Figures of all train steps, without start-up, validations before and after, and what a resume repeats:
    ``duration_s``; ``overlap``, the share of it in which both pools were busy; ``samples`` and ``tokens`` generated.
    Only those that are known."""
    seconds = _known(series, "perf/step_s")
    if not (duration_s := fsum(seconds.values())):
        return {}

    def over_time(metric: str) -> float | None:
        rates = _known(series, metric)
        return fsum(rate * seconds.get(step, 0.0) for step, rate in rates.items()) if rates else None

    busy_s, samples = over_time("fully_async/overlap"), _known(series, "rollout/samples")
    found = {
        "duration_s": duration_s,
        "overlap": None if busy_s is None else busy_s / duration_s,
        "samples": fsum(samples.values()) if samples else None,
        "tokens": over_time("perf/rollout_tokens_per_s"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _known(series: Series, metric: str) -> dict[int, float]:
    """Step → value."""
    return {step: value for step, value in zip(*series.get(metric, ((), ())), strict=True) if value is not None}
