"""Durable storage of the queue's state: payloads in the spool, rows in the ledger, one writer thread. Snapshots of
groups in flight are in a store of their own.

    write(changes) ──► pending ──► writer thread: spool append, fdatasync ──► SQLite commit ──► all callers return
                          ▲                                                        │
                          └── changes that arrive meanwhile form the next commit ──┘

One flush and one transaction serve all concurrent callers (group commit). The spool always comes first: a crash in
between leaves a record without a reference, never a row without its payload. The changes of one `write` are committed
atomically. The writer thread persists the rows of `asyncrl.sample_queue.group_state` without checking them::

    journal = Journal(run_dir, meta={"run": "a", "groups_per_version": 16})
    changes = Changes()
    table = GroupTable(journal.recover(), changes)
    table.finish(group, payload)
    await journal.write(changes.take())              # on disk from here on
    await journal.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.disk.files import make_folder, rename, sync_tree
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.sample_queue.ledger import (
    FILE,
    Ledger,
    LedgerError,
    history,
    payload_locations,
    read_meta,
    reading,
    recover,
    states,
)
from asyncrl.sample_queue.messages import Issued, Snapshot
from asyncrl.sample_queue.records import IN_FLIGHT, Changes, JournalError, Recovered
from asyncrl.sample_queue.snapshots import FILE as SNAPSHOTS
from asyncrl.sample_queue.snapshots import SnapshotStore
from asyncrl.sample_queue.spool import SEGMENT_BYTES, Disk, RecordLocation, Spool, Torn, segment_name

COPIES = "journal"  #: in the folder of a run whose journal is on another disk
_PARTIAL, _BEFORE = ".partial", ".before"  # a copy being written, and the previous one


@dataclass(frozen=True)
class JournalStats:
    """Totals since opening. ``seconds``: in which the writer thread wrote, and waited for the disk. ``cpu_s``: its CPU
    seconds; payloads are hashed in the caller's."""

    commits: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Write:
    changes: Changes
    done: asyncio.Future[None]


class Journal:
    """Owns and locks ``spool/``, ``ledger.sqlite`` and ``snapshots.sqlite`` in ``folder``, on a local disk. For one
    asyncio loop.

    Raises JournalError if another process has it open, LedgerError if a newer driver than that of ``driver_epoch`` has
    written it, SpoolError or LedgerError for damage, OSError if the folder cannot be written; nothing is overwritten
    then. ``torn``: half-written record that a crash left in the spool."""

    def __init__(
        self,
        folder: Path,
        meta: Mapping[str, str | int | float] | None = None,
        *,
        driver_epoch: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
        disk: Disk | None = None,
    ) -> None:
        self.folder = folder
        self._stats = JournalStats()
        spool = folder / "spool"
        make_folder(spool)
        with contextlib.ExitStack() as undo:
            lock = _lock(spool)
            undo.callback(os.close, lock)
            self._ledger = Ledger(folder / FILE, meta, driver_epoch)
            undo.callback(self._ledger.close)
            with reading(self._ledger.path, thorough=False) as db:
                known = read_meta(db)
                self._locations = payload_locations(db)  # of every payload that may still be read, by uid
                in_flight = {group.uid: group.attempt for group in recover(db).groups if group.state == IN_FLIGHT}
            self._acknowledged = int(known.get("spool_segment", 1)), int(known.get("spool_offset", 0))
            self._spool = Spool(spool, segment_bytes, self._acknowledged, disk)
            undo.callback(self._spool.close)
            self._snapshots = SnapshotStore(folder, in_flight)
            undo.callback(self._snapshots.close)
            self._files = undo.pop_all()
        self._swept = 0  # the process before may have died before it swept
        self._pending: list[_Write] = []
        self._to_freeze: list[tuple[Path, asyncio.Future[tuple[int, int]]]] = []
        self._arrived = threading.Condition()
        self._closed = False
        self._writing_since_s: float | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def torn(self) -> Torn | None:
        return self._spool.torn

    @property
    def failed(self) -> bool:
        """A write failed. Callers may have built on its changes, so further writes are refused until `recover`."""
        return self._error is not None

    @property
    def stalled_s(self) -> float:
        """Seconds for which the disk has not completed the current write; 0 between writes."""
        since_s = self._writing_since_s
        return 0.0 if since_s is None else now_s() - since_s

    def recover(self) -> Recovered:
        """State of all committed changes. After a failed write, callers continue from it and may write again."""
        with reading(self._ledger.path, thorough=False) as db:
            found = recover(db)
        with self._arrived:
            self._error = None
        return found

    def history(self) -> list[Issued]:
        """See `asyncrl.sample_queue.ledger.history`; of all changes that are on disk."""
        with reading(self._ledger.path, thorough=False) as db:
            return history(db)

    def write(self, changes: Changes) -> asyncio.Future[None]:
        """Queues ``changes`` at once, in the order of the calls; the future is done when they are on disk.

        A failed write, such as on a full disk, raises JournalError in all waiting calls: everything acknowledged before
        is safe. A cancelled call may have been written."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._arrived:
            if self._closed:
                raise JournalError(f"{self.folder}: the journal is closed")
            if self._error is not None:
                raise _failed_write(self.folder, self._error)
            self._pending.append(_Write(changes, done))
            self._arrived.notify()
        return done

    def states(self, uids: Sequence[str]) -> dict[str, str]:
        """Committed state of each of these groups that was ever issued, dropped and final ones included."""
        with reading(self._ledger.path, thorough=False) as db:
            return states(db, uids)

    def read(self, uid: str) -> bytes | None:
        """Payload of a group that is queued, leased or provisionally trained; None if there is none on disk.
        Thread-safe. Raises SpoolError."""
        location = self._locations.get(uid)
        return None if location is None else self._spool.read(location)

    async def snapshot(self, parts: Sequence[Snapshot]) -> None:
        """Stores parts of snapshots of groups in flight; returns when they are on disk. Raises JournalError."""
        try:
            await asyncio.wrap_future(self._snapshots.store(parts))
        except sqlite3.Error as e:
            raise _failed_write(self.folder, e) from None

    def snapshots(self, in_flight: Mapping[str, int]) -> dict[str, list[bytes]]:
        """Parts of the snapshot of each of these groups (uid → attempt) that has one of this attempt."""
        return self._snapshots.read(in_flight)

    def stats(self) -> JournalStats:
        return self._stats

    async def copy_to(self, folder: Path) -> None:
        """Replaces ``folder`` with a consistent copy of ledger and spool. Writing waits for a copy of the databases
        beside themselves, and continues while all is copied to ``folder``.

        ``folder`` may be on another file system, and a journal can be opened on the copy. A crash leaves the previous
        copy, at ``folder`` or beside it (see `found_copy`)."""
        frozen = self.folder / "copying"
        taken: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        with self._arrived:
            if self._closed:
                raise JournalError(f"{self.folder}: the journal is closed")
            self._to_freeze.append((frozen, taken))
            self._arrived.notify()
        end = await taken
        await asyncio.to_thread(_copy, frozen, folder, end)

    async def close(self) -> None:
        """Finishes pending writes and closes the files; may be repeated."""
        with self._arrived:
            self._closed = True
            self._arrived.notify()
        await asyncio.to_thread(self._thread.join)
        self._files.close()

    # -- the writer thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._pending or self._to_freeze or self._closed)
                batch, self._pending = self._pending, []
                to_freeze, self._to_freeze = self._to_freeze, []
            if not batch and not to_freeze:
                return
            self._writing_since_s = now_s()
            for folder, taken in to_freeze:
                self._freeze(folder, taken)
            error: Exception | None = None
            try:
                self._commit(batch)
            except Exception as e:
                error = e
            self._writing_since_s = None  # before the callers wake
            if error is not None:
                self._fail(batch, error)
            else:
                _settle(batch, lambda: None)

    def _commit(self, batch: Sequence[_Write]) -> None:
        """Makes a batch durable; raises if it could not be written, in which case no part of it is committed."""
        changes = Changes()
        for write in batch:
            changes.add(write.changes)
        if not changes:
            return  # calls that only wait for earlier ones
        began_s = now_s()
        locations = self._append(changes)
        meta: dict[str, str | int | float] = {**changes.meta}
        if (end := self._spool.end) != self._acknowledged:
            meta["spool_segment"], meta["spool_offset"] = end
        self._ledger.commit(list(changes.groups.values()), list(changes.versions.values()), locations, meta)
        self._acknowledged = end
        for uid, location in locations.items():
            if location is None:
                del self._locations[uid]
            else:
                self._locations[uid] = location
        self._snapshots.end(uid for uid, group in changes.groups.items() if group.state != IN_FLIGHT)
        if "covered_step" in meta or self._spool.end[0] != self._swept:
            self._sweep()
        self._stats = replace(
            self._stats,
            commits=self._stats.commits + 1,
            seconds=self._stats.seconds + now_s() - began_s,
            cpu_s=time.thread_time(),
        )

    def _append(self, changes: Changes) -> dict[str, RecordLocation | None]:
        """Writes the payloads of ``changes`` to disk. Returns the new location of each, None for a deleted one."""
        records = {uid: record for uid, record in changes.payloads.items() if record is not None}
        locations: dict[str, RecordLocation | None] = {}
        if records:
            locations |= zip(records, self._spool.append_all(list(records.values())), strict=True)
            self._spool.flush()
        deleted = (uid for uid, record in changes.payloads.items() if record is None and uid in self._locations)
        return locations | dict.fromkeys(deleted)

    def _freeze(self, folder: Path, taken: asyncio.Future[tuple[int, int]]) -> None:
        """Copies the ledger and hard-links the segments, which only grow."""
        try:
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "spool").mkdir(parents=True)
            self._snapshots.copy_to(folder / SNAPSHOTS)  # before the ledger, which tells which groups are in flight
            self._ledger.copy_to(folder / FILE)
            for segment in self._spool.segments:
                name = segment_name(segment)
                os.link(self.folder / "spool" / name, folder / "spool" / name)
        except Exception as error:
            outcome = functools.partial(taken.set_exception, _failed_write(self.folder, error))
        else:
            outcome = functools.partial(taken.set_result, self._spool.end)
        with contextlib.suppress(RuntimeError):
            taken.get_loop().call_soon_threadsafe(lambda: None if taken.done() else outcome())

    def _sweep(self) -> None:
        """Deletes segments without a live payload. Called after the commit, so that no row ever lacks its payload; a
        failure fails the next write, as this one is on disk."""
        needed = {location.segment for location in self._locations.values()}
        try:
            for segment in self._spool.segments[:-1]:
                if segment not in needed:
                    self._spool.release(segment)
        except OSError as e:
            with self._arrived:
                self._error = e
        self._swept = self._spool.end[0]

    def _fail(self, batch: Sequence[_Write], error: Exception) -> None:
        """Fails the batch, and all calls that arrived meanwhile, as they may build on it."""
        with self._arrived:
            self._error = error
            batch = [*batch, *self._pending]
            self._pending = []
        _settle(batch, lambda: _failed_write(self.folder, error))


def found_copy(folder: Path) -> Path | None:
    """Newest complete copy that `Journal.copy_to` made at ``folder``."""
    return next((path for path in (folder, folder.with_suffix(_BEFORE)) if (path / FILE).is_file()), None)


def newest_copy(run: Path) -> Path | None:
    """The newest driver's copy among those in the folder of a run, which are named by the drivers' epochs."""
    epochs = sorted({path.with_suffix("") for path in _copies(run / COPIES)}, reverse=True)
    return next((copy for epoch in epochs if (copy := found_copy(epoch)) is not None), None)


def remove_older_copies(copy: Path) -> None:
    """Those of earlier drivers than that of ``copy``, which is complete, and whose driver is the newest one."""
    for other in _copies(copy.parent):
        if other.with_suffix("").name < copy.name:
            shutil.rmtree(other, ignore_errors=True)


def _copies(folder: Path) -> list[Path]:
    """Those of all drivers, complete or not."""
    return list(folder.glob("[0-9]*"))


def _copy(frozen: Path, folder: Path, end: tuple[int, int]) -> None:
    """Moves the frozen files to another disk, up to the spool's ``end`` at that moment."""
    partial, before = folder.with_suffix(_PARTIAL), folder.with_suffix(_BEFORE)
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(folder.parent)
    shutil.copytree(frozen, partial)
    os.truncate(partial / "spool" / segment_name(end[0]), end[1])
    shutil.rmtree(frozen)
    sync_tree(partial)
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        rename(folder, before)
    rename(partial, folder)
    shutil.rmtree(before, ignore_errors=True)


def _failed_write(folder: Path, error: Exception) -> JournalError:
    """A new exception for each caller: an exception raised by several tasks would accumulate their tracebacks."""
    if isinstance(error, LedgerError):
        failure = JournalError(f"the journal was not written: {error}")
    else:
        advice = "; make room or restore write access, then resume the run" if _of_the_disk(error) else ""
        failure = JournalError(
            f"{folder}: the journal could not be written: {error}. All acknowledged groups are safe{advice}"
        )
    failure.__cause__ = error
    return failure


def _of_the_disk(error: Exception) -> bool:
    return isinstance(error, (OSError, sqlite3.OperationalError))


def _settle(batch: Sequence[_Write], error: Callable[[], Exception | None]) -> None:
    """Wakes all callers with one call into their loop; ``error`` creates the exception that each raises, if any."""
    if not batch:
        return

    def wake() -> None:
        for write in batch:
            if write.done.done():
                continue  # its caller was cancelled
            if (failure := error()) is None:
                write.done.set_result(None)
            else:
                write.done.set_exception(failure)

    with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits any more
        batch[0].done.get_loop().call_soon_threadsafe(wake)


def _lock(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise JournalError(
            f"{folder.parent} is in use by another process: two runs on one folder would overwrite each other. "
            "End the other run, or choose another run_dir"
        ) from None
    return fd
