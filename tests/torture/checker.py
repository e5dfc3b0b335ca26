"""What must hold after every death of a run's processes, whatever killed them; each check names what it found."""

import itertools
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from asyncrl.sample_queue.spool import HEADER_BYTES
from tests.torture.world import weights_after

#: each must find nothing; {batch} and {bound} are those of the run
QUERIES = {
    "a gap in the order of issue": "SELECT MAX(seq) - COUNT(*) AS gap FROM groups HAVING gap <> 0",
    "a step of another size": "SELECT step, COUNT(*) n FROM groups WHERE state = 'trained' GROUP BY step "
    "HAVING n <> {batch}",
    "a step that was left out": "SELECT MAX(step) FROM groups WHERE state = 'trained' "
    "HAVING COUNT(DISTINCT step) <> MAX(step)",
    "a stale group": "SELECT uid FROM groups WHERE state = 'trained' AND trained_number - oldest_number > {bound}",
    "an unknown version": "SELECT uid FROM groups WHERE oldest_number NOT NULL AND ("
    "(oldest_lineage, oldest_number) NOT IN (SELECT lineage, number FROM versions) OR "
    "(newest_lineage, newest_number) NOT IN (SELECT lineage, number FROM versions))",
    "versions out of order": "SELECT * FROM (SELECT trained - LAG(trained) OVER w d, number - LAG(number) OVER w n "
    "FROM versions WHERE published_s NOT NULL WINDOW w AS (PARTITION BY lineage ORDER BY number)) "
    "WHERE d < 0 OR n <> 1",
    "a row that contradicts itself": "SELECT uid FROM groups WHERE (state = 'leased' AND step IS NULL) OR "
    "(state = 'queued' AND step NOT NULL) OR (state IN ('queued', 'leased', 'trained') AND tokens IS NULL) OR "
    "(state = 'trained' AND trained_number IS NULL) OR (state = 'dropped' AND reason IS NULL) OR "
    "(final = 1 AND state <> 'trained')",
    "finality that does not fit the checkpoints": "SELECT uid FROM groups WHERE state = 'trained' AND final <> "
    "(step <= (SELECT COALESCE(MAX(value), 0) FROM meta WHERE key = 'covered_step'))",
    "a payload without a group": "SELECT uid FROM payloads WHERE uid NOT IN "
    "(SELECT uid FROM groups WHERE state IN ('queued', 'leased', 'trained') AND final = 0)",
    "a group without a payload": "SELECT uid FROM groups WHERE state IN ('queued', 'leased', 'trained') AND final = 0 "
    "AND uid NOT IN (SELECT uid FROM payloads)",
}
IN_ORDER = (
    "SELECT uid FROM (SELECT uid, step, MAX(step) OVER (ORDER BY seq) m FROM groups WHERE state = 'trained') "
    "WHERE step < m"
)


@dataclass(frozen=True)
class Expected:
    """Of a whole run. ``order``: the uids of its first groups. ``bound``: of staleness, in versions."""

    steps: int
    batch: int
    bound: int
    in_order: bool
    order: Callable[[int], list[str]]
    segment_bytes: int


class Checker:
    """Over all incarnations of one run. ``check`` yields the violations after one of them. ``survivors``: file of
    `tests.torture.world.Survivors`, if there is one."""

    def __init__(self, expected: Expected, survivors: Path | None = None) -> None:
        self._expected, self._survivors = expected, survivors
        self._final: set[str] = set()

    def check(self, journal: Path, over: bool = False) -> Iterator[str]:
        if not (journal / "ledger.sqlite").exists():
            return
        with closing(sqlite3.connect(journal / "ledger.sqlite")) as db:
            db.execute("PRAGMA query_only = 1")
            yield from self._rows(db)
            yield from self._survived(db)
            if over:  # a death may come between the end of payloads and the deletion of their segment
                yield from self._spool(db, journal / "spool")
                yield from self._complete(db)

    def forget(self) -> None:
        """The ledger went back to the copy of the last checkpoint: later acknowledgements are lost with their disk."""
        self._final = set()
        if self._survivors is not None:
            self._survivors.write_text("")

    def _rows(self, db: sqlite3.Connection) -> Iterator[str]:
        expected, queries = self._expected, dict(QUERIES)
        if expected.in_order:
            queries["training out of order"] = IN_ORDER
        for what, query in queries.items():
            if found := db.execute(query.format(batch=expected.batch, bound=expected.bound)).fetchall():
                yield f"{what}: {found[:3]}"
        uids = [uid for (uid,) in db.execute("SELECT uid FROM groups ORDER BY seq")]
        if uids != expected.order(len(uids)):
            yield "the groups are not the first prompts in their order"

    def _survived(self, db: sqlite3.Connection) -> Iterator[str]:
        """What was acknowledged is still so."""
        states = dict(db.execute("SELECT uid, state FROM groups"))
        final = {uid for (uid,) in db.execute("SELECT uid FROM groups WHERE final = 1")}
        if lost := self._final - final:
            yield f"no longer final: {sorted(lost)[:3]}"
        self._final = final
        covered = db.execute("SELECT COALESCE(MAX(value), 0) FROM meta WHERE key = 'covered_step'").fetchone()[0]
        weights: dict[tuple[int, int], str] = {}
        for line in self._survivors.read_text().splitlines() if self._survivors is not None else ():
            kind, *entry = json.loads(line)
            if kind == "accepted" and states.get(entry[0]) in (None, "in_flight"):
                yield f"an accepted group is {states.get(entry[0])}: {entry[0]}"
            elif kind == "dropped" and states.get(entry[0]) != "dropped":
                yield f"a dropped group is {states.get(entry[0])}: {entry[0]}"
            elif kind == "covered" and entry[0] > covered:
                yield f"step {entry[0]} was covered, now it is {covered}"
            elif kind == "version":
                lineage, number, digest = entry
                if weights.setdefault((lineage, number), digest) != digest:
                    yield f"version {lineage}.{number} has had two weights"

    def _spool(self, db: sqlite3.Connection, spool: Path) -> Iterator[str]:
        live, count = db.execute("SELECT COALESCE(SUM(length), 0), COUNT(*) FROM payloads").fetchone()
        size = sum(path.stat().st_size for path in spool.glob("*.seg"))
        if size > 4 * (live + HEADER_BYTES * count) + 3 * self._expected.segment_bytes:
            yield f"the spool has {size} bytes for {live} bytes of payloads"

    def _complete(self, db: sqlite3.Connection) -> Iterator[str]:
        rows = db.execute("SELECT COUNT(*), MAX(step) FROM groups WHERE state = 'trained'").fetchone()
        expected = self._expected.steps * self._expected.batch, self._expected.steps
        if rows != expected:
            yield f"trained (groups, steps) at the end: {rows}, expected {expected}"


def final_weights(journal: Path) -> str:
    """Weights that result from the ledger's account of the training."""
    with closing(sqlite3.connect(journal / "ledger.sqlite")) as db:
        rows = db.execute("SELECT step, uid FROM groups WHERE state = 'trained' ORDER BY step, uid").fetchall()
    return weights_after([uid for _, uid in batch] for _, batch in itertools.groupby(rows, lambda row: row[0]))
