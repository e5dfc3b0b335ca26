"""Spool: payloads in append-only segment files with checksums; deleted a segment at a time.

    spool/000001.seg    record | record | record | …
    record              magic, payload length, xxh3_64 of these and the payload (24 bytes) | payload

A crash during a write leaves a torn tail, which opening cuts off and reports. Damage anywhere else is an error: a spool
that lost an acknowledged record must not look intact. One process writes, any may read::

    spool = Spool(Path("run/spool"))
    location = spool.append(payload)
    spool.flush()                   # on disk from here on
    assert spool.read(location) == payload
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash

from asyncrl.disk.files import make_folder, sync

Buffer = bytes | bytearray | memoryview

SEGMENT_BYTES = 64 * 1024 * 1024

_MAGIC = b"ASP2"
_FIELDS = struct.Struct("<4s4xQ")  # magic, payload bytes
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_MOST_BUFFERS = 1024  # per writev (IOV_MAX on Linux)


class SpoolError(RuntimeError):
    """The spool is damaged or cannot be written; the message names file and offset, and expected and found values."""


class RecordLocation(NamedTuple):
    """A record in the spool: its header is at ``offset`` of the segment, its payload has ``length`` bytes."""

    segment: int
    offset: int
    length: int


class Record(NamedTuple):
    """A payload and its header, ready to be written; made by `record`."""

    header: bytes
    payload: memoryview


def record(payload: Buffer) -> Record:
    view = memoryview(payload).cast("B")
    fields = _FIELDS.pack(_MAGIC, len(view))
    return Record(fields + _CHECKSUM.pack(_checksum(fields, view)), view)


class Torn(NamedTuple):
    """Torn tail that opening cut off: ``cut_bytes`` from ``offset`` on, where the last whole record ends."""

    path: Path
    offset: int
    cut_bytes: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}: cut {self.cut_bytes} bytes of an unfinished write at offset {self.offset} ({self.why})"


def segment_name(segment: int) -> str:
    return f"{segment:06d}.seg"


class Disk:
    """The two system calls that write; fault tests replace them."""

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)


class Spool:
    """``acknowledged``: (segment, offset) up to which records were acknowledged. A broken record before it is damage,
    one after it a torn tail. If None, a broken record is a torn tail unless a whole record follows.

    Raises SpoolError for damage, OSError if the folder cannot be written. ``torn``: tail that opening cut off."""

    def __init__(
        self,
        folder: Path,
        segment_bytes: int = SEGMENT_BYTES,
        acknowledged: tuple[int, int] | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.folder = folder
        self.torn: Torn | None = None
        self._segment_bytes = segment_bytes
        self._disk = disk or Disk()
        self._failed: OSError | None = None
        make_folder(folder)
        self._segments = sorted(int(path.stem) for path in folder.glob("*.seg"))
        if acknowledged is not None and acknowledged[1] and acknowledged[0] not in self._segments:
            raise SpoolError(
                f"{self._path(acknowledged[0])} is missing: expected {acknowledged[1]} acknowledged bytes in it"
            )
        for segment in self._segments:
            self._check(segment, acknowledged)
        self._fd = -1
        self._open(self._segments[-1] if self._segments else 1)

    @property
    def segments(self) -> tuple[int, ...]:
        """Existing segments, the active one last."""
        return tuple(self._segments)

    @property
    def end(self) -> tuple[int, int]:
        """(segment, offset) of the next record."""
        return self._segments[-1], self._size

    # -- writing ---------------------------------------------------------------------------------------------------

    def append(self, payload: Buffer) -> RecordLocation:
        return self.append_all([record(payload)])[0]

    def append_all(self, records: Sequence[Record]) -> list[RecordLocation]:
        """Appends records without copying their payloads, in few system calls; nothing is durable before `flush`.
        After an OSError (disk full, …) all earlier records are intact, and appending may continue."""
        if self._failed is not None:
            raise SpoolError(f"{self.folder}: an earlier flush failed ({self._failed}); reopen the spool")
        locations: list[RecordLocation] = []
        buffers: list[Buffer] = []
        end = self._size
        for header, payload in records:
            size = HEADER_BYTES + len(payload)
            if end and end + size > self._segment_bytes:
                self._write(buffers)
                self.flush()  # a segment is whole before the next one exists: only the last can have a torn tail
                self._open(self._segments[-1] + 1)
                buffers, end = [], 0
            buffers += [header, payload]
            locations.append(RecordLocation(self._segments[-1], end, len(payload)))
            end += size
        self._write(buffers)
        return locations

    def flush(self) -> None:
        """Makes all appended records durable: they survive a power loss when this returns.

        After an error the kernel may have discarded the unwritten pages, and the next flush would succeed without them,
        so the spool refuses further records."""
        try:
            self._disk.sync(self._fd)
        except OSError as e:
            self._failed = e
            raise

    def release(self, segment: int) -> None:
        """Deletes a whole segment. Raises SpoolError for the active one or an unknown one."""
        if segment not in self._segments[:-1]:
            raise SpoolError(
                f"{self._path(segment)} cannot be deleted: expected one of the finished segments {self._segments[:-1]}"
            )
        self._path(segment).unlink()
        self._segments.remove(segment)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, location: RecordLocation) -> bytes:
        """Payload at ``location``, checksum verified. Thread-safe. Raises SpoolError."""
        path = self._path(location.segment)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SpoolError(f"{path} is missing: expected {location.length} bytes at {location.offset}") from None
        try:
            header = os.pread(fd, HEADER_BYTES, location.offset)
            payload = os.pread(fd, location.length, location.offset + HEADER_BYTES)
        finally:
            os.close(fd)
        why = _fault(header, location.length) or (
            _mismatch(header, payload) if len(payload) == location.length else None
        )
        if why or len(payload) != location.length:
            why = why or f"expected {location.length} bytes of payload, found {len(payload)}"
            raise SpoolError(f"{path} is damaged at offset {location.offset}: {why}")
        return payload

    def records(self) -> Iterator[tuple[RecordLocation, bytes]]:
        """All records in the order of their appends: (location, payload). Raises SpoolError."""
        for segment in self._segments:
            with _mapped(self._path(segment)) as data:
                offset = 0
                while offset < len(data):
                    if why := _broken(data, offset):
                        raise SpoolError(f"{self._path(segment)} is damaged at offset {offset}: {why}")
                    _, length = _FIELDS.unpack_from(data, offset)
                    start = offset + HEADER_BYTES
                    yield RecordLocation(segment, offset, length), bytes(data[start : start + length])
                    offset = start + length

    # -- inside ----------------------------------------------------------------------------------------------------

    def _path(self, segment: int) -> Path:
        return self.folder / segment_name(segment)

    def _open(self, segment: int) -> None:
        fd = os.open(self._path(segment), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.close()
        self._fd, self._size = fd, os.fstat(fd).st_size
        if segment not in self._segments:
            self._segments.append(segment)
        try:
            sync(self.folder)  # a file is lost with its directory entry
        except OSError as e:
            self._failed = e  # as in `flush`
            raise

    def _write(self, buffers: Sequence[Buffer]) -> None:
        at = self._size
        try:
            for first in range(0, len(buffers), _MOST_BUFFERS):
                rest = list(buffers[first : first + _MOST_BUFFERS])
                while rest:
                    written = self._disk.write(self._fd, rest, at)
                    at += written
                    while rest and written >= len(rest[0]):
                        written -= len(rest.pop(0))
                    if rest:  # a short write: a signal, or the disk is about to be full
                        rest[0] = memoryview(rest[0])[written:]
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size = at

    def _check(self, segment: int, acknowledged: tuple[int, int] | None) -> None:
        """Verifies a segment; cuts a torn tail off the last one."""
        path, offset, why = self._path(segment), 0, None
        with _mapped(path) as data:
            size = len(data)
            while offset < size and not (why := _broken(data, offset)):
                offset += HEADER_BYTES + _FIELDS.unpack_from(data, offset)[1]
            followed = bool(why) and acknowledged is None and _whole_record_after(data, offset)
        if acknowledged is not None and segment == acknowledged[0] and offset < acknowledged[1]:
            why = why or "the file ends here"
            raise SpoolError(f"{path} is damaged at offset {offset}, expected {acknowledged[1]} whole bytes: {why}")
        if not why:
            return
        if segment != self._segments[-1] or followed or (acknowledged is not None and segment < acknowledged[0]):
            raise SpoolError(f"{path} is damaged at offset {offset}, and records follow: {why}")
        os.truncate(path, offset)
        self.torn = Torn(path, offset, size - offset, why)


def _checksum(fields: bytes, payload: Buffer) -> int:
    digest = xxhash.xxh3_64(fields)
    digest.update(payload)
    return digest.intdigest()


def _fault(header: Buffer, length: int | None = None) -> str | None:
    """Error in a header, including its payload length if ``length`` is given; None if there is none."""
    if len(header) < HEADER_BYTES:
        return f"expected a header of {HEADER_BYTES} bytes, found {len(header)}"
    magic, found = _FIELDS.unpack_from(header)
    if magic != _MAGIC:
        return f"expected a record that starts with {_MAGIC!r}, found {magic!r}"
    if length is not None and found != length:
        return f"expected a record of {length} bytes, found one of {found}"
    return None


def _mismatch(header: Buffer, payload: Buffer) -> str | None:
    expected = _CHECKSUM.unpack_from(header, _FIELDS.size)[0]
    found = _checksum(bytes(header[: _FIELDS.size]), payload)
    return None if found == expected else f"expected checksum {expected:016x}, found {found:016x}"


def _broken(data: memoryview, offset: int) -> str | None:
    """Error in the record at ``offset``; None for a whole one."""
    header = data[offset : offset + HEADER_BYTES]
    if why := _fault(header):
        return why
    length = _FIELDS.unpack_from(header)[1]
    payload = data[offset + HEADER_BYTES : offset + HEADER_BYTES + length]
    if len(payload) < length:
        return f"expected {length} bytes of payload, found {len(payload)} to the end of the file"
    return _mismatch(header, payload)


def _whole_record_after(data: memoryview, offset: int) -> bool:
    source = data.obj
    assert isinstance(source, mmap.mmap)
    at = source.find(_MAGIC, offset + 1)
    while at >= 0 and _broken(data, at):
        at = source.find(_MAGIC, at + 1)
    return at >= 0


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    """Maps the file; an empty one, which cannot be mapped, is an empty view."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            yield view
