"""Store of the snapshots of groups in flight: an SQLite file that reuses the space of groups that have ended.

The snapshot of a group is a chain of parts: part 0 is whole, and each later part holds what is new since the one
before it. One thread writes, so that a finished group never waits for a snapshot. Snapshots only save work, so a
damaged one is reported and its group starts again::

    store = SnapshotStore(run_dir, in_flight={"e0-000007": 0})
    await asyncio.wrap_future(store.store([Snapshot("e0-000007", attempt=0, part=0, data=b"...")]))   # on disk
    store.read({"e0-000007": 0})            # {"e0-000007": [b"..."]}
    store.end(["e0-000007"])                # its space is free from the next `store` on
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from asyncrl.sample_queue.messages import Snapshot

log = logging.getLogger(__name__)

FILE = "snapshots.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS parts (
  uid TEXT NOT NULL,
  attempt INTEGER NOT NULL,
  part INTEGER NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (uid, part)
)
"""
_WAL_BYTES = 4 * 1024 * 1024  # what the write-ahead log keeps on disk after a larger transaction
_DIGEST_BYTES = 8  # before the data of each part


class SnapshotStore:
    """Snapshots in ``folder``. ``in_flight``: attempt of each group in flight, by uid; others are deleted.

    Raises sqlite3.OperationalError if the folder cannot be written."""

    def __init__(self, folder: Path, in_flight: Mapping[str, int]) -> None:
        self._path = folder / FILE
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._stored: set[str] = set()  # uids, from when they are to be stored until they end
        self._ended: deque[str] = deque()  # uids that are still on disk
        try:
            self._thread.submit(self._open, in_flight).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def store(self, parts: Sequence[Snapshot]) -> Future[None]:
        """Adds parts; done when they are on disk. A repeated part replaces itself, and part 0 the whole chain."""
        self._stored.update(part.uid for part in parts)
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        return self._thread.submit(self._store, parts, ended)

    def end(self, uids: Iterable[str]) -> None:
        """Deletes the snapshots of these groups with the next `store`, after all that was stored before. May be called
        by another thread than `store`."""
        ended = [uid for uid in uids if uid in self._stored]
        self._stored.difference_update(ended)
        self._ended.extend(ended)

    def read(self, in_flight: Mapping[str, int]) -> dict[str, list[bytes]]:
        """Whole chain of each of these groups (uid → attempt) that has one of this attempt."""
        return self._thread.submit(self._read, in_flight).result()

    def copy_to(self, path: Path) -> None:
        """Copies everything stored so far into one file."""
        self._thread.submit(self._copy_to, path).result()

    def close(self) -> None:
        self.store([]).add_done_callback(_report)
        self._thread.submit(lambda: self._db.close()).result()
        self._thread.shutdown()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _open(self, in_flight: Mapping[str, int]) -> None:
        try:
            self._db = _connected(self._path)
        except sqlite3.OperationalError:
            raise  # no access, no space
        except sqlite3.DatabaseError as e:
            aside = self._path.with_suffix(".damaged")
            log.warning("%s is damaged (%s) and was renamed to %s: groups in flight start again", self._path, e, aside)
            self._path.replace(aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(FILE + suffix).unlink(missing_ok=True)
            self._db = _connected(self._path)
        found = {uid for (uid,) in self._db.execute("SELECT DISTINCT uid FROM parts")}
        self._stored = found.intersection(in_flight)
        self._store([], list(found - self._stored))

    def _store(self, parts: Sequence[Snapshot], ended: Sequence[str]) -> None:
        replaced = [part.uid for part in parts if part.part == 0]
        try:
            with self._transaction():
                self._db.executemany("DELETE FROM parts WHERE uid = ?", [(uid,) for uid in (*ended, *replaced)])
                self._db.executemany(
                    "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?)",
                    [(p.uid, p.attempt, p.part, xxhash.xxh3_64_digest(p.data) + p.data) for p in parts],
                )
        except BaseException:
            self._ended.extend(ended)
            raise
        self._shrink()

    def _read(self, in_flight: Mapping[str, int]) -> dict[str, list[bytes]]:
        chains = {}
        for uid in in_flight:
            query = "SELECT attempt, part, data FROM parts WHERE uid = ? ORDER BY part"
            try:
                rows = self._db.execute(query, (uid,)).fetchall()
                chain = [_checked(data) for attempt, part, data in rows if attempt == in_flight[uid]]
            except (sqlite3.DatabaseError, ValueError) as e:
                log.warning("%s: the snapshot of group %s is damaged (%s): its samples start again", self._path, uid, e)
                continue
            if chain and [part for _, part, _ in rows] == list(range(len(chain))):
                chains[uid] = chain
        return chains

    def _copy_to(self, path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as copy:
            self._db.backup(copy)

    @contextlib.contextmanager
    def _transaction(self):  # type: ignore[no-untyped-def]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _shrink(self) -> None:
        """Returns free pages to the disk when they are more than half of the file."""
        pages, free = (self._db.execute(f"PRAGMA {count}").fetchone()[0] for count in ("page_count", "freelist_count"))
        if free > pages / 2:
            self._db.executescript("PRAGMA incremental_vacuum")  # `execute` would free one page


def _connected(path: Path) -> sqlite3.Connection:
    """Raises sqlite3.DatabaseError for a damaged file."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))
        db.execute(_SCHEMA)
    except BaseException:
        db.close()
        raise
    return db


def _report(last: Future[None]) -> None:
    """A failed deletion only costs space."""
    if error := last.exception():
        log.warning("snapshots of ended groups were not deleted: %s", error)


def _checked(stored: bytes) -> bytes:
    """Data of a part. Raises ValueError if it is not what was stored."""
    digest, data = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if xxhash.xxh3_64_digest(data) != digest:
        raise ValueError(f"expected checksum {digest.hex()}, found {xxhash.xxh3_64_hexdigest(data)}")
    return data
