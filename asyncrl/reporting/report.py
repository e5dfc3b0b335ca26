"""report.html: one self-contained page about a run, made from the files in its folder and nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from asyncrl.reporting import charts, lives, page, swimlanes
from asyncrl.reporting.console import short_number, short_seconds
from asyncrl.reporting.jsonl import METRICS_FILE, is_number, read_lines
from asyncrl.reporting.timeline import read_spans
from asyncrl.reporting.trajectories import TRAJECTORIES_FILE

REPORT_FILE = "report.html"
MAX_TRAJECTORIES = 24


def write_report(run_dir: Path | str) -> Path:
    """Make (or make again) ``run_dir/report.html`` and return its path. A reader never sees half a page.

    Reads metrics.jsonl, trajectories.jsonl, spans.jsonl, the ledger, config.yaml (``name``, ``trainer.total_steps``,
    ``model.path`` and the modes are shown at the top) and summary.json. All are optional. summary.json is a flat
    object. How the run ended is said by its ``status`` (finished | interrupted | failed), ``reason`` (why before the
    last step, or null) and ``failed`` (what broke it, or null; alone it decides where there is no status). Its
    ``accuracy_before``, ``accuracy_after``, ``steps``, ``samples``, ``tokens``, ``duration_s``, ``overlap`` and
    ``fraction_of_ideal`` go before what the metrics say. Raises FileNotFoundError if ``run_dir`` is no folder."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is no folder: give the run folder that holds {METRICS_FILE}")
    path = run_dir / REPORT_FILE
    unfinished = run_dir / f".{REPORT_FILE}.{os.getpid()}"
    unfinished.write_text(_render(run_dir), encoding="utf-8")
    unfinished.replace(path)
    return path


def read_series(run_dir: Path) -> tuple[dict[str, tuple[list[int], list[float | None]]], list[float]]:
    """The metrics as (name → (steps, values), Unix times of the first and the last line). A step that was reported
    more than once counts with its last value of each name."""
    by_step: dict[int, dict[str, Any]] = {}
    times: list[float] = []
    for row in read_lines(run_dir / METRICS_FILE):
        if not isinstance(row.get("step"), int):
            continue
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


def _render(run_dir: Path) -> str:
    series, times = read_series(run_dir)
    summary = _read_json(run_dir / "summary.json")
    config_path = run_dir / "config.yaml"
    config_text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    config = OmegaConf.create(config_text or "{}")
    title = str(OmegaConf.select(config, "name", throw_on_missing=False) or run_dir.resolve().name)

    body = [
        page.header(title, _badge(summary), _subtitle(config, times), _banner(summary)),
        page.key_figures(_key_figures(series, times, summary, OmegaConf.select(config, "trainer.total_steps"))),
    ]
    if not series:
        body.append(page.section("Metrics", page.empty("No step has been reported yet."), grid=False))
    for heading, group in charts.SECTIONS.items():
        cards = [page.chart_card(chart.title, chart.caption, charts.line_chart(chart, series)) for chart in group]
        if heading == "Asynchrony":
            cards += _pipe_cards(series)
        body.append(page.section(heading, "".join(cards)))
    body.append(page.section("Timeline", _timeline_card(run_dir) + _lives_card(run_dir)))
    rows = read_lines(run_dir / TRAJECTORIES_FILE)
    shown = _evenly(rows, MAX_TRAJECTORIES)
    heading = "Trajectories" if len(shown) == len(rows) else f"Trajectories ({len(shown)} of {len(rows)} kept)"
    body.append(page.section(heading, "".join(map(page.trajectory_card, shown)), grid=False))
    facts = {name: _fact(value) for name, value in summary.items() if not isinstance(value, (dict, list))}
    body.append(page.section("Summary", page.table(facts)))
    if config_text:
        body.append(page.section("Configuration", page.folded("config.yaml", config_text)))
    return page.page(f"{title} · asyncrl", body)


def _pipe_cards(series: charts.Series) -> list[str]:
    return [
        page.chart_card(
            "Parameter sync",
            "Seconds of each phase; the dotted line is how long generation stood still.",
            charts.sync_chart(series),
        ),
        page.chart_card("Dropped groups", "By reason, as counted up to each step.", charts.dropped_chart(series)),
    ]


def _timeline_card(run_dir: Path) -> str:
    rows = read_spans(run_dir)
    caption = "What each actor did, latest part of the run; drag to move through it."
    if len(rows) > swimlanes.MAX_BARS:
        caption += f" The last {swimlanes.MAX_BARS:,} of {len(rows):,} recorded spans are drawn."
    return page.chart_card("Who did what when", caption, swimlanes.timeline_chart(rows), wide=True)


def _lives_card(run_dir: Path) -> str:
    shown = lives.read_lives(run_dir, lives.MAX_LIVES)
    caption = f"The last {len(shown)} groups, a line each, from issue to training: where one waited, it is long."
    return page.chart_card("Lives of groups", caption, lives.lives_chart(shown), wide=True)


def _badge(summary: Mapping[str, Any]) -> tuple[str, str]:
    if not summary:
        return "no summary yet", "live"
    status = str(summary.get("status") or ("failed" if summary.get("failed") else "finished"))
    return status, {"finished": "ok", "interrupted": "cut"}.get(status, "bad")


def _banner(summary: Mapping[str, Any]) -> tuple[str, str] | None:
    """What a reader must know of the run's end before any chart; None for a run that went to its last step."""
    failed, reason = summary.get("failed"), summary.get("reason")
    if failed or _badge(summary)[1] == "bad":
        return str(failed or reason or "the run failed without a word"), "bad"
    if reason or summary.get("status") == "interrupted":
        return f"Ended before its last step: {reason or 'interrupted'}", "cut"
    return None


def _subtitle(config: Any, times: Sequence[float]) -> str:
    def option(key: str) -> Any:
        return OmegaConf.select(config, key, throw_on_missing=False)

    parts = []
    if model := option("model.path"):
        parts.append(Path(str(model)).name)
    if algorithm := option("algorithm.name"):
        parts.append(str(algorithm))
    if (threshold := option("async_training.staleness_threshold")) is not None:
        every = option("async_training.trigger_parameter_sync_step") or 1
        partial = option("async_training.partial_rollout")
        parts.append(f"staleness threshold {threshold:g}")
        parts.append("sync every step" if every == 1 else f"sync every {every} steps")
        if threshold:
            parts.append("partial rollout" if partial else "whole samples")
    if times:
        parts.append(time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(times[0])))
    return " · ".join(parts)


def _key_figures(
    series: charts.Series, times: Sequence[float], summary: Mapping[str, Any], total_steps: int | None
) -> dict[str, str]:
    """label → text of what can be known, in the order of interest."""
    figures: dict[str, str] = {}
    held_out = [value for value in series.get("validation/accuracy", ([], []))[1] if value is not None]
    before = summary.get("accuracy_before", held_out[0] if held_out else None)
    after = summary.get("accuracy_after", held_out[-1] if len(held_out) > 1 else None)
    if before is not None:
        figures["held-out accuracy"] = f"{before:.1%}" if after is None else f"{before:.1%} → {after:.1%}"
    if (reward := _last(series, "critic/rewards/mean")) is not None:
        figures["reward, last step"] = short_number(reward)
    last_step = max((steps[-1] for steps, _ in series.values()), default=None)
    if (steps_done := summary.get("steps", last_step)) is not None:
        figures["train steps"] = f"{steps_done}/{total_steps}" if total_steps else str(steps_done)
    if (samples := summary.get("samples")) is not None:
        figures["samples"] = f"{samples:,.0f}"
    elif (groups := _last(series, "fully_async/count/trained")) is not None:
        figures["groups trained"] = f"{groups:,.0f}"
    if (tokens := summary.get("tokens")) is not None:
        figures["response tokens"] = short_number(tokens)
    duration_s = summary.get("duration_s", times[-1] - times[0] if len(times) > 1 else None)
    if duration_s is not None:
        figures["duration"] = short_seconds(duration_s)
    if (fraction := summary.get("fraction_of_ideal")) is not None:
        figures["of the ideal speed"] = f"{fraction:.0%}"
    if (overlap := summary.get("overlap", _last(series, "fully_async/overlap"))) is not None:
        figures["of the time, both pools at work"] = f"{overlap:.0%}"
    staleness = [value for value in series.get("fully_async/staleness/max", ([], []))[1] if value is not None]
    if staleness:
        bound = _last(series, "fully_async/staleness/bound")
        figures["staleness, worst" + (" / bound" if bound is not None else "")] = f"{max(staleness):g}" + (
            f" / {bound:g}" if bound is not None else ""
        )
    return figures


def _last(series: charts.Series, metric: str) -> float | None:
    return next((value for value in reversed(series.get(metric, ([], []))[1]) if value is not None), None)


def _fact(value: Any) -> str:
    return short_number(value) if isinstance(value, float) else "–" if value is None else str(value)


def _evenly(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """``count`` rows spread over the run, the first and the last among them."""
    if len(rows) <= count:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
