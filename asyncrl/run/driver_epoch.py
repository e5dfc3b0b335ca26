"""Epochs of a run's drivers: only the newest driver of a run folder adds to its history.

    drivers/000001.json          the first driver, by exclusive creation; its time changes while the driver lives
    drivers/000001.ended         it ended in order
    drivers/000002.found.json    the checkpoints that the second driver found after it had begun

A file lock excludes a second driver on one machine; on a network disk each machine may have its own locks. So a driver
also takes the next epoch number. One that was stopped, or lost its disk, finds on waking that its epoch is over, and
ends. A checkpoint that it completed meanwhile is not among those that the next driver found, so every resume ignores
it. Exclusive creation by a hard link is atomic on network disks, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.disk.files import make_folder, sync, write_whole
from asyncrl.models.config import CheckpointError
from asyncrl.processes.identity import Process, machine

FOLDER = "drivers"
BEAT_S = 5.0
SILENT_S = 4 * BEAT_S  # a driver of another machine whose file does not change for this long is dead
_POLL_S = 0.2

log = logging.getLogger(__name__)


class EpochOver(RuntimeError):
    """A newer driver has taken over the run."""


class InUse(RuntimeError):
    """Another driver of the run is alive."""


@dataclass(frozen=True)
class _Driver:
    """Content of an epoch's file."""

    host: str
    machine: str
    process: int
    process_started: int

    @classmethod
    def this(cls) -> _Driver:
        me = Process.of(os.getpid())
        return cls(socket.gethostname(), machine(), me.pid, me.started)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class DriverEpoch:
    """Epoch ``number`` of the run in ``run``, made by `take`."""

    def __init__(self, run: Path, number: int) -> None:
        self._folder, self.number = run / FOLDER, number

    @classmethod
    def take(cls, run: Path, patience_s: float) -> DriverEpoch:
        """The epoch after the newest one. Raises InUse, see `wait_for_previous`."""
        folder = run / FOLDER
        make_folder(folder)
        while True:
            wait_for_previous(run, patience_s)
            number = _newest(folder) + 1
            if _created(_file(folder, number), asdict(_Driver.this())):
                return cls(run, number)

    def check(self) -> None:
        """Raises EpochOver if a newer driver has begun."""
        if (newest := _newest(self._folder)) > self.number:
            driver = _driver(_file(self._folder, newest)) or "unknown"
            raise EpochOver(f"another driver ({driver}) has taken over this run; this one, epoch {self.number}, ends")

    async def run(self) -> None:
        """Shows that the driver is alive, until cancelled. Raises EpochOver, and OSError if that fails for so long that
        it counts as dead."""
        beat_s = time.monotonic()
        while True:
            try:
                await asyncio.to_thread(self._beat)
                beat_s = time.monotonic()
            except OSError as e:  # a network disk may answer the next time
                if time.monotonic() - beat_s > SILENT_S:
                    raise
                log.warning("%s: the driver cannot show that it is alive: %s", self._folder, e)
            await asyncio.sleep(BEAT_S)

    def found(self, checkpoints: Mapping[str, str]) -> None:
        """Records the checkpoints (name → digest) at the beginning of this epoch."""
        write_whole(self._folder / f"{self.number:06d}.found.json", json.dumps(checkpoints, indent=2))

    def end(self) -> None:
        """The driver ends: the next one need not wait."""
        with contextlib.suppress(OSError):  # then it waits
            (self._folder / f"{self.number:06d}.ended").touch()

    def _beat(self) -> None:
        self.check()
        os.utime(_file(self._folder, self.number))


class DriverWatch:
    """The run's newest driver, seen by another process. ``driver`` is None if there is none, or its file is
    damaged."""

    def __init__(self, run: Path) -> None:
        folder = run / FOLDER
        number = _newest(folder)
        self._path = _file(folder, number) if number else None
        self.driver = _driver(self._path) if self._path is not None else None
        self.elsewhere = self.driver is None or self.driver.machine != machine()
        self._beat, self._beat_s = self._changed(), time.monotonic()

    def lives(self) -> bool:
        """Asked again and again: one of another machine counts as alive until its file has not changed for
        `SILENT_S`."""
        if self._path is None or self._path.with_suffix(".ended").exists():
            return False
        if not self.elsewhere and self.driver is not None:
            return Process(self.driver.process, self.driver.process_started).alive
        if (beat := self._changed()) != self._beat:
            self._beat, self._beat_s = beat, time.monotonic()
        return time.monotonic() - self._beat_s <= SILENT_S

    def _changed(self) -> int:
        return self._path.stat().st_mtime_ns if self._path is not None else 0


def wait_for_previous(run: Path, patience_s: float) -> None:
    """Waits for the end of the run's newest driver. Raises InUse if it is still alive after ``patience_s``, or after
    `SILENT_S` if it is on another machine."""
    watch, began_s = DriverWatch(run), time.monotonic()
    while watch.lives():
        if time.monotonic() - began_s > max(patience_s, SILENT_S if watch.elsewhere else 0):
            raise InUse(f"{run} is in use by another driver, {watch.driver or 'whose file is damaged'}")
        time.sleep(_POLL_S)


def ended_in_order(run: Path) -> bool:
    """The run's newest driver has ended, see `DriverEpoch.end`."""
    folder = run / FOLDER
    return _file(folder, _newest(folder)).with_suffix(".ended").exists()


def written_too_late(run: Path, epoch: int, name: str, digest: str) -> bool:
    """True for a checkpoint of driver ``epoch`` that a later driver did not find when it began. Raises
    CheckpointError."""
    later = sorted(path for path in (run / FOLDER).glob("*.found.json") if int(path.name[:6]) > epoch)
    if not later:
        return False
    try:
        return dict(json.loads(later[0].read_bytes())).get(name) != digest
    except ValueError as e:
        raise CheckpointError(
            f"{later[0]} is damaged ({e}); it lists the checkpoints that were there when the driver began. Restore it "
            "from a copy, or delete it to accept all checkpoints"
        ) from None


def _driver(path: Path) -> _Driver | None:
    """None if the file is damaged."""
    try:
        return _Driver(**json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        return None


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _newest(folder: Path) -> int:
    """Highest epoch taken, 0 if there is none."""
    return max((int(path.stem) for path in folder.glob("[0-9]*.json") if path.stem.isdigit()), default=0)


def _created(path: Path, content: Mapping[str, object]) -> bool:
    """Creates a file with its content; False if it exists."""
    own = path.with_suffix(f".{uuid.uuid4().hex}")
    write_whole(own, json.dumps(content, indent=2))
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    finally:
        own.unlink()
    sync(path.parent)
    return True
