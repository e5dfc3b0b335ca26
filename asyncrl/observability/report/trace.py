"""trace.json.gz: spans of all actors and timelines of all groups, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.observability.report.group_timeline import read_group_timelines
from asyncrl.observability.sinks.timeline import read_spans

TRACE_FILE = "trace.json.gz"
MAX_GROUPS = 20_000  # the last groups
ACTORS, GROUPS = 1, 2  # Perfetto's processes


def write_trace(run_dir: Path | str) -> Path:
    """Writes ``run_dir/trace.json.gz`` atomically, from spans.jsonl, whose size is bounded, and the ledger; returns its
    path."""
    path = Path(run_dir) / TRACE_FILE
    unfinished = path.with_name(f".{TRACE_FILE}.{os.getpid()}")
    try:
        with gzip.open(unfinished, "wt", compresslevel=5, encoding="utf-8", errors="replace") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for i, event in enumerate(_events(Path(run_dir))):
                file.write((",\n" if i else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _events(run_dir: Path) -> Iterator[dict[str, Any]]:
    spans = read_spans(run_dir)
    lanes = {actor: i for i, actor in enumerate(sorted({str(row["actor"]) for row in spans}), start=1)}
    yield from (_name("process_name", process, 0, name) for process, name in ((ACTORS, "actors"), (GROUPS, "groups")))
    for actor, lane in lanes.items():
        yield _name("thread_name", ACTORS, lane, actor)
    for row in spans:
        more = {key: row[key] for key in ("count", "open") if key in row}
        yield {
            "ph": "X",
            "pid": ACTORS,
            "tid": lanes[str(row["actor"])],
            "name": str(row["name"]),
            "ts": row["start"] * 1e6,
            "dur": (row["end"] - row["start"]) * 1e6,
            "args": {**row.get("args", {}), **more},
        }
    for timeline in read_group_timelines(run_dir, MAX_GROUPS):
        about = {"version": timeline.version, "state": timeline.state, "step": timeline.step}
        for phase, start, end in timeline.phases:
            for mark, at in (("b", start), ("e", end)):
                event = {"ph": mark, "cat": "group", "id": timeline.uid, "pid": GROUPS, "tid": 0, "name": phase}
                yield event | {"ts": at * 1e6, "args": about if mark == "b" else {}}


def _name(kind: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": lane, "name": kind, "args": {"name": name}}
