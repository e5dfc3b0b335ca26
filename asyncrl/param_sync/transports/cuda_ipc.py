"""Transport through the memory of one GPU, between processes that share it.

For senders and replicas that are all on the same GPU (colocated pools, small runs). The writer keeps all buffers in one
allocation and sends its handle in the welcome; each reader opens it once, for all sessions until the writer ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.param_sync.buckets import aligned_capacity
from asyncrl.param_sync.device_ranges import works_on
from asyncrl.param_sync.errors import BucketKey
from asyncrl.param_sync.transports.base import MIB, Transport
from asyncrl.param_sync.transports.borrowed_buffer import borrowed_on_device
from asyncrl.param_sync.transports.cuda_memory import CudaError, DeviceMemory, cuda_device, device_name
from asyncrl.param_sync.transports.local import BUFFERS, LocalReader, LocalWriter, Welcome
from asyncrl.param_sync.transports.placement import Placements, needs_gpus, share_a_gpu
from asyncrl.param_sync.transports.process_group import synchronize

_ALIGN_BYTES = 512  # as torch aligns its own allocations


class CudaIpcTransport(Transport):
    # A bucket costs about a millisecond of messages, launches and waiting (docs/gpu.md), so not smaller. Not larger,
    # because two are held, and the tensors for one, on the one GPU that trainer and replicas share.
    bucket_bytes = 256 * MIB
    auto_order = 10

    def unfit(self, senders: Placements, replicas: Placements) -> str | None:
        fits = share_a_gpu([*senders, *replicas])
        return None if fits else "needs all senders and replicas on the same GPU"

    def route(self, senders: Placements, replicas: Placements) -> str:
        return f"all on GPU {senders[0].device}"

    def problems(self, config: Config) -> Iterator[str]:
        yield from needs_gpus("cuda_ipc", config)

    def writer(self, sender: int, bucket_bytes: int, host: str) -> CudaIpcWriter:
        return CudaIpcWriter(sender, bucket_bytes)

    def reader(self, replica: str) -> CudaIpcReader:
        return CudaIpcReader(replica)


TRANSPORT = CudaIpcTransport()


class CudaIpcWriter(LocalWriter):
    """Implements `BucketWriter`. ``sender`` numbers the sending ranks. ``bucket_bytes`` is rounded down to a multiple
    of 64; ``buffers`` times that is held on ``device`` (None: the current one). Buckets are never kept: readers copy
    them. Raises ValueError without a CUDA device."""

    def __init__(
        self, sender: int, bucket_bytes: int, device: torch.device | str | None = None, buffers: int = BUFFERS
    ) -> None:
        capacity = aligned_capacity(bucket_bytes)
        super().__init__(sender, DeviceBuckets(capacity, cuda_device(device), buffers), buffers)


class CudaIpcReader(LocalReader):
    """Implements `BucketReader`. ``who`` is the replica's name. `Bucket.data` is a tensor on ``device`` (None: the
    current one), where the writer's memory stays open between sessions. Raises ValueError without a CUDA device."""

    def __init__(self, who: str, device: torch.device | str | None = None) -> None:
        found = cuda_device(device)
        works_on(found)
        super().__init__(who, device_name(found), partial(OpenedBuckets, found))


class DeviceBuckets:
    """Implements `asyncrl.param_sync.transports.local.BucketMemory`."""

    keeps = False  # a second copy of the model would exceed two buckets of extra memory

    def __init__(self, capacity: int, device: torch.device, buffers: int) -> None:
        self.device: str | None = device_name(device)
        self._on, self._capacity = device, capacity
        works_on(device)  # compiles here, not in the first session
        self._stride = -(-capacity // _ALIGN_BYTES) * _ALIGN_BYTES
        self._memory = DeviceMemory.allocate(self._stride * buffers, device)
        self.welcome = Welcome({"handle": self._memory.handle().hex(), "nbytes": self._stride * buffers})

    def buffer(self, index: int) -> torch.Tensor:
        start, length = self.location(index)
        return self._memory.data[start : start + length]

    def location(self, index: int) -> tuple[int, int]:
        return index * self._stride, self._capacity

    def synchronize(self) -> None:
        synchronize(self._on)

    @functools.cached_property
    def ceiling(self) -> float:
        # Between its own halves, because the GPU may be nearly full. It is free once all buckets have been read.
        source, target = self._memory.data.chunk(2)
        target.copy_(source)  # the first copy is slower
        synchronize(self._on)
        began_s = now_s()
        target.copy_(source)
        synchronize(self._on)
        return len(source) / max(now_s() - began_s, 1e-9)

    def close(self) -> None:
        """Free the memory. Readers may still have it open, as after this process's death, but read it only in a
        session."""
        synchronize(self._on)
        self._memory.close()


class OpenedBuckets:
    """Implements `asyncrl.param_sync.transports.local.OpenedMemory`."""

    def __init__(self, device: torch.device, message: Mapping[str, Any], files: Sequence[int]) -> None:
        self._memory = DeviceMemory.open(bytes.fromhex(message["handle"]), message["nbytes"], device)

    def borrowed(self, location: Sequence[int], key: BucketKey, who: str) -> AbstractContextManager[torch.Tensor]:
        """Lend a bucket's data; waits at the end until the receiver's stream is done with it."""
        start, length = location
        return borrowed_on_device(self._memory.data[start : start + length], key, who)

    def kept(self, location: Sequence[int]) -> memoryview:
        raise NotImplementedError("buckets on a device cannot be kept, see DeviceBuckets.keeps")

    def close(self) -> None:
        with contextlib.suppress(CudaError):  # the writer's process may have ended, which is no error here
            self._memory.close()
