"""The journal: payloads to the spool and their groups' lives to the ledger, durable before anybody is told so.

    write(events) ──► pending ──► writer thread: spool append, fdatasync ──► SQLite commit ──► every caller returns
                         ▲                                                        │
                         └────── all that arrives meanwhile is the next commit ───┘

One flush and one transaction serve all callers of a moment (group commit). The spool always comes first: a crash in
between leaves a record that nobody refers to, never a row without its payload. Each `write` is one whole: all of its
events are in the ledger, or none. ::

    journal = Journal(run_dir, meta={"run": "a", "groups_per_version": 16})
    found = journal.recover()
    await journal.rollback(step=12)                  # only when weights of a checkpoint are restored
    await journal.write([Issued("0/7", "7", 0, found.issued + 1, PolicyVersion(1, 4))])
    await journal.write([Finished(payload)])         # on disk from here on
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

from asyncrl.sample_queue.ledger import FILE, Ledger, Recovered, read_meta, reading, recover, states
from asyncrl.sample_queue.life import Changes, Event, JournalError, Lives, RolledBack
from asyncrl.sample_queue.spool import SEGMENT_BYTES, Disk, Place, Spool, Torn, segment_name

_PARTIAL, _BEFORE = ".partial", ".before"  # a copy that is being written, and the one before it


@dataclass(frozen=True)
class JournalStats:
    """Since opening. ``cpu_s``: CPU seconds of the writer thread (`Finished` hashes and measures in the caller's)."""

    commits: int = 0
    writes: int = 0
    events: int = 0
    payload_bytes: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Write:
    events: Sequence[Event]
    at_s: float
    done: asyncio.Future[None]


class Journal:
    """``folder`` is the run's, on a local disk; the journal owns ``spool/`` and ``ledger.sqlite`` in it and locks them
    against a second process. ``write`` is called from one asyncio loop.

    Raises JournalError if another process has it open, SpoolError or LedgerError for damage, OSError if the folder
    cannot be written; nothing is overwritten then. ``torn`` tells what a crash had left half-written in the spool.
    """

    def __init__(
        self,
        folder: Path,
        meta: Mapping[str, str | int | float] | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.time,
        disk: Disk | None = None,
    ) -> None:
        self.folder = folder
        self._clock = clock
        self._stats = JournalStats()
        spool = folder / "spool"
        spool.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            lock = _lock(spool)
            undo.callback(os.close, lock)
            self._ledger = Ledger(folder / FILE, meta)
            undo.callback(self._ledger.close)
            with reading(self._ledger.path, thorough=False) as db:
                told = read_meta(db)
                self._lives = _lives(recover(db))
            acknowledged = int(told.get("spool_segment", 1)), int(told.get("spool_offset", 0))
            self._spool = Spool(spool, segment_bytes, acknowledged, disk)
            undo.callback(self._spool.close)
            self._files = undo.pop_all()
        self._swept = self._spool.end[0]
        self._pending: list[_Write] = []
        self._to_freeze: list[tuple[Path, asyncio.Future[tuple[int, int]]]] = []
        self._arrived = threading.Condition()
        self._closed = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def torn(self) -> Torn | None:
        return self._spool.torn

    def recover(self) -> Recovered:
        """The state of everything committed so far."""
        with reading(self._ledger.path, thorough=False) as db:
            return recover(db)

    async def write(self, events: Sequence[Event]) -> None:
        """Returns when all of ``events`` are durable, in the order of the calls; they are one whole.

        Raises JournalError for an event that does not fit the life of its group (nothing of this call happened, other
        calls are not touched) and for a failed write, such as a full disk: everyone who waits gets it, what was
        acknowledged before is safe, and later calls may succeed. A call that is cancelled may have been written."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._arrived:
            if self._closed or self._failed is not None:
                raise JournalError(
                    f"{self.folder}: the journal " + (f"failed: {self._failed}" if self._failed else "is closed")
                )
            self._pending.append(_Write(events, self._clock(), done))
            self._arrived.notify()
        await done

    def states(self, uids: Sequence[str]) -> dict[str, str]:
        """The state of each of these groups that was ever issued, those whose life has ended included."""
        with reading(self._ledger.path, thorough=False) as db:
            return states(db, uids)

    def read(self, place: Place) -> bytes:
        """The payload of a group that is neither dropped nor final, or the newest snapshot of one in flight. From any
        thread. Raises SpoolError."""
        return self._spool.read(place)

    async def rollback(self, step: int) -> None:
        """The weights are those after train step ``step`` again: groups trained later and all leased ones are queued
        again, each at its place in the order of issue. Raises JournalError for a step before one that was covered."""
        await self.write([RolledBack(step)])

    def stats(self) -> JournalStats:
        return self._stats

    async def copy_to(self, folder: Path) -> None:
        """Put a copy of ledger and spool, as of one moment, in the place of ``folder``; writing goes on meanwhile.

        ``folder`` may be on another file system, and a journal can be opened on the copy. A crash leaves the copy
        before, at ``folder`` or beside it (see `found_copy`)."""
        frozen = self.folder / "copying"
        taken: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        with self._arrived:
            if self._closed or self._failed is not None:
                raise JournalError(f"{self.folder}: the journal is closed")
            self._to_freeze.append((frozen, taken))
            self._arrived.notify()
        end = await taken
        await asyncio.to_thread(_copy, frozen, folder, end)

    async def close(self) -> None:
        """Finish what was written, then give up the files. Again is harmless."""
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
            for folder, taken in to_freeze:
                self._freeze(folder, taken)
            if not batch:
                if to_freeze:
                    continue
                return
            try:
                outcomes = self._commit(batch)
            except Exception as error:
                self._fail(batch, error)
            else:
                _settle(outcomes)

    def _commit(self, batch: Sequence[_Write]) -> list[tuple[_Write, Exception | None]]:
        """Make a batch durable. Calls that do not fit are told so, one by one; raises if nothing could be written."""
        changes = Changes(issued=self._lives.issued, covered_step=self._lives.covered_step)
        before, end = changes.covered_step, self._spool.end
        outcomes: list[tuple[_Write, Exception | None]] = []
        for write in batch:
            try:
                staged = self._lives.stage(write.events, write.at_s)
            except JournalError as error:
                outcomes.append((write, error))
                continue
            self._lives.adopt(staged)
            changes.add(staged)
            outcomes.append((write, None))
        payload_bytes, partials = self._spool_payloads(changes)
        meta: dict[str, str | int | float] = {**changes.meta}
        if self._spool.end != end:
            meta["spool_segment"], meta["spool_offset"] = self._spool.end
        self._ledger.commit(changes.groups.values(), changes.versions, partials, meta)
        if changes.covered_step != before or self._spool.end[0] != self._swept:
            self._sweep()
        self._stats = replace(
            self._stats,
            commits=self._stats.commits + 1,
            writes=self._stats.writes + len(batch),
            events=self._stats.events + sum(len(write.events) for write in batch),
            payload_bytes=self._stats.payload_bytes + payload_bytes,
            cpu_s=time.thread_time(),
        )
        return outcomes

    def _spool_payloads(self, changes: Changes) -> tuple[int, dict[str, Place | None]]:
        """Payloads of ``changes`` to disk and their places into its groups. Returns bytes written, partials' places."""
        partials: dict[str, Place | None] = dict.fromkeys(changes.partials)
        snapshots = {uid: record for uid, record in changes.partials.items() if record is not None}
        records = [*changes.payloads.values(), *snapshots.values()]
        if records:
            places = iter(self._spool.append_all(records))
            self._spool.flush()
            for uid, place in zip(changes.payloads, places):
                changes.groups[uid] = placed = changes.groups[uid]._replace(**place._asdict())
                if uid in self._lives.groups:
                    self._lives.groups[uid] = placed
            placed_snapshots = dict(zip(snapshots, places))
            partials |= placed_snapshots
            self._lives.partials |= placed_snapshots
        return sum(len(record.payload) for record in records), partials

    def _freeze(self, folder: Path, taken: asyncio.Future[tuple[int, int]]) -> None:
        """Ledger and segments as they are now: the one copied, the others, which only grow, linked."""
        try:
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "spool").mkdir(parents=True)
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
        """Delete the segments that nobody will read again. After the commit, so that no row ever misses its payload."""
        needed = self._lives.segments()
        for segment in self._spool.segments[:-1]:
            if segment not in needed:
                self._spool.release(segment)
        self._swept = self._spool.end[0]

    def _fail(self, batch: Sequence[_Write], error: Exception) -> None:
        """Nothing of the batch happened. Those who came meanwhile built on it: they fail with it."""
        with self._arrived:
            batch = [*batch, *self._pending]
            self._pending = []
            try:
                self._lives = _lives(self.recover())
            except Exception as worse:
                self._failed = worse
        _settle([(write, _failed_write(self.folder, error)) for write in batch])


def found_copy(folder: Path) -> Path | None:
    """Where the newest whole copy is that `Journal.copy_to` put at ``folder``."""
    return next((path for path in (folder, folder.with_suffix(_BEFORE)) if (path / FILE).is_file()), None)


def _copy(frozen: Path, folder: Path, end: tuple[int, int]) -> None:
    """Move what was frozen to another disk, up to the spool's ``end`` of that moment."""
    partial, before = folder.with_suffix(_PARTIAL), folder.with_suffix(_BEFORE)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(frozen, partial)
    os.truncate(partial / "spool" / segment_name(end[0]), end[1])
    shutil.rmtree(frozen)
    for path in [*partial.rglob("*"), partial]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    partial.rename(folder)
    shutil.rmtree(before, ignore_errors=True)


def _failed_write(folder: Path, error: Exception) -> JournalError:
    """One for each caller: an exception that several tasks raise would gather all their tracebacks."""
    advice = "; make room or restore write access, then resume the run" if _of_the_disk(error) else ""
    failure = JournalError(
        f"{folder}: the journal could not be written: {error}. All that was acknowledged is safe{advice}"
    )
    failure.__cause__ = error
    return failure


def _of_the_disk(error: Exception) -> bool:
    return isinstance(error, (OSError, sqlite3.OperationalError))


def _settle(outcomes: Sequence[tuple[_Write, Exception | None]]) -> None:
    """Wake the callers, with one call into their loop."""

    def wake() -> None:
        for write, error in outcomes:
            if write.done.done():
                continue  # its caller was cancelled meanwhile
            if error is None:
                write.done.set_result(None)
            else:
                write.done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
        outcomes[0][0].done.get_loop().call_soon_threadsafe(wake)


def _lives(found: Recovered) -> Lives:
    return Lives(found.groups, found.partials, found.issued, found.version, found.covered_step)


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
