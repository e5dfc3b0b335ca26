"""Chart of the actors' spans: one lane per actor, one bar per span."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from asyncrl.observability.charts import GREY, colours
from asyncrl.observability.report.lanes import add_bars, styled_lanes

MAX_BARS = 1_500
MAX_LANES = 8  # of each kind of actor: else replicas, if there are many, would leave no bar to the others
VIEW_S = 60.0  # initial view: this much of the end


def shown_actors(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """The first `MAX_LANES` actors of each kind, such as the replicas."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for actor in {str(row["actor"]) for row in rows}:
        kind, _, number = actor.partition("/")
        kinds.setdefault(kind, []).append((int(number) if number.isdecimal() else 0, actor))
    return {actor for of_kind in kinds.values() for _, actor in sorted(of_kind)[:MAX_LANES]}


def timeline_chart(rows: Sequence[Mapping[str, Any]]) -> go.Figure | None:
    """Latest `MAX_BARS` of the spans ``rows`` (see `timeline.read_spans`), nested ones narrower than their parents. The
    x axis is seconds since the first span of all."""
    latest = sorted(rows, key=lambda row: row["end"])[-MAX_BARS:]
    if not latest:
        return None
    origin = min(row["start"] for row in rows)
    end = max(row["end"] for row in latest) - origin
    lanes: dict[str, list[Mapping[str, Any]]] = {}
    for row in latest:
        lanes.setdefault(str(row["actor"]), []).append(row)
    bars: dict[str, list[tuple[str, float, float, float, str]]] = {}  # span name → lane, start, seconds, width, text
    for actor, spans in lanes.items():
        for row, depth in _depths(spans):
            seconds = row["end"] - row["start"]
            notes = [f"{seconds:.3f} s"] + ([f"{row['count']} short spans joined"] if "count" in row else [])
            notes += [f"{key} = {value}" for key, value in row.get("args", {}).items()]
            bars.setdefault(str(row["name"]), []).append(
                (actor, row["start"] - origin, seconds, max(0.2, 0.82 - 0.22 * depth), "<br>".join([actor, *notes]))
            )
    figure = go.Figure()
    # Widest first, so that nested bars are painted over their parents.
    by_width = sorted(bars.items(), key=lambda item: (-max(bar[3] for bar in item[1]), item[0]))
    for (name, spans_of), colour in zip(by_width, colours()):
        actors, starts, seconds_of, widths, texts = map(list, zip(*spans_of))
        colour = GREY if "wait" in name else colour
        add_bars(figure, name, colour, actors, starts, seconds_of, texts, width=widths)
    styled_lanes(figure, height=150 + 44 * len(lanes))
    figure.update_yaxes(categoryorder="array", categoryarray=sorted(lanes))
    first = min(row["start"] for row in latest) - origin
    return figure.update_xaxes(range=[max(end - VIEW_S, first), end])


def _depths(spans: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Each span with its nesting depth."""
    around: list[float] = []  # ends of the spans that may contain the next one
    for row in sorted(spans, key=lambda row: (row["start"], -row["end"])):
        around = [end for end in around if end > row["start"]]
        yield row, len(around)
        around.append(row["end"])
