"""Bucket format: a stream of tensors packed into flat buffers of fixed size.

Every part starts at a multiple of 64 bytes. A tensor that fits into one bucket is never split; a larger one fills the
rest of the current bucket and continues in the next. The bytes are copied once, in slices that stay in the cache while
they are hashed. If the transport can send large tensors without a copy, these stay in place: their bytes count towards
the bucket but are only hashed.

A bucket's checksum is xxh3_64 of its parts' hashes, a part's hash is xxh3_128 of its bytes. A tensor's hash is also
used for its digest, so its bytes are read only once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from asyncrl.param_sync.digest import flat_bytes
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


def bucket_checksum(bucket: Bucket) -> int:
    """Checksum of the bytes that arrived; gaps between parts do not count."""
    data, in_place = memoryview(host_bytes(bucket)), bucket.in_place
    return _checksum(
        xxhash.xxh3_128_digest(data[offset : offset + nbytes] if name not in in_place else _on_host(in_place[name]))
        for name, _, nbytes, offset in bucket.parts
    )


def check_checksum(bucket: Bucket) -> None:
    """Raises SyncError if the bucket has a checksum and its bytes do not match it."""
    if bucket.checksum is None or (found := bucket_checksum(bucket)) == bucket.checksum:
        return
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
    xxh3_128 of every tensor's bytes, 16 bytes; hashing and checksums copy the bytes to the host when the buffer is on a
    device. Parts of at least ``zero_copy_from`` bytes (None: no part) of a contiguous tensor on the buffer's device are
    not copied; all others are read before the next tensor is requested.
    """
    hashed = checksum or on_hash is not None
    filling_of_next = lambda: _Filling(next_buffer(), hashed, zero_copy_from)
    filling: _Filling | None = None
    for name, tensor in items:
        nbytes = tensor.nbytes
        if filling is not None and filling.room < nbytes <= filling.capacity:
            yield filling.filled(checksum)
            filling = None
        filling = filling or filling_of_next()
        if nbytes <= filling.room:
            filling.add(name, tensor, 0, nbytes)
            if on_hash is not None:
                on_hash(name, filling.hashes[-1])
            if not filling.room:
                yield filling.filled(checksum)
                filling = None
            continue
        # A strided tensor that fits is copied straight into the bucket; one that is split must be contiguous first.
        source, start = tensor.detach().contiguous(), 0
        whole = None if on_hash is None else xxhash.xxh3_128()
        while start < nbytes:
            filling = filling or filling_of_next()
            count = min(nbytes - start, filling.room)
            filling.add(name, source, start, count, whole)
            start += count
            if not filling.room:
                yield filling.filled(checksum)
                filling = None
        if on_hash is not None and whole is not None:
            on_hash(name, whole.digest())
    if filling is not None:
        yield filling.filled(checksum)


class _Filling:
    """A buffer being filled. ``hashes``: of its parts, if ``hashed``."""

    def __init__(self, buffer: torch.Tensor, hashed: bool, zero_copy_from: int | None) -> None:
        if not buffer.numel() or buffer.numel() % ALIGN_BYTES:
            raise ValueError(f"a bucket holds a positive multiple of {ALIGN_BYTES} bytes, found {buffer.numel()}")
        self.capacity = self.room = buffer.numel()
        self.hashes: list[bytes] = []
        self._hashed = hashed
        self._buffer = buffer
        self._bytes = memoryview(buffer.numpy().data) if buffer.device.type == "cpu" else None
        self._address = buffer.data_ptr()
        self._packed = 0  # bytes, with the gaps
        self._parts: list[TensorPart] = []
        self._zero_copy_from = buffer.numel() + 1 if zero_copy_from is None else zero_copy_from
        self._zero_copy: dict[str, torch.Tensor] = {}

    def add(self, name: str, source: torch.Tensor, start: int, nbytes: int, whole: Any = None) -> None:
        """Add ``nbytes`` of a tensor from byte ``start`` on; a non-contiguous tensor must be added completely.
        ``whole``: a further hash to update."""
        lines = nbytes + -nbytes % ALIGN_BYTES
        self.room -= lines
        if nbytes >= self._zero_copy_from and source.is_contiguous() and source.device == self._buffer.device:
            self._parts.append(TensorPart(name, start, nbytes, -1))
            self._zero_copy[name] = flat_bytes(source)[start : start + nbytes]
            self._hash_of(self._zero_copy[name], whole)
            return
        at = self._packed
        end = at + nbytes
        self._parts.append(TensorPart(name, start, nbytes, at))
        self._packed += lines
        if self._bytes is not None and source.is_cpu and source.is_contiguous():
            # By address: making views of a small tensor's bytes takes longer than copying it.
            copy_from = source.data_ptr() + start
            if nbytes <= _SLICE_BYTES and whole is None:
                ctypes.memmove(self._address + at, copy_from, nbytes)
                if self._hashed:
                    self.hashes.append(xxhash.xxh3_128_digest(self._bytes[at:end]))
                return
            part = xxhash.xxh3_128()
            for lo in range(at, end, _SLICE_BYTES):
                hi = min(lo + _SLICE_BYTES, end)
                ctypes.memmove(self._address + lo, copy_from + lo - at, hi - lo)
                if self._hashed:
                    _update(self._bytes[lo:hi], part, whole)
            if self._hashed:
                self.hashes.append(part.digest())
            return
        source = source.detach()
        if source.is_contiguous():
            self._buffer[at:end].copy_(flat_bytes(source)[start : start + nbytes])
        elif nbytes:
            self._buffer[at:end].view(source.dtype).view(source.shape).copy_(source)
        self._hash_of(self._buffer[at:end], whole)

    def filled(self, checksum: bool) -> Filled:
        at = self._packed
        for i, part in enumerate(self._parts):
            if part.name in self._zero_copy:
                self._parts[i] = part._replace(offset=at)
                at += part.nbytes + -part.nbytes % ALIGN_BYTES
        return Filled(tuple(self._parts), _checksum(self.hashes) if checksum else None, self._zero_copy)

    def _hash_of(self, data: torch.Tensor, whole: Any) -> None:
        if self._hashed:
            part, seen = xxhash.xxh3_128(), memoryview(data.cpu().numpy().data)
            for lo in range(0, len(seen), _SLICE_BYTES):
                _update(seen[lo : lo + _SLICE_BYTES], part, whole)
            self.hashes.append(part.digest())


def _update(data: Any, part: Any, whole: Any) -> None:
    """Hash a slice while it is cached."""
    part.update(data)
    if whole is not None:
        whole.update(data)


def _checksum(hashes: Iterable[bytes]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(hashes))


def _on_host(data: Any) -> Any:
    return data.cpu().numpy() if isinstance(data, torch.Tensor) else np.frombuffer(data, np.uint8)
