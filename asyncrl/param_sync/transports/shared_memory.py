"""Buckets in host memory, between processes of one machine.

The memory is a file of the writer's (memfd), mapped and touched once per run. It has no name in any folder: its readers
are handed its descriptor.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from asyncrl.param_sync.errors import BucketKey
from asyncrl.param_sync.transports.lend import lent
from asyncrl.param_sync.transports.local import BUFFERS, LocalReader, LocalWriter, Welcome, whole_lines
from asyncrl.telemetry.recorder import now_s


class SharedMemoryWriter(LocalWriter):
    """Implements `BucketWriter`. ``sender`` numbers the sending ranks; ``bucket_bytes`` is rounded down to whole lines
    of 64 bytes. So much is mapped here and in every reader for each of ``buffers``, and for all buckets at once after a
    session that kept them."""

    def __init__(self, sender: int, bucket_bytes: int, buffers: int = BUFFERS) -> None:
        super().__init__(sender, MemoryFile(bucket_bytes, buffers), buffers)


class SharedMemoryReader(LocalReader):
    """Implements `BucketReader`. ``who`` is the replica's name. A writer's memory stays mapped between sessions."""

    def __init__(self, who: str) -> None:
        super().__init__(who, None, MappedFile)


class MemoryFile:
    """Implements `asyncrl.param_sync.transports.local.BucketMemory`: buffers one behind the other in a memory file,
    ``buffers`` of them from the start on."""

    device: str | None = None
    keeps = True

    def __init__(self, bucket_bytes: int, buffers: int = BUFFERS) -> None:
        self._capacity = whole_lines(bucket_bytes)
        self._stride = -(-self._capacity // mmap.PAGESIZE) * mmap.PAGESIZE  # buffers are mapped one by one
        self._file = os.memfd_create("asyncrl-buckets")
        self._buffers: list[torch.Tensor] = []
        self.welcome = Welcome({}, [self._file])
        self.buffer(buffers - 1)

    def buffer(self, index: int) -> torch.Tensor:
        while index >= len(self._buffers):
            start = len(self._buffers) * self._stride
            os.truncate(self._file, start + self._stride)
            mapped = _map(self._file, start, self._capacity)
            self._buffers.append(torch.frombuffer(mapped, dtype=torch.uint8))
        return self._buffers[index]

    def place(self, index: int) -> tuple[int, int]:
        return index * self._stride, self._capacity

    def settle(self) -> None:
        """What is written is there."""

    @functools.cached_property
    def ceiling(self) -> float:
        source, target = np.zeros(self._capacity, np.uint8), np.empty(self._capacity, np.uint8)
        np.copyto(target, source)  # touches the pages
        began_s = now_s()
        np.copyto(target, source)
        return self._capacity / max(now_s() - began_s, 1e-9)

    def close(self) -> None:
        os.close(self._file)
        self._buffers = []


class MappedFile:
    """Implements `asyncrl.param_sync.transports.local.OpenedMemory`."""

    def __init__(self, message: Mapping[str, Any], files: Sequence[int]) -> None:
        (self._file,) = files
        self._mapped: dict[int, mmap.mmap] = {}  # by their start in the file

    def lent(self, place: Sequence[int], key: BucketKey, who: str) -> AbstractContextManager[memoryview]:
        return lent(self._array(place), key, who)

    def kept(self, place: Sequence[int]) -> memoryview:
        return memoryview(self._array(place).data)

    def close(self) -> None:
        os.close(self._file)
        self._mapped = {}

    def _array(self, place: Sequence[int]) -> np.ndarray:
        """uint8 [capacity]: a new array over a bucket's memory."""
        start, length = place
        if start not in self._mapped:
            self._mapped[start] = _map(self._file, start, length, mmap.PROT_READ)
        return np.frombuffer(self._mapped[start], dtype=np.uint8)


def _map(file: int, start: int, length: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """Map a part of a file, all its pages present: no page fault is left for the transfer."""
    return mmap.mmap(file, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection, offset=start)
