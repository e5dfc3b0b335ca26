"""The life of each group, from its issue to its training, out of the ledger: where a sample waited can be seen."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go

from asyncrl.reporting.charts import BLUE, GREEN, GREY, ORANGE, RED, VIOLET, styled
from asyncrl.sample_queue.journal import found_copy
from asyncrl.sample_queue.ledger import FILE, LedgerError, reading

MAX_LIVES = 72
#: phase → colour; each ends where the next begins
PHASES = {
    "waits for a slot": GREY,
    "generates": ORANGE,
    "is rewarded": VIOLET,
    "is queued": BLUE,
    "is trained": GREEN,
    "dropped": RED,
}
_TIMES = ("issued_s", "started_s", "generated_s", "finished_s", "leased_s", "trained_s")


class Life(NamedTuple):
    """``phases``: (name, start, end) in Unix seconds, one after the other; the last one may go on still."""

    uid: str
    state: str
    version: str  # that it was issued under
    step: int | None  # that trained it
    phases: list[tuple[str, float, float]]


def read_lives(run_dir: Path | str, last: int) -> list[Life]:
    """The ``last`` groups that were issued, the oldest first; none without a readable ledger."""
    path = Path(run_dir) / FILE
    if not path.is_file():
        copy = found_copy(Path(run_dir) / "journal")
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
    return [_life(row, now_s) for row in reversed(rows)]


def _life(row: Sequence, now_s: float) -> Life:
    uid, state, lineage, number, step, reason, dropped_s, *times = row
    # a group that was trained again after a restore has times of both lives: what is not later than before is no phase
    known = [(name, t) for name, t in zip(PHASES, times) if t is not None]
    phases = []
    for (name, start), (_, end) in zip(known, [*known[1:], ("", dropped_s or now_s)]):
        if name != "dropped" and end > start:
            phases.append((name, start, end))
    if state == "dropped" and phases:
        phases.append((f"dropped: {reason}", phases[-1][2], phases[-1][2] + 0.05))
    return Life(uid, state, f"{lineage}.{number}", step, phases)


def lives_chart(lives: Sequence[Life]) -> go.Figure | None:
    """One lane per group in the order of issue, its phases one after the other; seconds from the first issue shown."""
    if not any(life.phases for life in lives):
        return None
    origin = min(life.phases[0][1] for life in lives if life.phases)
    figure = go.Figure()
    for phase, colour in PHASES.items():
        bars = list(_bars(lives, phase, origin))
        if bars:
            lanes, starts, seconds, texts = map(list, zip(*bars))
            figure.add_bar(
                orientation="h",
                y=lanes,
                base=starts,
                x=seconds,
                name=phase,
                text=texts,
                textposition="none",
                hovertemplate="%{text}",
                marker={"color": colour, "line": {"width": 0}},
            )
    figure.update_layout(barmode="overlay", bargap=0.15, dragmode="pan")
    styled(figure, height=90 + 6 * len(lives), x_title="seconds")
    figure.update_yaxes(autorange="reversed", showticklabels=False, showgrid=False)
    figure.update_xaxes(ticksuffix=" s", title=None)
    figure.update_layout(hovermode="closest")
    return figure


def _bars(lives: Sequence[Life], phase: str, origin: float) -> Iterator[tuple[int, float, float, str]]:
    for lane, life in enumerate(lives):
        for name, start, end in life.phases:
            if name.split(":")[0] == phase:
                end_of = f"trained in step {life.step}" if life.state == "trained" else life.state.replace("_", " ")
                told = f"{life.uid} of version {life.version}, {end_of}<br>{name} {end - start:.3f} s"
                yield lane, start - origin, end - start, told
