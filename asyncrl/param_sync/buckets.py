"""Pack a stream of tensors into flat buckets of fixed size.

Every part starts at a multiple of 64 bytes. A tensor that fits into one bucket is never split; a larger one fills what
is left of the current bucket and goes on in the next. The bytes are copied once, in slices that stay in the cache
while they are hashed for the bucket's checksum and the tensor's digest. A transport that can send large tensors from
where they lie has them left there: their bytes count as the bucket's, and are only hashed.
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
    """What the buffer handed out last now holds; ``checksum`` is xxh3_64 of its parts' bytes, in order. ``loose``: the
    bytes, uint8 [nbytes], of tensors whose part is not in the buffer; their offsets are beyond those that are."""

    parts: tuple[TensorPart, ...]
    checksum: int | None
    loose: Mapping[str, torch.Tensor] = {}


def host_bytes(bucket: Bucket) -> Any:
    """Array uint8 [n] of the bucket's data: a view of it on the host, a copy of what lies on a device."""
    return _on_host(bucket.data)


def bucket_checksum(bucket: Bucket) -> int:
    """xxh3_64 of the bytes of the bucket's parts, in order (the gaps between them are nobody's)."""
    h, data = xxhash.xxh3_64(), host_bytes(bucket)
    for part in bucket.parts:
        placed = bucket.placed.get(part.name)
        h.update(data[part.offset : part.offset + part.nbytes] if placed is None else _on_host(placed))
    return h.intdigest()


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
    on_bytes: Callable[[str, Any], None] | None = None,
    loose_from: int | None = None,
) -> Iterator[Filled]:
    """Fill buffers with tensors, yielding each when it is full and the last one as it is.

    ``next_buffer`` gives a free buffer, uint8 [capacity], capacity a positive multiple of 64. ``on_bytes`` sees every
    tensor's bytes in order (an empty one's once, empty); they and the checksum's bytes are copied to the host when the
    buffer is on a device. Parts of at least ``loose_from`` bytes (None: no part at all) of a contiguous tensor on the
    buffer's device stay where they are; all others are read before the next tensor is asked for.
    """
    filling_of_next = lambda: _Filling(next_buffer(), checksum, on_bytes, loose_from)
    filling: _Filling | None = None
    for name, tensor in items:
        nbytes = tensor.nbytes
        if filling is not None and filling.room < nbytes <= filling.capacity:
            yield filling.filled()
            filling = None
        filling = filling or filling_of_next()
        if nbytes <= filling.room:
            filling.add(name, tensor, 0, nbytes)
            if not filling.room:
                yield filling.filled()
                filling = None
            continue
        # A strided tensor goes into the bucket as it is if it goes whole; split, it needs its bytes in one row first.
        source, start = tensor.detach().contiguous(), 0
        while start < nbytes:
            filling = filling or filling_of_next()
            count = min(nbytes - start, filling.room)
            filling.add(name, source, start, count)
            start += count
            if not filling.room:
                yield filling.filled()
                filling = None
    if filling is not None:
        yield filling.filled()


class _Filling:
    """A buffer on its way from free to full."""

    def __init__(
        self,
        buffer: torch.Tensor,
        checksum: bool,
        on_bytes: Callable[[str, Any], None] | None,
        loose_from: int | None,
    ) -> None:
        if not buffer.numel() or buffer.numel() % ALIGN_BYTES:
            raise ValueError(f"a bucket holds a positive multiple of {ALIGN_BYTES} bytes, found {buffer.numel()}")
        self.capacity = self.room = buffer.numel()
        self._buffer = buffer
        self._bytes = memoryview(buffer.numpy().data) if buffer.device.type == "cpu" else None
        self._address = buffer.data_ptr()
        self._packed = 0  # bytes, with the gaps
        self._parts: list[TensorPart] = []
        self._loose_from = buffer.numel() + 1 if loose_from is None else loose_from
        self._loose: dict[str, torch.Tensor] = {}
        self._checksum = xxhash.xxh3_64() if checksum else None
        self._on_bytes = on_bytes

    def add(self, name: str, source: torch.Tensor, start: int, nbytes: int) -> None:
        """``nbytes`` of a tensor from byte ``start`` on: all of it, or it must be contiguous."""
        lines = nbytes + -nbytes % ALIGN_BYTES
        self.room -= lines
        if nbytes >= self._loose_from and source.is_contiguous() and source.device == self._buffer.device:
            self._parts.append(TensorPart(name, start, nbytes, -1))
            self._loose[name] = flat_bytes(source)[start : start + nbytes]
            self._see_all(name, self._loose[name])
            return
        at = self._packed
        end = at + nbytes
        self._parts.append(TensorPart(name, start, nbytes, at))
        self._packed += lines
        if self._bytes is not None and source.is_cpu and source.is_contiguous():
            # By address: views of a small tensor's bytes would take longer than its copy.
            copy_from = source.data_ptr() + start - at
            for lo in range(at, end, _SLICE_BYTES):
                hi = lo + _SLICE_BYTES if lo + _SLICE_BYTES < end else end
                ctypes.memmove(self._address + lo, copy_from + lo, hi - lo)
                data = self._bytes[lo:hi]  # as in `_see`, whose call would be felt with many small tensors
                if self._checksum is not None:
                    self._checksum.update(data)
                if self._on_bytes is not None:
                    self._on_bytes(name, data)
        elif nbytes:
            source = source.detach()
            if source.is_contiguous():
                self._buffer[at:end].copy_(flat_bytes(source)[start : start + nbytes])
            else:
                self._buffer[at:end].view(source.dtype).view(source.shape).copy_(source)
            self._see_all(name, self._buffer[at:end])
        if not nbytes:
            self._see(name, b"")

    def filled(self) -> Filled:
        at = self._packed
        for i, part in enumerate(self._parts):
            if part.name in self._loose:
                self._parts[i] = part._replace(offset=at)
                at += part.nbytes + -part.nbytes % ALIGN_BYTES
        checksum = None if self._checksum is None else self._checksum.intdigest()
        return Filled(tuple(self._parts), checksum, self._loose)

    def _see_all(self, name: str, data: torch.Tensor) -> None:
        if self._checksum is not None or self._on_bytes is not None:
            seen = memoryview(data.cpu().numpy().data)
            for lo in range(0, len(seen), _SLICE_BYTES):
                self._see(name, seen[lo : lo + _SLICE_BYTES])

    def _see(self, name: str, data: Any) -> None:
        if self._checksum is not None:
            self._checksum.update(data)
        if self._on_bytes is not None:
            self._on_bytes(name, data)


def _on_host(data: Any) -> Any:
    return data.cpu().numpy() if isinstance(data, torch.Tensor) else np.frombuffer(data, np.uint8)
