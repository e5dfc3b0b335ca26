"""Bucket format: a stream of tensors packed into flat buffers of fixed size.

Every part starts at a multiple of 64 bytes. A tensor that fits into one bucket is never split; a larger one fills the
rest of the current bucket and continues in the next. The bytes are copied once, in slices that stay in the cache while
they are hashed; on a device all tensors of a bucket are copied and hashed by one kernel. If the transport can send
large tensors without a copy, these stay in place: their bytes count towards the bucket but are only hashed.

A bucket's checksum is xxh3_64 of its parts' hashes, a part's hash is the `content_hash` of its bytes. A tensor's hash
is also used for its digest, so its bytes are read only once; on a device those of a split tensor are read twice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from asyncrl.param_sync import device_ranges
from asyncrl.param_sync.content_hash import ContentHash, content_hash
from asyncrl.param_sync.device_ranges import DeviceRange
from asyncrl.param_sync.digest import content_hashes, flat_bytes
from asyncrl.param_sync.errors import BucketKey, SyncError

ALIGN_BYTES = 64
_SLICE_BYTES = 512 * 1024  # fits a core's L2 cache beside the source


class TensorPart(NamedTuple):
    """A piece of a tensor inside a bucket: the tensor's ``nbytes`` bytes from ``start`` on, at the bucket's ``offset``.
    A whole tensor has start 0 and the nbytes of its spec."""

    name: str
    start: int
    nbytes: int
    offset: int


class Bucket(NamedTuple):
    """One flat buffer of many tensors, as a reader yields it. ``data``, uint8 [n], is a memoryview on the host or a
    tensor on a device. It is valid until the next bucket is requested, because the buffer is reused; a ``kept`` one is
    valid until the next session.

    The key (session, sender, sequence) is unique. ``checksum``: of the parts, None when off. ``in_place``: bytes, uint8
    [nbytes], by tensor, of parts that are not in ``data`` because they arrived directly at the receiver's destination.
    """

    session: str
    sender: int
    sequence: int
    parts: tuple[TensorPart, ...]
    data: memoryview | torch.Tensor
    checksum: int | None
    kept: bool = False
    in_place: Mapping[str, Any] = {}


#: (session, part, device) → live memory for the part, uint8 [nbytes] on that device; None: it comes in the bucket
DestinationOf = Callable[[str, TensorPart, torch.device], torch.Tensor | None]


class Filled(NamedTuple):
    """Contents of the buffer handed out last; ``checksum`` covers its parts, in order. ``zero_copy``: bytes, uint8
    [nbytes], by tensor, of parts that are not in the buffer; their offsets lie beyond the packed ones."""

    parts: tuple[TensorPart, ...]
    checksum: int | None
    zero_copy: Mapping[str, torch.Tensor] = {}


def aligned_capacity(bucket_bytes: int) -> int:
    """``bucket_bytes`` rounded down to a multiple of 64. Raises ValueError if nothing is left."""
    capacity = bucket_bytes // ALIGN_BYTES * ALIGN_BYTES
    if capacity <= 0:
        raise ValueError(f"bucket_bytes: expected at least {ALIGN_BYTES}, found {bucket_bytes}")
    return capacity


def host_bytes(bucket: Bucket) -> Any:
    """The bucket's data as an array, uint8 [n]: a view of host data, a copy of device data."""
    return _on_host(bucket.data)


def part_hashes(bucket: Bucket) -> list[bytes]:
    """The `content_hash` of each part's bytes that arrived; a part that does not fit the bucket counts as empty."""
    data, in_place = bucket.data, bucket.in_place
    if isinstance(data, torch.Tensor) and device_ranges.works_on(data.device):
        ranges, clones, begin, capacity = [], [], data.data_ptr(), len(data)
        for name, _, nbytes, offset in bucket.parts:
            address = in_place[name].data_ptr() if name in in_place else begin + offset
            if name not in in_place and not 0 <= offset <= offset + nbytes <= capacity:
                address, nbytes = 0, 0
            elif address % device_ranges.ALIGN_BYTES:
                clones.append((in_place[name] if name in in_place else data[offset : offset + nbytes]).clone())
                address = clones[-1].data_ptr()
            ranges.append((address, nbytes, 0))
        return device_ranges.copy_and_hash(ranges, data.device)
    seen = memoryview(host_bytes(bucket))
    return [
        content_hash(seen[offset : offset + nbytes] if name not in in_place else memoryview(_on_host(in_place[name])))
        for name, _, nbytes, offset in bucket.parts
    ]


def check_checksum(bucket: Bucket, hashes: Sequence[bytes] | None = None) -> None:
    """Raises SyncError if the bucket has a checksum and its bytes do not match it. ``hashes``: its `part_hashes`, if
    they are known."""
    if bucket.checksum is None:
        return
    found = _checksum(part_hashes(bucket) if hashes is None else hashes)
    if found != bucket.checksum:
        key = BucketKey(bucket.session, bucket.sender, bucket.sequence)
        message = f"damaged in transit: checksum {bucket.checksum:016x} sent, {found:016x} arrived"
        raise SyncError("transfer", None, None, key, message)


def pack(
    items: Iterable[tuple[str, torch.Tensor]],
    next_buffer: Callable[[], torch.Tensor],
    checksum: bool = True,
    on_hash: Callable[[str, bytes], None] | None = None,
    zero_copy_from: int | None = None,
) -> Iterator[Filled]:
    """Fill buffers with tensors; yields each buffer when it is full, and the last one partly filled.

    ``next_buffer`` gives a free buffer, uint8 [capacity], capacity a positive multiple of 64. ``on_hash`` gets the
    `content_hash` of every tensor's bytes. Parts of at least ``zero_copy_from`` bytes (None: no part) of a contiguous
    tensor on the buffer's device are not copied. Tensors on the buffer's device are read when the bucket is yielded;
    until then they must keep their values. Others are read before the next tensor is requested.
    """
    hashed = checksum or on_hash is not None

    def filling_of_next() -> _Filling:
        buffer = next_buffer()
        kind = _DeviceFilling if device_ranges.works_on(buffer.device) else _Filling
        return kind(buffer, hashed, zero_copy_from)

    def filled(filling: _Filling) -> Filled:
        parts, hashes = filling.parts(), filling.hashes()
        if on_hash is not None:
            for part, found in zip(parts, hashes, strict=True):
                if part.name in filling.whole:
                    on_hash(part.name, found)
        return Filled(parts, _checksum(hashes) if checksum else None, filling.zero_copy)

    filling: _Filling | None = None
    for name, tensor in items:
        nbytes = tensor.nbytes
        if filling is not None and filling.room < nbytes <= filling.capacity:
            yield filled(filling)
            filling = None
        filling = filling or filling_of_next()
        if nbytes <= filling.room:
            filling.whole.add(name)
            filling.add(name, tensor, 0, nbytes)
            if not filling.room:
                yield filled(filling)
                filling = None
            continue
        # A strided tensor that fits is copied straight into the bucket; one that is split must be contiguous first.
        source, start = tensor.detach().contiguous(), 0
        whole = None
        if on_hash is not None and filling.hashes_on_device:
            on_hash(name, content_hashes([source])[0])
        elif on_hash is not None:
            whole = ContentHash()
        while start < nbytes:
            filling = filling or filling_of_next()
            count = min(nbytes - start, filling.room)
            filling.add(name, source, start, count, whole)
            start += count
            if not filling.room:
                yield filled(filling)
                filling = None
        if on_hash is not None and whole is not None:
            on_hash(name, whole.digest())
    if filling is not None:
        yield filled(filling)


class _Filling:
    """A buffer being filled. ``whole``: names of the tensors that it holds completely."""

    hashes_on_device = False

    def __init__(self, buffer: torch.Tensor, hashed: bool, zero_copy_from: int | None) -> None:
        if not buffer.numel() or buffer.numel() % ALIGN_BYTES:
            raise ValueError(f"a bucket holds a positive multiple of {ALIGN_BYTES} bytes, found {buffer.numel()}")
        self.capacity = self.room = buffer.numel()
        self.whole: set[str] = set()
        self.zero_copy: dict[str, torch.Tensor] = {}
        self._hashes: list[bytes] = []
        self._hashed = hashed
        self._buffer = buffer
        self._bytes = memoryview(buffer.numpy().data) if buffer.device.type == "cpu" else None
        self._address, self._device = buffer.data_ptr(), buffer.device
        self._packed = 0  # bytes, with the gaps
        self._parts: list[TensorPart] = []
        self._zero_copy_from = buffer.numel() + 1 if zero_copy_from is None else zero_copy_from

    def add(self, name: str, source: torch.Tensor, start: int, nbytes: int, whole: ContentHash | None = None) -> None:
        """Add ``nbytes`` of a tensor from byte ``start`` on; a non-contiguous tensor must be added completely.
        ``whole``: a further hash to update; None if it `hashes_on_device`."""
        if nbytes >= self._zero_copy_from and self._is_row(source):
            self._hash_of(self._leave(name, source, start, nbytes), whole)
            return
        at = self._place(name, start, nbytes)
        end = at + nbytes
        if self._bytes is not None and source.is_cpu and source.is_contiguous():
            # By address: making views of a small tensor's bytes takes longer than copying it.
            copy_from = source.data_ptr() + start
            if nbytes <= _SLICE_BYTES and whole is None:
                ctypes.memmove(self._address + at, copy_from, nbytes)
                if self._hashed:
                    self._hashes.append(content_hash(self._bytes[at:end]))
                return
            part = ContentHash()
            for lo in range(at, end, _SLICE_BYTES):
                hi = min(lo + _SLICE_BYTES, end)
                ctypes.memmove(self._address + lo, copy_from + lo - at, hi - lo)
                if self._hashed:
                    _update(self._bytes[lo:hi], part, whole)
            if self._hashed:
                self._hashes.append(part.digest())
            return
        self._hash_of(self._copy(source, start, at, nbytes), whole)

    def parts(self) -> tuple[TensorPart, ...]:
        at = self._packed
        for i, part in enumerate(self._parts):
            if part.name in self.zero_copy:
                self._parts[i] = part._replace(offset=at)
                at += part.nbytes + -part.nbytes % ALIGN_BYTES
        return tuple(self._parts)

    def hashes(self) -> list[bytes]:
        """Of the parts, if ``hashed``. Called when all have been added."""
        return self._hashes

    def _is_row(self, source: torch.Tensor) -> bool:
        """True for a contiguous tensor on the buffer's device."""
        return source.device == self._device and source.is_contiguous()

    def _leave(self, name: str, source: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
        """Register a part that stays in place; returns its bytes."""
        self.room -= nbytes + -nbytes % ALIGN_BYTES
        self._parts.append(TensorPart(name, start, nbytes, -1))
        self.zero_copy[name] = flat_bytes(source)[start : start + nbytes]
        return self.zero_copy[name]

    def _place(self, name: str, start: int, nbytes: int) -> int:
        """Register a part in the buffer; returns its offset."""
        at, lines = self._packed, nbytes + -nbytes % ALIGN_BYTES
        self.room -= lines
        self._packed += lines
        self._parts.append(TensorPart(name, start, nbytes, at))
        return at

    def _copy(self, source: torch.Tensor, start: int, at: int, nbytes: int) -> torch.Tensor:
        """Copy a part of any tensor into the buffer; returns its bytes there."""
        source, into = source.detach(), self._buffer[at : at + nbytes]
        if source.is_contiguous():
            into.copy_(flat_bytes(source)[start : start + nbytes])
        elif nbytes:
            into.view(source.dtype).view(source.shape).copy_(source)
        return into

    def _hash_of(self, data: torch.Tensor, whole: ContentHash | None) -> None:
        if self._hashed:
            part, seen = ContentHash(), memoryview(data.cpu().numpy().data)
            for lo in range(0, len(seen), _SLICE_BYTES):
                _update(seen[lo : lo + _SLICE_BYTES], part, whole)
            self._hashes.append(part.digest())


class _DeviceFilling(_Filling):
    """A buffer on a device, where all parts are copied and hashed at once, when all have been added."""

    hashes_on_device = True

    def __init__(self, buffer: torch.Tensor, hashed: bool, zero_copy_from: int | None) -> None:
        super().__init__(buffer, hashed, zero_copy_from)
        self._ranges: list[DeviceRange] = []
        self._sources: list[torch.Tensor] = []  # whose memory the ranges are

    def add(self, name: str, source: torch.Tensor, start: int, nbytes: int, whole: ContentHash | None = None) -> None:
        if nbytes >= self._zero_copy_from and self._is_row(source):
            piece = self._leave(name, source, start, nbytes)
            piece = piece if device_ranges.aligned(piece) or not self._hashed else piece.clone()
            self._sources.append(piece)
            self._ranges.append((piece.data_ptr(), nbytes, 0))
            return
        at = self._place(name, start, nbytes)
        address = source.data_ptr() + start
        if self._is_row(source) and address % device_ranges.ALIGN_BYTES == 0:
            self._sources.append(source)
            self._ranges.append((address, nbytes, self._address + at))
        else:
            self._copy(source, start, at, nbytes)
            self._ranges.append((self._address + at, nbytes, 0))

    def hashes(self) -> list[bytes]:
        ranges, self._ranges = self._ranges, []
        hashes: list[bytes] = []
        if self._hashed:
            hashes = device_ranges.copy_and_hash(ranges, self._device)
        else:
            device_ranges.copy(ranges, self._device)
        # Not held while the bucket is sent. Their memory may be reused, on the same stream and so after the copy.
        self._sources = []
        return hashes


def _update(data: Any, part: ContentHash, whole: ContentHash | None) -> None:
    """Hash a slice while it is cached."""
    part.update(data)
    if whole is not None:
        whole.update(data)


def _checksum(hashes: Iterable[bytes]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(hashes))


def _on_host(data: Any) -> Any:
    return data.cpu().numpy() if isinstance(data, torch.Tensor) else np.frombuffer(data, np.uint8)
