"""Ledger: one SQLite row per group of a run, readable by any client during the run.

One process writes, through `asyncrl.sample_queue.journal`; a commit survives `kill -9` and power loss (WAL,
``synchronous=FULL``). A damaged or foreign file is refused before anything is written to it. The WAL needs a local
disk: SQLite's shared memory does not work over network file systems.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

from asyncrl.sample_queue.messages import Issued
from asyncrl.sample_queue.records import DROPPED, GroupRecord, Recovered, VersionRecord, holders
from asyncrl.sample_queue.spool import RecordLocation
from asyncrl.types.versions import PolicyVersion

FILE = "ledger.sqlite"
SCHEMA_VERSION = 10
_APPLICATION_ID = 0x41524C4C  # "ARLL": marks an SQLite file as an asyncrl ledger
_ROWS_PER_STATEMENT = 32
_KEYS_PER_STATEMENT = 512
_BUSY_TIMEOUT_MS = 30_000  # a client that holds the write lock longer than this fails the run

_SCHEMA = """
CREATE TABLE groups (
  seq INTEGER PRIMARY KEY,
  uid TEXT NOT NULL UNIQUE,
  prompt_id TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  lineage INTEGER NOT NULL,
  number INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('in_flight', 'queued', 'leased', 'trained', 'dropped')),
  issued_s REAL NOT NULL,
  reason TEXT,
  step INTEGER,
  final INTEGER NOT NULL,
  oldest_lineage INTEGER,
  oldest_number INTEGER,
  newest_lineage INTEGER,
  newest_number INTEGER,
  trained_lineage INTEGER,
  trained_number INTEGER,
  samples INTEGER,
  sequences INTEGER,
  tokens INTEGER,
  trained_tokens INTEGER,
  reward REAL,
  success REAL,
  started_s REAL,
  generated_s REAL,
  finished_s REAL,
  processing_s REAL,
  leased_s REAL,
  trained_s REAL,
  dropped_s REAL,
  attempt INTEGER NOT NULL,
  refusal TEXT,
  shard INTEGER NOT NULL
);
CREATE TABLE versions (
  lineage INTEGER NOT NULL,
  number INTEGER NOT NULL,
  trained INTEGER NOT NULL,
  published_s REAL,
  PRIMARY KEY (lineage, number)
) WITHOUT ROWID;
CREATE TABLE payloads (
  uid TEXT PRIMARY KEY,
  segment INTEGER NOT NULL,
  offset INTEGER NOT NULL,
  length INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""


class LedgerError(RuntimeError):
    """The ledger is missing, damaged, foreign or not writable; the message says which, and how to continue."""


class Ledger:
    """Write access to the ledger. ``meta`` describes the run (its id, G, the threshold, …) and is written on opening.
    ``driver_epoch``: of the run's driver; a ledger that a newer driver has opened takes no more writes.

    Raises LedgerError if the file is not a whole ledger of this schema, or cannot be written."""

    def __init__(self, path: Path, meta: Mapping[str, str | int | float] | None = None, driver_epoch: int = 0) -> None:
        self.path, self._driver_epoch = path, driver_epoch
        if path.exists() and path.stat().st_size:
            with closing(_connect_readonly(path)) as reader:
                _check(reader, path, thorough=True, may_be_empty=True)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as e:
            raise LedgerError(f"{path} cannot be opened for writing: {e}") from e
        try:
            self._db.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._create_or_describe(meta or {})
        except sqlite3.Error as e:
            self._db.close()
            raise LedgerError(f"{path} cannot be written: {e}") from e

    def commit(
        self,
        groups: Sequence[GroupRecord] = (),
        versions: Sequence[VersionRecord] = (),
        payloads: Mapping[str, RecordLocation | None] | None = None,
        meta: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Writes one transaction, on disk on return. ``payloads``: location of each by uid, None to delete it. Raises
        sqlite3.Error, or LedgerError after a newer driver or if rows are missing; nothing was written then."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._check_driver()
            _upsert(self._db, "groups", "seq", GroupRecord._fields, groups)
            _upsert(self._db, "versions", "lineage, number", VersionRecord._fields, versions)
            written = [(uid, *location) for uid, location in (payloads or {}).items() if location is not None]
            _upsert(self._db, "payloads", "uid", ("uid", *RecordLocation._fields), written)
            _delete(
                self._db, "payloads", "uid", [uid for uid, location in (payloads or {}).items() if location is None]
            )
            _upsert(self._db, "meta", "key", ("key", "value"), list((meta or {}).items()))
            if meta and "issued" in meta:
                self._check_complete()
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def copy_to(self, path: Path) -> None:
        """Copies everything committed so far into one file."""
        with closing(sqlite3.connect(path)) as copy:
            self._db.backup(copy)

    def close(self) -> None:
        self._db.close()

    def _create_or_describe(self, meta: Mapping[str, str | int | float]) -> None:
        if not self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
            # one transaction: a crash leaves an empty file, which is created again, or a whole schema
            self._db.executescript(
                f"BEGIN IMMEDIATE; PRAGMA application_id = {_APPLICATION_ID};"
                f"PRAGMA user_version = {SCHEMA_VERSION}; {_SCHEMA} COMMIT;"
            )
        self.commit(meta={**meta, "driver_epoch": self._driver_epoch})

    def _check_complete(self) -> None:
        last, rows = self._db.execute("SELECT COALESCE(MAX(seq), 0), COUNT(*) FROM groups").fetchone()
        (issued,) = self._db.execute("SELECT MAX(value, ?) FROM meta WHERE key = 'issued'", [last]).fetchone()
        if rows != issued:
            raise LedgerError(
                f"{self.path} has lost rows: expected {issued} groups, found {rows}. Something else writes to it; "
                "restore it from a copy, or start a new run from the newest checkpoint's weights"
            )

    def _check_driver(self) -> None:
        found = self._db.execute("SELECT value FROM meta WHERE key = 'driver_epoch'").fetchone()
        if found is not None and found[0] > self._driver_epoch:
            raise LedgerError(
                f"{self.path} belongs to a newer driver of the run (epoch {found[0]}); this one (epoch "
                f"{self._driver_epoch}) must not write it"
            )


@contextmanager
def reading(path: Path, thorough: bool = True) -> Iterator[sqlite3.Connection]:
    """Read-only snapshot of the ledger, also while another process writes it.

    Raises LedgerError if it is missing, of another schema, or damaged; ``thorough`` checks the whole file for damage,
    not just the pages that are read."""
    if not path.is_file():
        raise LedgerError(f"no ledger at {path}: expected the folder of a run")
    with closing(_connect_readonly(path)) as db:
        _check(db, path, thorough)
        try:
            db.execute("BEGIN")
            yield db
        except sqlite3.DatabaseError as e:
            raise LedgerError(f"{path} is damaged: {e}") from e


def recover(db: sqlite3.Connection) -> Recovered:
    """State of the queue, from a connection of `reading`."""
    columns = ", ".join(GroupRecord._fields)
    groups = db.execute(f"SELECT {columns} FROM groups WHERE state != ? AND final = 0 ORDER BY seq", (DROPPED,))
    issued, final = map(int, db.execute("SELECT COALESCE(MAX(seq), 0), TOTAL(final) FROM groups").fetchone())
    dropped = "SELECT reason, COUNT(*) FROM groups WHERE state = ? GROUP BY reason ORDER BY reason"
    versions = db.execute(
        "SELECT lineage, number, trained, published_s FROM versions ORDER BY lineage, number"
    ).fetchall()
    published = {PolicyVersion(*row[:2]): row[2] for row in versions if row[3] is not None}
    last_issued = db.execute("SELECT uid FROM groups ORDER BY seq DESC LIMIT 1").fetchone()
    meta = read_meta(db)
    served_from = str(meta.get("served_from", ""))
    oldest = PolicyVersion(*map(int, served_from.split("."))) if served_from else None
    return Recovered(
        groups=[GroupRecord._make(row) for row in groups],
        issued=issued,
        final=final,
        dropped=dict(db.execute(dropped, (DROPPED,))),
        version=next(reversed(published), None),
        versions=[PolicyVersion(*row[:2]) for row in versions],
        served={version: trained for version, trained in published.items() if oldest and version >= oldest},
        covered_step=meta.get("covered_step", 0),  # type: ignore[arg-type]
        last_uid=last_issued[0] if last_issued else None,
        closed=str(meta.get("closed", "")) or None,
        holders=holders(meta),
        total_groups=meta.get("total_groups"),  # type: ignore[arg-type]
    )


def history(db: sqlite3.Connection) -> list[Issued]:
    """All groups of the run, in the order of issue."""
    success = "CASE WHEN state = ? THEN COALESCE(success, 0.0) ELSE success END"
    found = db.execute(f"SELECT uid, number, {success} FROM groups ORDER BY seq", (DROPPED,))
    return list(map(Issued._make, found))


def payload_locations(db: sqlite3.Connection) -> dict[str, RecordLocation]:
    """Location of each finished group's payload, by uid."""
    rows = db.execute("SELECT uid, segment, offset, length FROM payloads")
    return {uid: RecordLocation(*location) for uid, *location in rows}


def states(db: sqlite3.Connection, uids: Sequence[str]) -> dict[str, str]:
    """State of each of these groups that was ever issued."""
    found = db.execute(f"SELECT uid, state FROM groups WHERE uid IN ({', '.join('?' * len(uids))})", list(uids))
    return dict(found)


def read_meta(db: sqlite3.Connection) -> dict[str, str | int | float]:
    return dict(db.execute("SELECT key, value FROM meta ORDER BY key"))


def _upsert(db: sqlite3.Connection, table: str, key: str, columns: tuple[str, ...], rows: Sequence[tuple]) -> None:
    """Many rows per statement: `sqlite3` releases the interpreter lock at each, and under a busy event loop it takes
    up to the switch interval (5 ms) to get it back."""
    for first in range(0, len(rows), _ROWS_PER_STATEMENT):
        some = rows[first : first + _ROWS_PER_STATEMENT]
        db.execute(_upsert_sql(table, key, columns, len(some)), [value for row in some for value in row])


def _delete(db: sqlite3.Connection, table: str, key: str, values: Sequence[str]) -> None:
    """Many rows per statement, as in `_upsert`."""
    for first in range(0, len(values), _KEYS_PER_STATEMENT):
        some = values[first : first + _KEYS_PER_STATEMENT]
        db.execute(f"DELETE FROM {table} WHERE {key} IN ({', '.join('?' * len(some))})", some)


@cache
def _upsert_sql(table: str, key: str, columns: tuple[str, ...], rows: int) -> str:
    values = f"({', '.join('?' * len(columns))})"
    # columns that never change stay out of the update, so that the index on `uid` is not written again
    fixed = {*key.split(", "), "uid", "prompt_id", "epoch", "issued_s"}
    updates = ", ".join(f"{c} = excluded.{c}" for c in columns if c not in fixed)
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([values] * rows)} "
        f"ON CONFLICT ({key}) DO UPDATE SET {updates}"
    )


def _connect_readonly(path: Path) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?mode=ro"
    try:
        db = sqlite3.connect(uri, uri=True, isolation_level=None)
        try:
            db.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            db.close()
            if path.with_name(path.name + "-wal").exists():
                raise
            # read-only folder: SQLite cannot create its shared memory there, and needs none without a WAL
            db = sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None)
            db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as e:
        raise LedgerError(f"{path} cannot be read as a ledger: {e}; it was not changed") from e
    return db


def _check(db: sqlite3.Connection, path: Path, thorough: bool, may_be_empty: bool = False) -> None:
    """Raises LedgerError unless this is a ledger of this schema and, if ``thorough``, SQLite finds no damage."""
    try:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        schema = db.execute("PRAGMA user_version").fetchone()[0]
        empty = not db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        found = [row[0] for row in db.execute("PRAGMA quick_check(3)")] if thorough else ["ok"]
    except sqlite3.DatabaseError as e:
        raise LedgerError(f"{path} is damaged: {e}; it was not changed, restore it from a copy") from e
    if empty and may_be_empty and not application:
        return  # a crash before its schema was written
    if application != _APPLICATION_ID:
        raise LedgerError(f"{path} is an SQLite file of another program, not an asyncrl ledger; it was not changed")
    if schema != SCHEMA_VERSION:
        raise LedgerError(f"{path} has schema {schema}, expected {SCHEMA_VERSION}: use the release that wrote it")
    if found != ["ok"]:
        what = "; ".join(" ".join(found).splitlines())
        raise LedgerError(f"{path} is damaged: {what}; it was not changed, restore it from a copy")
