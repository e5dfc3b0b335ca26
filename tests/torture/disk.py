"""A disk that fails: a tape records what a process does to its files, faults strike at chosen events, and a power cut
takes back what was not synced.

A file system may lose, of everything since the last sync: the end of a file or pages of it, and the newest of the
changes of names in a folder, in each folder on its own. `cut_power` chooses one of these outcomes. SQLite writes past
the tape; of its write-ahead log only what no commit has acknowledged can be lost.
"""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from asyncrl.sample_queue.ledger import Ledger
from asyncrl.sample_queue.spool import Disk

PAGE = 4096


class Tape(Disk):
    """Records into ``record``, outside of ``root``, every change of a file below ``root``. Strikes once: at event
    ``at`` the process dies (``kill``), or from there on the disk fails for ``length`` events (``full``, ``broken``,
    ``slow``). ``install`` before the work begins, in a process of its own."""

    def __init__(self, root: Path, record: Path, fault: str, at: int, length: int) -> None:
        self._root, self._graves = str(root.resolve()), record.with_suffix(".graves")
        self._graves.mkdir()
        self._fd = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._fault, self._at, self._length = fault, at, length
        self.events = 0
        self._busy = False

    def install(self) -> None:
        self._fsync, self._fdatasync = os.fsync, os.fdatasync
        os.fsync, os.fdatasync = self.fsync, self.sync
        commit = Ledger.commit

        def recorded(ledger, *args, **kwargs):
            self.event("commit", can_fail=False)
            commit(ledger, *args, **kwargs)
            wal = f"{ledger.path}-wal"
            self._write("committed", wal, os.path.getsize(wal) if os.path.exists(wal) else 0)
            self.event("committed", can_fail=False)

        Ledger.commit = recorded
        sys.addaudithook(self._audit)

    # -- the spool's writes, and syncs ---------------------------------------------------------------------------------

    def write(self, fd, buffers, offset):
        self.event("write")
        return super().write(fd, buffers, offset)

    def sync(self, fd):
        self._synced(fd, self._fdatasync)

    def fsync(self, fd):
        self._synced(fd, self._fsync)

    def _synced(self, fd, sync) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        self.event("sync")
        sync(fd)
        if path.startswith(self._root):
            if os.path.isdir(path):
                self._write("folder", path)
            else:
                self._write("file", path, os.fstat(fd).st_size)

    # -- changes of names ----------------------------------------------------------------------------------------------

    def _audit(self, name: str, args: tuple) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            self._note(name, args)
        finally:
            self._busy = False

    def _note(self, name: str, args: tuple) -> None:
        if name == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
            if self._ours(args[0]):
                self._strike()
                there = os.path.exists(args[0])
                kept = there and not args[2] & os.O_TRUNC
                self._write("open", os.path.abspath(args[0]), there, os.path.getsize(args[0]) if kept else 0)
        elif name in ("os.rename", "os.link") and self._ours(args[1]):
            self._strike()
            source, target = (os.path.abspath(os.fspath(path)) for path in args[:2])
            self._write("rename" if name == "os.rename" else "link", source, target, self._buried(target))
        elif name == "os.remove" and args[1] == -1 and self._ours(args[0]):
            self._strike()
            path = os.path.abspath(os.fspath(args[0]))
            self._write("remove", path, self._buried(path))
        elif name in ("os.mkdir", "os.symlink") and self._ours(args[-2 if name == "os.symlink" else 0]):
            self._strike()
            self._write("new", os.path.abspath(os.fspath(args[1 if name == "os.symlink" else 0])))

    def _ours(self, path) -> bool:
        path = os.path.abspath(os.fspath(path))
        return path.startswith(self._root) and ".sqlite" not in path

    def _buried(self, path: str) -> str | None:
        """A link to the file that is about to be replaced or removed."""
        if not os.path.isfile(path) or os.path.islink(path):
            return None
        grave = str(self._graves / f"{self.events}-{len(os.listdir(self._graves))}")
        os.link(path, grave)
        return grave

    # -- events --------------------------------------------------------------------------------------------------------

    def event(self, what: str, can_fail: bool = True) -> None:
        """Counts an event and strikes if it is due; with ``can_fail`` it may raise OSError."""
        self._strike(can_fail)

    def _strike(self, can_fail: bool = False) -> None:
        self.events += 1
        since = self.events - self._at
        if self._fault == "kill" and since == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if 0 <= since < self._length:
            if self._fault == "slow":
                time.sleep(0.02)
            elif can_fail and self._fault in ("full", "broken"):
                number = errno.ENOSPC if self._fault == "full" else errno.EIO
                raise OSError(number, os.strerror(number))

    def _write(self, *entry) -> None:
        os.write(self._fd, (json.dumps(entry) + "\n").encode())


def cut_power(record: Path, random: random.Random) -> int:
    """Takes back some of what the recorded process, which is dead, did not sync. Returns the number of losses."""
    synced: dict[str, int] = {}  # file → bytes on disk
    unsynced: set[str] = set()  # files written since their last sync
    pending: dict[str, list[list]] = {}  # folder → changes of names that are not on disk
    for line in record.read_text().splitlines():
        kind, path, *rest = json.loads(line)
        if kind == "open":
            unsynced.add(path)
            synced[path] = min(rest[1], synced.get(path, rest[1]))  # what earlier processes left is on disk
            if not rest[0]:
                pending.setdefault(os.path.dirname(path), []).append(["new", path])
        elif kind == "file":
            synced[path] = rest[0]
            unsynced.discard(path)
        elif kind == "committed":
            synced[path] = rest[0]
            unsynced.add(path)
        elif kind == "folder":
            pending.pop(path, None)
        elif kind in ("rename", "link"):
            target, grave = rest
            pending.setdefault(os.path.dirname(target), []).append([kind, path, target, grave])
            _move(path, target, synced, unsynced, pending)
        else:
            pending.setdefault(os.path.dirname(path), []).append([kind, path, *rest])
    losses = sum(_lose_bytes(Path(path), synced.get(path, 0), random) for path in sorted(unsynced))
    for folder in sorted(pending, key=len, reverse=True):
        changes = pending[folder]
        for change in reversed(changes[random.randint(0, len(changes)) :]):
            losses += 1
            with contextlib.suppress(OSError):
                _undo(*change)
    return losses


def _move(source: str, target: str, synced: dict[str, int], unsynced: set[str], pending: dict[str, list[list]]) -> None:
    """Files below a renamed path have other names from now on."""
    moved = lambda path: target + path[len(source) :]
    inside = lambda path: path == source or path.startswith(f"{source}/")
    for path in filter(inside, {*synced, *unsynced}):
        if path in synced:
            synced[moved(path)] = synced[path]
        if path in unsynced:
            unsynced.add(moved(path))
    for folder in [*filter(inside, pending)]:
        changes = pending.pop(folder)
        pending[moved(folder)] = [
            [kind, *(moved(p) if p and inside(p) else p for p in paths)] for kind, *paths in changes
        ]


def _lose_bytes(path: Path, synced: int, random: random.Random) -> int:
    if not path.is_file() or (size := path.stat().st_size) <= synced or random.random() < 0.3:
        return 0
    if random.random() < 0.6 or size - synced < PAGE:
        os.truncate(path, random.randint(synced, size))
    else:  # a page that was never written, before one that was
        at = random.randint(synced, size - 1)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes(min(PAGE, size - at)))
    return 1


def _undo(kind: str, path: str, target: str | None = None, grave: str | None = None) -> None:
    if kind == "new":
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    elif kind == "remove":
        if target is not None and not os.path.exists(path):
            os.link(target, path)
    elif target is not None:
        if kind == "rename":
            os.rename(target, path)
        else:
            os.unlink(target)
        if grave is not None:
            os.link(grave, target)
