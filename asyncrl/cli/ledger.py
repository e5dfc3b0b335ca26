"""Accounts for every group of a run: ``asyncrl ledger RUN_DIR``, or ``python -m asyncrl.ledger RUN_DIR``.

Only reads, also during the run. Exit status: 0, 1 if groups do not add up, 2 without a readable ledger.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from asyncrl.sample_queue.journal import newest_copy
from asyncrl.sample_queue.ledger import FILE, LedgerError, read_meta, reading
from asyncrl.sample_queue.records import HOLDER_KEY, STATES

_LAST_VERSIONS = 10
_BAR = 40  # characters
#: distributions over groups: name, SQL expression, digits
_OF_GROUPS = (
    ("tokens per sample", "CAST(tokens AS REAL) / samples", 1),
    ("sequences per sample", "CAST(sequences AS REAL) / samples", 2),
    ("trained share of tokens", "CAST(trained_tokens AS REAL) / MAX(tokens, 1)", 3),
    ("reward", "reward", 3),
    ("success", "success", 3),
)
_HIDDEN_META = ("spool_segment", "spool_offset", "served_from", HOLDER_KEY, "driver_epoch")  # how their keys begin


def balance(db: sqlite3.Connection) -> dict[str, int]:
    """Number of groups issued, from the highest sequence number, and of groups in each state, from the rows.

    ``missing``: the difference; a lost row leaves a gap in the sequence."""
    counts = dict.fromkeys(STATES, 0) | dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    issued = db.execute("SELECT COALESCE(MAX(seq), 0) FROM groups").fetchone()[0]
    return {"issued": issued, **counts, "missing": issued - sum(counts.values())}


def report(db: sqlite3.Connection) -> Iterator[str]:
    """Tables of the ledger, line by line."""
    meta = {key: value for key, value in read_meta(db).items() if not key.startswith(_HIDDEN_META)}
    if meta:
        yield from _table("run", ["", ""], [[key, str(value)] for key, value in meta.items()])
    yield from _balance(db)
    yield from _staleness(db)
    yield from _distributions(db)
    yield from _timings(db)
    yield from _drops(db)
    yield from _versions(db)


def _balance(db: sqlite3.Connection) -> Iterator[str]:
    counts = balance(db)
    final = db.execute("SELECT COUNT(*) FROM groups WHERE final = 1").fetchone()[0]
    rows = [[name.replace("_", " "), str(n)] for name, n in counts.items() if name not in ("issued", "missing")]
    rows[STATES.index("trained")].append(f"{final} final, {counts['trained'] - final} not yet covered by a checkpoint")
    rows += [["issued", str(counts["issued"])]]
    yield from _table("balance", ["groups", "count", ""], rows)
    if counts["missing"]:
        accounted = counts["issued"] - counts["missing"]
        yield f"NOT BALANCED: expected {counts['issued']} issued groups, found {accounted}"
    else:
        yield "balanced: issued = trained + queued + leased + in flight + dropped"


def _staleness(db: sqlite3.Connection) -> Iterator[str]:
    query = (
        "SELECT trained_number - oldest_number AS staleness, COUNT(*) FROM groups "
        "WHERE state = 'trained' AND staleness IS NOT NULL GROUP BY staleness ORDER BY staleness"
    )
    found = db.execute(query).fetchall()
    total = sum(count for _, count in found)
    rows = [[str(s), str(n), f"{n / total:6.1%}", "█" * round(_BAR * n / total)] for s, n in found]
    yield from _table("staleness of trained groups (versions)", ["staleness", "groups", "share", ""], rows)


def _distributions(db: sqlite3.Connection) -> Iterator[str]:
    """Compares all finished groups with the trained ones: a difference shows a bias of the drops."""
    rows = []
    for label, where in (("generated", "finished_s IS NOT NULL"), ("trained", "state = 'trained'")):
        columns = ", ".join(expression for _, expression, _ in _OF_GROUPS)
        found = db.execute(f"SELECT {columns} FROM groups WHERE {where} AND samples > 0").fetchall()
        for (name, _, digits), column in zip(_OF_GROUPS, np.array(found, dtype=float).T):
            points = [column.mean(), *np.quantile(column, [0, 0.1, 0.5, 0.9, 1])]
            rows.append([name, label, str(len(column)), *(f"{point:.{digits}f}" for point in points)])
    names = [name for name, _, _ in _OF_GROUPS]
    rows.sort(key=lambda row: names.index(row[0]))
    header = ["group mean", "of", "groups", "mean", "min", "p10", "p50", "p90", "max"]
    yield from _table("generated vs trained", header, rows)


def _timings(db: sqlite3.Connection) -> Iterator[str]:
    """Time per phase of a group."""
    parts = [
        ("waiting for the first token", "started_s", "issued_s"),
        ("generating", "generated_s", "started_s"),
        ("computing rewards", "finished_s", "generated_s"),
        ("queued", "leased_s", "finished_s"),
        ("training", "trained_s", "leased_s"),
    ]
    rows = []
    for label, until, since in parts:
        query = f"SELECT {until} - {since} FROM groups WHERE {until} NOT NULL AND {since} NOT NULL"
        seconds = np.array(db.execute(query).fetchall())
        if len(seconds):
            points = [seconds.mean(), *np.quantile(seconds, [0.5, 0.95, 0.99, 1])]
            rows.append([label, str(len(seconds)), *(f"{point:.3f}" for point in points)])
    yield from _table("seconds", ["", "groups", "mean", "p50", "p95", "p99", "max"], rows)


def _drops(db: sqlite3.Connection) -> Iterator[str]:
    query = "SELECT reason, COUNT(*) AS n FROM groups WHERE state = 'dropped' GROUP BY reason ORDER BY n DESC, reason"
    yield from _table("dropped", ["reason", "groups"], [[reason, str(n)] for reason, n in db.execute(query)])
    query = "SELECT refusal, COUNT(*), SUM(attempt) FROM groups WHERE attempt > 0 GROUP BY refusal ORDER BY refusal"
    yield from _table("refused", ["last reason", "groups", "times"], [list(map(str, row)) for row in db.execute(query)])


def _versions(db: sqlite3.Connection) -> Iterator[str]:
    total = db.execute("SELECT COUNT(*) FROM versions WHERE published_s NOT NULL").fetchone()[0]
    query = (
        "SELECT lineage, number, trained, published_s - LAG(published_s) OVER (ORDER BY lineage, number) "
        f"FROM versions WHERE published_s NOT NULL ORDER BY lineage DESC, number DESC LIMIT {_LAST_VERSIONS}"
    )
    rows = [
        [f"{lineage}.{n}", str(trained), f"{s:.1f}" if s is not None else ""]
        for lineage, n, trained, s in db.execute(query)
    ]
    title = f"versions (last {len(rows)} of {total})" if total > len(rows) else "versions"
    yield from _table(title, ["version", "trained before", "seconds since previous"], rows[::-1])


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"\n{title}"
    if not rows:
        yield "  none"
        return
    lines = [list(header), *rows] if any(header) else list(rows)
    widths = [max(len(line[c]) for line in lines if c < len(line)) for c in range(max(map(len, lines)))]
    numeric = [all(_numeric(row[c]) for row in rows if c < len(row)) for c in range(len(widths))]
    for line in lines:
        cells = [cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(line, widths, numeric)]
        yield f"  {'  '.join(cells)}".rstrip()


def _numeric(cell: str) -> bool:
    return not cell or cell.strip(" -").replace(".", "", 1).rstrip("%").isdigit()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m asyncrl.ledger", description="Audit a run: the state of every group, and statistics."
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run; it is not changed")
    run_dir = parser.parse_args(arguments).run_dir
    path = run_dir / FILE
    if not os.path.isfile(path) and (copy := newest_copy(run_dir)) is not None:
        path = copy / FILE
        print(f"as of the last checkpoint: read from the copy {path}; the live ledger is in journal_dir\n")
    try:
        with reading(path) as db:
            print("\n".join(report(db)).lstrip("\n"))
            return 1 if balance(db)["missing"] else 0
    except LedgerError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
