"""Timeline of each group from issue to training, read from the ledger."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go

from asyncrl.observability.charts import BLUE, GREEN, GREY, ORANGE, RED, VIOLET
from asyncrl.observability.report.lanes import add_bars, styled_lanes
from asyncrl.sample_queue.journal import newest_copy
from asyncrl.sample_queue.ledger import FILE, LedgerError, reading

MAX_GROUPS = 72
#: phase → colour; a phase ends where the next begins
PHASES = {
    "waiting for a slot": GREY,
    "generating": ORANGE,
    "scoring": VIOLET,
    "queued": BLUE,
    "training": GREEN,
    "dropped": RED,
}
_TIMES = ("issued_s", "started_s", "generated_s", "finished_s", "leased_s", "trained_s")


class GroupTimeline(NamedTuple):
    """``phases``: (name, start, end) in Unix seconds, consecutive; the last one may still be going on."""

    uid: str
    state: str
    version: str  # at issue
    step: int | None  # train step that consumed it
    phases: list[tuple[str, float, float]]


def read_group_timelines(run_dir: Path | str, last: int) -> list[GroupTimeline]:
    """The ``last`` issued groups, oldest first; none without a readable ledger."""
    path = Path(run_dir) / FILE
    if not path.is_file():
        copy = newest_copy(Path(run_dir))
        if copy is None:
            return []
        path = copy / FILE
    columns = f"uid, state, lineage, number, step, reason, dropped_s, {', '.join(_TIMES)}"
    try:
        with reading(path, thorough=False) as db:
            rows = db.execute(f"SELECT {columns} FROM groups ORDER BY seq DESC LIMIT ?", (last,)).fetchall()
    except (LedgerError, sqlite3.Error):
        return []
    ends = [t for row in rows for t in row[6:] if t is not None]
    now_s = max(ends, default=time.time())
    return [_group_timeline(row, now_s) for row in reversed(rows)]


def _group_timeline(row: Sequence, now_s: float) -> GroupTimeline:
    uid, state, lineage, number, step, reason, dropped_s, *times = row
    # A group trained twice because of a rollback has times of both runs: phases that end before they start are skipped.
    known = [(name, t) for name, t in zip(PHASES, times) if t is not None]
    phases = []
    for (name, start), (_, end) in zip(known, [*known[1:], ("", dropped_s or now_s)]):
        if name != "dropped" and end > start:
            phases.append((name, start, end))
    if state == "dropped" and phases:
        phases.append((f"dropped: {reason}", phases[-1][2], phases[-1][2] + 0.05))
    return GroupTimeline(uid, state, f"{lineage}.{number}", step, phases)


def group_timeline_chart(timelines: Sequence[GroupTimeline]) -> go.Figure | None:
    """One lane per group in order of issue; seconds since the first issue shown."""
    if not any(timeline.phases for timeline in timelines):
        return None
    origin = min(timeline.phases[0][1] for timeline in timelines if timeline.phases)
    figure = go.Figure()
    for phase, colour in PHASES.items():
        bars = list(_bars(timelines, phase, origin))
        if bars:
            add_bars(figure, phase, colour, *map(list, zip(*bars)))
    styled_lanes(figure, height=90 + 6 * len(timelines))
    figure.update_layout(bargap=0.15)
    figure.update_yaxes(showticklabels=False)
    return figure


def _bars(timelines: Sequence[GroupTimeline], phase: str, origin: float) -> Iterator[tuple[int, float, float, str]]:
    for lane, timeline in enumerate(timelines):
        for name, start, end in timeline.phases:
            if name.split(":")[0] == phase:
                trained = timeline.state == "trained"
                state = f"trained in step {timeline.step}" if trained else timeline.state.replace("_", " ")
                text = f"{timeline.uid} of version {timeline.version}, {state}<br>{name} {end - start:.3f} s"
                yield lane, start - origin, end - start, text
