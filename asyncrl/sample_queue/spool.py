"""The spool: payloads in append-only segment files, each record with a checksum, whole segments deleted at the end.

    spool/000001.seg    record | record | record | …
    record              magic, kind, payload length, xxh3_64 of these and the payload (24 bytes) | payload

A crash in mid-write leaves a torn tail: opening cuts it off and says so. Damage anywhere else is an error: a spool that
lost something it had acknowledged must not look like one that did not. One process writes, any may read::

    spool = Spool(Path("run/spool"))
    place = spool.append(KIND_GROUP, payload)
    spool.flush()                   # on disk from here on
    assert spool.read(place) == payload
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

Buffer = bytes | bytearray | memoryview

KIND_GROUP = 1  # a finished group (`asyncrl.sample.Group.to_bytes`)
KIND_PARTIAL = 2  # a snapshot of a group in flight

SEGMENT_BYTES = 64 * 1024 * 1024

_MAGIC = b"ASP1"
_FIELDS = struct.Struct("<4sIQ")  # magic, kind, payload bytes
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_MOST_BUFFERS = 1024  # of one writev (IOV_MAX on Linux)


class SpoolError(RuntimeError):
    """The spool is damaged or cannot be written; the message names file, offset, what was expected and found."""


class Place(NamedTuple):
    """Where a record is: its header starts at ``offset`` of the segment, its payload has ``length`` bytes."""

    segment: int
    offset: int
    length: int


class Record(NamedTuple):
    """A payload with the header that goes before it, ready to be written; make it with `record`."""

    header: bytes
    payload: memoryview


def record(kind: int, payload: Buffer) -> Record:
    view = memoryview(payload).cast("B")
    fields = _FIELDS.pack(_MAGIC, kind, len(view))
    return Record(fields + _CHECKSUM.pack(_checksum(fields, view)), view)


class Torn(NamedTuple):
    """What opening cut off: ``cut_bytes`` from ``offset`` on, the last whole record ends there."""

    path: Path
    offset: int
    cut_bytes: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}: cut {self.cut_bytes} bytes of an unfinished write at offset {self.offset} ({self.why})"


def segment_name(segment: int) -> str:
    return f"{segment:06d}.seg"


class Disk:
    """The two calls that write: what a test of faults puts its own in the place of."""

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)


class Spool:
    """``acknowledged``: (segment, offset) up to which records were promised to somebody. What is broken before it is
    damage, what is broken after it a torn tail. If None, it is a torn tail if no whole record follows.

    Raises SpoolError for damage, OSError if the folder cannot be written. ``torn`` tells what opening cut off.
    """

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
        folder.mkdir(exist_ok=True)
        self._segments = sorted(int(path.stem) for path in folder.glob("*.seg"))
        if acknowledged is not None and acknowledged[1] and acknowledged[0] not in self._segments:
            raise SpoolError(
                f"{self._path(acknowledged[0])} is missing: {acknowledged[1]} bytes of it were acknowledged"
            )
        for segment in self._segments:
            self._check(segment, acknowledged)
        self._fd = -1
        self._open(self._segments[-1] if self._segments else 1)

    @property
    def segments(self) -> tuple[int, ...]:
        """All segments that exist, the active one last."""
        return tuple(self._segments)

    @property
    def end(self) -> tuple[int, int]:
        """(segment, offset) where the next record goes."""
        return self._segments[-1], self._size

    # -- writing ---------------------------------------------------------------------------------------------------

    def append(self, kind: int, payload: Buffer) -> Place:
        return self.append_all([record(kind, payload)])[0]

    def append_all(self, records: Sequence[Record]) -> list[Place]:
        """Append records without copying their payloads, with few system calls; nothing is durable before
        `flush`. Raises OSError (disk full, …): what was written before is whole then, and appending may go on."""
        if self._failed is not None:
            raise SpoolError(f"{self.folder}: an earlier flush failed ({self._failed}); open the spool anew")
        places: list[Place] = []
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
            places.append(Place(self._segments[-1], end, len(payload)))
            end += size
        self._write(buffers)
        return places

    def flush(self) -> None:
        """All that was appended survives a power loss when this returns.

        After an error the kernel may have thrown the unwritten pages away and would report success next time: the
        spool takes no more records then."""
        try:
            self._disk.sync(self._fd)
        except OSError as e:
            self._failed = e
            raise

    def release(self, segment: int) -> None:
        """Delete a whole segment that nobody needs. Raises SpoolError for the active one or an unknown one."""
        if segment not in self._segments[:-1]:
            raise SpoolError(
                f"{self._path(segment)} cannot be released: expected one of the finished segments {self._segments[:-1]}"
            )
        self._path(segment).unlink()
        self._segments.remove(segment)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, place: Place) -> bytes:
        """The payload at ``place``, its checksum verified. From any thread. Raises SpoolError."""
        path = self._path(place.segment)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SpoolError(f"{path} is missing: it was to hold {place.length} bytes at {place.offset}") from None
        try:
            header = os.pread(fd, HEADER_BYTES, place.offset)
            payload = os.pread(fd, place.length, place.offset + HEADER_BYTES)
        finally:
            os.close(fd)
        why = _fault(header, place.length) or (_mismatch(header, payload) if len(payload) == place.length else None)
        if why or len(payload) != place.length:
            why = why or f"expected {place.length} bytes of payload, found {len(payload)}"
            raise SpoolError(f"{path} is damaged at offset {place.offset}: {why}")
        return payload

    def records(self) -> Iterator[tuple[Place, int, bytes]]:
        """All records in the order in which they were appended: (place, kind, payload). Raises SpoolError."""
        for segment in self._segments:
            with _mapped(self._path(segment)) as data:
                offset = 0
                while offset < len(data):
                    if why := _broken(data, offset):
                        raise SpoolError(f"{self._path(segment)} is damaged at offset {offset}: {why}")
                    _, kind, length = _FIELDS.unpack_from(data, offset)
                    start = offset + HEADER_BYTES
                    yield Place(segment, offset, length), kind, bytes(data[start : start + length])
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
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # a file whose name is not on disk is not on disk
        finally:
            os.close(folder)

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
        """Verify a segment; cut a torn tail off the last one."""
        path, offset, why = self._path(segment), 0, None
        with _mapped(path) as data:
            size = len(data)
            while offset < size and not (why := _broken(data, offset)):
                offset += HEADER_BYTES + _FIELDS.unpack_from(data, offset)[2]
            followed = bool(why) and acknowledged is None and _whole_record_after(data, offset)
        if acknowledged is not None and segment == acknowledged[0] and offset < acknowledged[1]:
            why = why or "the file ends here"
            raise SpoolError(f"{path} is damaged at offset {offset}, {acknowledged[1]} were acknowledged: {why}")
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
    """What is wrong with a header by itself, and with the payload length it tells; None if nothing is."""
    if len(header) < HEADER_BYTES:
        return f"expected a header of {HEADER_BYTES} bytes, found {len(header)}"
    magic, _, found = _FIELDS.unpack_from(header)
    if magic != _MAGIC:
        return f"expected a record that starts with {_MAGIC!r}, found {magic!r}"
    if length is not None and found != length:
        return f"expected a record of {length} bytes, found one of {found}"
    return None


def _mismatch(header: Buffer, payload: Buffer) -> str | None:
    told = _CHECKSUM.unpack_from(header, _FIELDS.size)[0]
    found = _checksum(bytes(header[: _FIELDS.size]), payload)
    return None if found == told else f"expected checksum {told:016x}, found {found:016x}"


def _broken(data: memoryview, offset: int) -> str | None:
    """What is wrong with the record at ``offset``; None for a whole one."""
    header = data[offset : offset + HEADER_BYTES]
    if why := _fault(header):
        return why
    length = _FIELDS.unpack_from(header)[2]
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
    """The file as memory; an empty one, which cannot be mapped, as an empty view."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            yield view
