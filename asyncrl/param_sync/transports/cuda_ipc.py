"""Buckets in the memory of one GPU, between processes that share it.

Only where all ends are on one and the same GPU (colocated pools, small runs). All buffers lie in one allocation of the
writer's. Its handle is in the welcome, and each reader opens it once, for all sessions until the writer ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from asyncrl.param_sync.errors import BucketKey
from asyncrl.param_sync.transports.cuda_memory import CudaError, DeviceMemory, cuda_device, device_name
from asyncrl.param_sync.transports.lend import lent_on_device
from asyncrl.param_sync.transports.local import BUFFERS, LocalReader, LocalWriter, Welcome, whole_lines
from asyncrl.param_sync.transports.process_group import settle
from asyncrl.telemetry.recorder import now_s

_ALIGN_BYTES = 512  # as torch aligns its own allocations


class CudaIpcWriter(LocalWriter):
    """Implements `BucketWriter`. ``sender`` numbers the sending ranks; ``bucket_bytes`` is rounded down to whole lines
    of 64 bytes, and ``buffers`` times that is held on ``device`` (by default the current one). Sessions keep nothing:
    the readers copy. Raises ValueError where there is no CUDA device."""

    def __init__(
        self, sender: int, bucket_bytes: int, device: torch.device | str | None = None, buffers: int = BUFFERS
    ) -> None:
        capacity = whole_lines(bucket_bytes)
        super().__init__(sender, DeviceBuckets(capacity, cuda_device(device), buffers), buffers)


class CudaIpcReader(LocalReader):
    """Implements `BucketReader`. ``who`` is the replica's name; `Bucket.data` is a tensor on ``device`` (by default the
    current one), where the writer's memory stays open between sessions. Raises ValueError where there is none."""

    def __init__(self, who: str, device: torch.device | str | None = None) -> None:
        found = cuda_device(device)
        super().__init__(who, device_name(found), partial(OpenedBuckets, found))


class DeviceBuckets:
    """Implements `asyncrl.param_sync.transports.local.BucketMemory`."""

    keeps = False  # a second copy of the model would be more than two buckets of extra memory

    def __init__(self, capacity: int, device: torch.device, buffers: int) -> None:
        self.device: str | None = device_name(device)
        self._on, self._capacity = device, capacity
        self._stride = -(-capacity // _ALIGN_BYTES) * _ALIGN_BYTES
        self._memory = DeviceMemory.allocate(self._stride * buffers, device)
        self.welcome = Welcome({"handle": self._memory.handle().hex(), "nbytes": self._stride * buffers})

    def buffer(self, index: int) -> torch.Tensor:
        start, length = self.place(index)
        return self._memory.data[start : start + length]

    def place(self, index: int) -> tuple[int, int]:
        return index * self._stride, self._capacity

    def settle(self) -> None:
        settle(self._on)

    @functools.cached_property
    def ceiling(self) -> float:
        source = torch.zeros(self._capacity, dtype=torch.uint8, device=self._on)
        target = source.clone()
        settle(self._on)
        began_s = now_s()
        target.copy_(source)
        settle(self._on)
        return self._capacity / max(now_s() - began_s, 1e-9)

    def close(self) -> None:
        """Readers may still have the memory open, as when this process dies: without a session they do not look."""
        settle(self._on)
        self._memory.close()


class OpenedBuckets:
    """Implements `asyncrl.param_sync.transports.local.OpenedMemory`."""

    def __init__(self, device: torch.device, message: Mapping[str, Any], files: Sequence[int]) -> None:
        self._memory = DeviceMemory.open(bytes.fromhex(message["handle"]), message["nbytes"], device)

    def lent(self, place: Sequence[int], key: BucketKey, who: str) -> AbstractContextManager[torch.Tensor]:
        """The bucket is acknowledged when what the receiver's stream does with it is done."""
        start, length = place
        return lent_on_device(self._memory.data[start : start + length], key, who)

    def kept(self, place: Sequence[int]) -> memoryview:
        raise NotImplementedError("buckets on a device are not kept, see DeviceBuckets.keeps")

    def close(self) -> None:
        with contextlib.suppress(CudaError):  # the writer's process may have ended: no reason to fail the next session
            self._memory.close()
