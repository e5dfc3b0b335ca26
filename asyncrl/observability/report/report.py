"""report.html: a self-contained page about a run, made from the files in its run folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from asyncrl.config.load import CONFIG_FILE
from asyncrl.observability import charts, trajectory_files
from asyncrl.observability.number_format import short_number, short_seconds
from asyncrl.observability.report import group_timeline, page, swimlanes
from asyncrl.observability.report.conversation import Conversation, Piece
from asyncrl.observability.series import SUMMARY_FILE, Series, read_series, totals
from asyncrl.observability.sinks.jsonl import METRICS_FILE
from asyncrl.observability.sinks.timeline import read_spans
from asyncrl.observability.trajectories import caption, plural

REPORT_FILE = "report.html"
MAX_TRAJECTORIES = 24
MAX_FAILED = 8  # of these

T = TypeVar("T")


def write_report(run_dir: Path | str) -> Path:
    """Writes ``run_dir/report.html`` atomically, replacing any earlier one, and returns its path.

    Reads metrics.jsonl, trajectories/, spans.jsonl, the ledger, config.yaml (the head of the page shows ``name``,
    ``trainer.total_steps``, ``model.path`` and the modes) and summary.json, all of them optional. summary.json is a
    flat object: ``status`` (finished | interrupted | failed; derived from ``failed`` if missing), ``reason`` (why the
    run ended before its last step, or null) and ``failed`` (the error, or null). Its ``accuracy_before``,
    ``accuracy_after``, ``steps`` and ``fraction_of_ideal`` take precedence over the metrics. Raises FileNotFoundError
    if ``run_dir`` is not a folder."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"expected a run folder, which holds {METRICS_FILE}; {run_dir} is not a folder")
    path = run_dir / REPORT_FILE
    unfinished = run_dir / f".{REPORT_FILE}.{os.getpid()}"
    try:
        unfinished.write_text(_render(run_dir), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _render(run_dir: Path) -> str:
    series, times = read_series(run_dir)
    summary = _read_json(run_dir / SUMMARY_FILE)
    config_path = run_dir / CONFIG_FILE
    config_text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    config = OmegaConf.create(config_text or "{}")
    failed, steps = trajectory_files.failed_files(run_dir), trajectory_files.step_files(run_dir)
    kept = sum(map(trajectory_files.row_count, [*failed, *steps]))
    found = trajectory_files.read_files([*failed, *_evenly(steps, MAX_TRAJECTORIES)])  # a long run's fill the memory
    shown = _shown(found)
    return page.render(
        title=str(OmegaConf.select(config, "name", throw_on_missing=False) or run_dir.resolve().name),
        badge=_badge(summary),
        subtitle=_subtitle(config, times),
        banner=_banner(summary),
        key_figures=_key_figures(series, times, summary, OmegaConf.select(config, "trainer.total_steps")),
        has_metrics=bool(series),
        sections=[*_metric_sections(series), page.Section("Timeline", [*_actors(run_dir), *_groups(run_dir)])],
        trajectories=[_trajectory(row) for row in shown],
        damage="; ".join(found.damaged),
        trajectories_title=f"Trajectories ({len(shown)} of {kept} kept)" if len(shown) < kept else "Trajectories",
        summary={name: _fact(value) for name, value in summary.items() if not isinstance(value, (dict, list))},
        config_text=config_text,
    )


def _metric_sections(series: Series) -> Iterator[page.Section]:
    for title, group in charts.SECTIONS.items():
        drawn = page.charts(*((chart.title, chart.caption, charts.line_chart(chart, series)) for chart in group))
        drawn += page.charts(
            *(
                (family.title, family.caption, charts.family_chart(family, series))
                for family in charts.FAMILIES.get(title, ())
            )
        )
        if title == "Asynchrony":
            drawn += page.charts(
                (
                    "Parameter sync",
                    "Seconds per phase; the dotted line is the pause in generation.",
                    charts.sync_chart(series),
                ),
                ("Dropped groups", "Cumulative, by reason.", charts.dropped_chart(series)),
            )
        yield page.Section(title, drawn)


def _actors(run_dir: Path) -> list[page.Chart]:
    recorded = read_spans(run_dir)
    shown = swimlanes.shown_actors(recorded)
    rows = [row for row in recorded if row["actor"] in shown]
    caption = "Spans of each actor at the end of the run; drag to scroll."
    if len(rows) < len(recorded):
        caption += f" Of each kind of actor the first {swimlanes.MAX_LANES} are drawn."
    if len(rows) > swimlanes.MAX_BARS:
        caption += f" The last {swimlanes.MAX_BARS:,} of {len(rows):,} recorded spans are drawn."
    return page.charts(("Actor timelines", caption, swimlanes.timeline_chart(rows)), wide=True)


def _groups(run_dir: Path) -> list[page.Chart]:
    timelines = group_timeline.read_group_timelines(run_dir, group_timeline.MAX_GROUPS)
    caption = f"The last {len(timelines)} groups, one row each, from issue to training: long bars are waits."
    return page.charts(("Group timelines", caption, group_timeline.group_timeline_chart(timelines)), wide=True)


def _trajectory(row: Mapping[str, Any]) -> page.Trajectory:
    """A row of `asyncrl.observability.trajectory_files`."""
    chips = []
    if row["step"] is not None:
        chips.append(page.Label(f"step {row['step']}", ""))
    if row["reward"] is not None:
        chips.append(page.Label(f"reward {row['reward']:.3g}", "good" if row["reward"] > 0 else "poor"))
    chips += [page.Label(f"{name} {value:.3g}", "") for name, value in row["metrics"].items() if value is not None]
    if row["failure"] is not None:
        chips.append(page.Label(row["failure"], "poor"))
    if row["finish"] is not None:
        chips.append(page.Label(row["finish"], ""))
    chips.append(page.Label(f"{plural(row['response_tokens'], 'token')}, {row['trained_tokens']} trained", ""))
    chips.append(page.Label(f"{row['data_source']}: {row['prompt_id']}, sample {row['sample']}", ""))
    parts, prompt = row["parts"] or (), row["prompt"] or ""
    if prompt and parts and parts[0]["text"].endswith(prompt):  # with what the agent added to it, such as its tools
        prompt = ""
    return page.Trajectory(chips, row["error"] or "", prompt, list(_turns(parts)))


def _turns(parts: Sequence[Mapping[str, Any]]) -> Iterator[page.Part]:
    for _, sequence in groupby(parts, key=lambda part: part["sequence"]):
        conversation = Conversation()
        for part in sequence:
            title = caption(part)
            for piece in conversation.read(part["text"]) or [Piece("", part["text"])]:
                yield page.Part(title, part["kind"], piece.text, piece.role, piece.call)
                title = ""


def _badge(summary: Mapping[str, Any]) -> page.Label:
    if not summary:
        return page.Label("no summary yet", "live")
    status = str(summary.get("status") or ("failed" if summary.get("failed") else "finished"))
    return page.Label(status, {"finished": "ok", "interrupted": "cut"}.get(status, "bad"))


def _banner(summary: Mapping[str, Any]) -> page.Label | None:
    """Reason of an early end or a failure; None for a run that reached its last step."""
    failed, reason = summary.get("failed"), summary.get("reason")
    if failed or _badge(summary).kind == "bad":
        return page.Label(str(failed or reason or "the run failed without an error message"), "bad")
    if reason or summary.get("status") == "interrupted":
        return page.Label(f"Ended before its last step: {reason or 'interrupted'}", "cut")
    return None


def _subtitle(config: Any, times: Sequence[float]) -> str:
    def option(key: str) -> Any:
        return OmegaConf.select(config, key, throw_on_missing=False)

    parts = []
    if model := option("model.path"):
        parts.append(Path(str(model)).name)
    if algorithm := [str(name) for key in ("advantage", "surrogate") if (name := option(f"algorithm.{key}"))]:
        parts.append(", ".join(algorithm))
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
    series: Series, times: Sequence[float], summary: Mapping[str, Any], total_steps: int | None
) -> dict[str, str]:
    """label → text of the known figures, most interesting first."""
    figures: dict[str, str] = {}
    whole = totals(series)
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
    if (samples := whole.get("samples")) is not None:
        figures["samples"] = f"{samples:,.0f}"
    elif (groups := _last(series, "fully_async/count/trained")) is not None:
        figures["groups trained"] = f"{groups:,.0f}"
    if (tokens := whole.get("tokens")) is not None:
        figures["response tokens"] = short_number(tokens)
    duration_s = whole.get("duration_s", times[-1] - times[0] if len(times) > 1 else None)
    if duration_s is not None:
        figures["duration"] = short_seconds(duration_s)
    if (fraction := summary.get("fraction_of_ideal")) is not None:
        figures["efficiency"] = f"{fraction:.0%}"
    if (overlap := whole.get("overlap")) is not None:
        figures["of the time, both pools busy"] = f"{overlap:.0%}"
    staleness = [value for value in series.get("fully_async/staleness/max", ([], []))[1] if value is not None]
    if staleness:
        worst, bound = f"{max(staleness):g}", _last(series, "fully_async/staleness/bound")
        if bound is None:
            figures["staleness, max"] = worst
        else:
            figures["staleness, max / bound"] = f"{worst} / {bound:g}"
    return figures


def _last(series: Series, metric: str) -> float | None:
    return next((value for value in reversed(series.get(metric, ([], []))[1]) if value is not None), None)


def _fact(value: Any) -> str:
    return short_number(value) if isinstance(value, float) else "–" if value is None else str(value)


def _shown(found: trajectory_files.Trajectories) -> list[dict[str, Any]]:
    """At most `MAX_TRAJECTORIES` rows, evenly spaced, and of them at most `MAX_FAILED` of failed samples."""
    fine = found.table["failure"].is_null().to_pylist()
    failed = _evenly([i for i, ok in enumerate(fine) if not ok], MAX_FAILED)
    others = _evenly([i for i, ok in enumerate(fine) if ok], MAX_TRAJECTORIES - len(failed))
    return found.rows(failed + others)


def _evenly(items: Sequence[T], count: int) -> list[T]:
    """``count`` evenly spaced ones, first and last included."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if there is none, or it is damaged: the metrics have most of it."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
