"""Pack a stream of tensors into flat buckets of fixed size.

Every part starts at a multiple of 64 bytes. A tensor that fits into one bucket is never split; a larger one fills what
is left of the current bucket and goes on in the next. The bytes are copied once, in slices that stay in the cache
while they are hashed. A transport that can send large tensors from where they lie has them left there: their bytes
count as the bucket's, and are only hashed.

A bucket's checksum is xxh3_64 of its parts' hashes, a part's hash xxh3_128 of its bytes: that of a whole tensor serves
the tensor's digest too, so that its bytes are gone through once.
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
from asyncrl.param_sync.receiver import Bucket, TensorPart

ALIGN_BYTES = 64
_SLICE_BYTES = 512 * 1024  # fits a core's L2 cache beside the source


class Filled(NamedTuple):
    """What the buffer handed out last now holds; ``checksum`` is that of its parts, in order. ``loose``: the bytes,
    uint8 [nbytes], of tensors whose part is not in the buffer; their offsets are beyond those that are."""

    parts: tuple[TensorPart, ...]
    checksum: int | None
    loose: Mapping[str, torch.Tensor] = {}


def host_bytes(bucket: Bucket) -> Any:
    """Array uint8 [n] of the bucket's data: a view of it on the host, a copy of what lies on a device."""
    return _on_host(bucket.data)


def bucket_checksum(bucket: Bucket) -> int:
    """The checksum of the bytes that have arrived (the gaps between parts are nobody's)."""
    data, placed = memoryview(host_bytes(bucket)), bucket.placed
    return _checksum(
        xxhash.xxh3_128_digest(data[offset : offset + nbytes] if name not in placed else _on_host(placed[name]))
        for name, _, nbytes, offset in bucket.parts
    )


def check_checksum(bucket: Bucket) -> None:
    """Raises SyncError unless the bucket's bytes are those that its checksum, if it has one, was taken of."""
    if bucket.checksum is None or (found := bucket_checksum(bucket)) == bucket.checksum:
        return
    key = BucketKey(bucket.session, bucket.sender, bucket.sequence)
    message = f"damaged on its way: checksum {bucket.checksum:016x} sent, {found:016x} arrived"
    raise SyncError("transfer", None, None, key, message)


def pack(
    items: Iterable[tuple[str, torch.Tensor]],
    next_buffer: Callable[[], torch.Tensor],
    checksum: bool = True,
    on_hash: Callable[[str, bytes], None] | None = None,
    loose_from: int | None = None,
) -> Iterator[Filled]:
    """Fill buffers with tensors, yielding each when it is full and the last one as it is.

    ``next_buffer`` gives a free buffer, uint8 [capacity], capacity a positive multiple of 64. ``on_hash`` is told
    xxh3_128 of every tensor's bytes, 16 bytes; for it and for the checksum they are copied to the host when the buffer
    is on a device. Parts of at least ``loose_from`` bytes (None: no part at all) of a contiguous tensor on the buffer's
    device stay where they are; all others are read before the next tensor is asked for.
    """
    hashed = checksum or on_hash is not None
    filling_of_next = lambda: _Filling(next_buffer(), hashed, loose_from)
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
        # A strided tensor goes into the bucket as it is if it goes whole; split, it needs its bytes in one row first.
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
    """A buffer on its way from free to full. ``hashes``: of its parts, if they are ``hashed``."""

    def __init__(self, buffer: torch.Tensor, hashed: bool, loose_from: int | None) -> None:
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
        self._loose_from = buffer.numel() + 1 if loose_from is None else loose_from
        self._loose: dict[str, torch.Tensor] = {}

    def add(self, name: str, source: torch.Tensor, start: int, nbytes: int, whole: Any = None) -> None:
        """``nbytes`` of a tensor from byte ``start`` on: all of it, or it must be contiguous. ``whole`` is a hash that
        sees them too."""
        lines = nbytes + -nbytes % ALIGN_BYTES
        self.room -= lines
        if nbytes >= self._loose_from and source.is_contiguous() and source.device == self._buffer.device:
            self._parts.append(TensorPart(name, start, nbytes, -1))
            self._loose[name] = flat_bytes(source)[start : start + nbytes]
            self._hash_of(self._loose[name], whole)
            return
        at = self._packed
        end = at + nbytes
        self._parts.append(TensorPart(name, start, nbytes, at))
        self._packed += lines
        if self._bytes is not None and source.is_cpu and source.is_contiguous():
            # By address: views of a small tensor's bytes would take longer than its copy.
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
                    _see(self._bytes[lo:hi], part, whole)
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
            if part.name in self._loose:
                self._parts[i] = part._replace(offset=at)
                at += part.nbytes + -part.nbytes % ALIGN_BYTES
        return Filled(tuple(self._parts), _checksum(self.hashes) if checksum else None, self._loose)

    def _hash_of(self, data: torch.Tensor, whole: Any) -> None:
        if self._hashed:
            part, seen = xxhash.xxh3_128(), memoryview(data.cpu().numpy().data)
            for lo in range(0, len(seen), _SLICE_BYTES):
                _see(seen[lo : lo + _SLICE_BYTES], part, whole)
            self.hashes.append(part.digest())


def _see(data: Any, part: Any, whole: Any) -> None:
    """Hash a slice while it is in the cache."""
    part.update(data)
    if whole is not None:
        whole.update(data)


def _checksum(hashes: Iterable[bytes]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(hashes))


def _on_host(data: Any) -> Any:
    return data.cpu().numpy() if isinstance(data, torch.Tensor) else np.frombuffer(data, np.uint8)
