"""Transport through host memory, between processes of one machine.

The memory is an anonymous file (memfd) of the writer, mapped and touched once per run. Readers receive a descriptor
that only reads, and nobody can shrink the file.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.param_sync.buckets import aligned_capacity
from asyncrl.param_sync.errors import BucketKey
from asyncrl.param_sync.transports.base import MIB, Transport
from asyncrl.param_sync.transports.borrowed_buffer import borrowed
from asyncrl.param_sync.transports.local import BUFFERS, LocalReader, LocalWriter, Welcome
from asyncrl.param_sync.transports.placement import Placements, mixed_gpus, share_a_machine


class SharedMemoryTransport(Transport):
    bucket_bytes = 4 * MIB  # two of them stay in the cache that both ends share
    auto_order = 30

    def unfit(self, senders: Placements, replicas: Placements) -> str | None:
        return None if share_a_machine([*senders, *replicas]) else "needs all senders and replicas on one machine"

    def route(self, senders: Placements, replicas: Placements) -> str:
        return f"all on one machine{mixed_gpus([*senders, *replicas])}"

    def writer(self, sender: int, bucket_bytes: int, host: str) -> SharedMemoryWriter:
        return SharedMemoryWriter(sender, bucket_bytes)

    def reader(self, replica: str) -> SharedMemoryReader:
        return SharedMemoryReader(replica)


TRANSPORT = SharedMemoryTransport()


class SharedMemoryWriter(LocalWriter):
    """Implements `BucketWriter`. ``sender`` numbers the sending ranks. ``bucket_bytes`` is rounded down to a multiple
    of 64; that much is mapped here and in every reader for each of ``buffers``, and for every bucket of a session with
    ``keep``."""

    def __init__(self, sender: int, bucket_bytes: int, buffers: int = BUFFERS) -> None:
        super().__init__(sender, MemoryFile(bucket_bytes, buffers), buffers)


class SharedMemoryReader(LocalReader):
    """Implements `BucketReader`. ``who`` is the replica's name. A writer's memory stays mapped between sessions."""

    def __init__(self, who: str) -> None:
        super().__init__(who, None, MappedFile)


class MemoryFile:
    """Implements `asyncrl.param_sync.transports.local.BucketMemory`: consecutive buffers in a memory file, ``buffers``
    of them allocated at once."""

    device: str | None = None
    keeps = True

    def __init__(self, bucket_bytes: int, buffers: int = BUFFERS) -> None:
        self._capacity = aligned_capacity(bucket_bytes)
        self._stride = -(-self._capacity // mmap.PAGESIZE) * mmap.PAGESIZE  # buffers are mapped one by one
        self._file = os.memfd_create("asyncrl-buckets", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # access to mapped pages that a file has lost kills a process; it must still grow, see `buffer`
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._readable = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
        self._buffers: list[torch.Tensor] = []
        self.welcome = Welcome({}, [self._readable])
        self.buffer(buffers - 1)

    def buffer(self, index: int) -> torch.Tensor:
        while index >= len(self._buffers):
            start = len(self._buffers) * self._stride
            os.truncate(self._file, start + self._stride)
            mapped = _map(self._file, start, self._capacity)
            self._buffers.append(torch.frombuffer(mapped, dtype=torch.uint8))
        return self._buffers[index]

    def location(self, index: int) -> tuple[int, int]:
        return index * self._stride, self._capacity

    def synchronize(self) -> None:
        """Nothing to do: written bytes are visible at once."""

    @functools.cached_property
    def ceiling(self) -> float:
        source, target = np.zeros(self._capacity, np.uint8), np.empty(self._capacity, np.uint8)
        np.copyto(target, source)  # touches the pages
        began_s = now_s()
        np.copyto(target, source)
        return self._capacity / max(now_s() - began_s, 1e-9)

    def close(self) -> None:
        os.close(self._file)
        os.close(self._readable)
        self._buffers = []


class MappedFile:
    """Implements `asyncrl.param_sync.transports.local.OpenedMemory`."""

    def __init__(self, message: Mapping[str, Any], files: Sequence[int]) -> None:
        (self._file,) = files
        self._mapped: dict[int, mmap.mmap] = {}  # by start in the file

    def borrowed(self, location: Sequence[int], key: BucketKey, who: str) -> AbstractContextManager[memoryview]:
        return borrowed(self._array(location), key, who)

    def kept(self, location: Sequence[int]) -> memoryview:
        return memoryview(self._array(location).data)

    def close(self) -> None:
        os.close(self._file)
        self._mapped = {}

    def _array(self, location: Sequence[int]) -> np.ndarray:
        """A new array over a bucket's memory, uint8 [capacity]."""
        start, length = location
        if start not in self._mapped:
            self._mapped[start] = _map(self._file, start, length, mmap.PROT_READ)
        return np.frombuffer(self._mapped[start], dtype=np.uint8)


def _map(file: int, start: int, length: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """Map a part of a file with all its pages present, so that the transfer causes no page faults."""
    return mmap.mmap(file, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection, offset=start)
