"""The interface through which an engine receives weights, and its implementation in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from asyncrl.param_sync.buckets import Bucket, TensorPart, check_checksum, host_bytes
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.param_sync.lora.adapted_weights import AdaptedWeights
from asyncrl.param_sync.session_protocol import ReceivePlan, Staging
from asyncrl.param_sync.transports.base import BucketReader
from asyncrl.types.versions import PolicyVersion

T = TypeVar("T")


class WeightReceiver(Protocol):
    """Writes a session's buckets into an engine's weights: in this process (`LocalReceiver`), in the engine's workers,
    or through the engine's server.

    `asyncrl.param_sync.replica_session.EngineSession` calls it in this order: ``open``, ``receive``, with staging
    ``full`` also ``load``, ``verify``, ``commit``; ``abort`` at any point.
    """

    def needs_base(self) -> bool:
        """True if the next session must send the whole target, not only an adapter."""
        ...

    async def open(self, plan: ReceivePlan) -> Sequence[str]:
        """Check the manifest and connect to the senders, while generation continues. Returns the names under which the
        readers connected. Raises ManifestError."""
        ...

    async def receive(self, deadline_s: float) -> int:
        """Receive all buckets; returns their bytes."""
        ...

    async def load(self) -> None:
        """Staging ``full``: write the copy that ``receive`` made into the live weights."""

    async def verify(self) -> None:
        """Raises SyncError unless everything has arrived."""

    async def commit(self, version: PolicyVersion) -> None:
        """Declare the new weights to be those of ``version``."""

    async def abort(self) -> None:
        """Leave the session; returns when nothing writes into the weights any more."""

    def intact(self) -> bool:
        """True if the live weights are those of a single version."""
        ...

    async def close(self) -> None: ...


class LocalReceiver:
    """Implements `WeightReceiver` for weights in this process. Copies in its own thread, so that the event loop does
    not stall."""

    def __init__(self, name: str, weights: LiveWeights | AdaptedWeights, reader: BucketReader) -> None:
        self._name, self._weights, self._reader = name, weights, reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="param-sync")
        self._staging: Staging = "bucket"
        self._copy: list[Bucket] = []  # staging full: all buckets so far

    def needs_base(self) -> bool:
        return self._weights.needs_base

    async def open(self, plan: ReceivePlan) -> Sequence[str]:
        await self._in_thread(self._open, plan)
        return (self._name,)

    async def receive(self, deadline_s: float) -> int:
        return await self._in_thread(self._receive, deadline_s)

    async def load(self) -> None:
        await self._in_thread(self._load)

    async def verify(self) -> None:
        await self._in_thread(self._weights.verify)

    async def commit(self, version: PolicyVersion) -> None:
        await self._in_thread(self._weights.commit, version)

    async def abort(self) -> None:
        self._reader.abort()
        await self._in_thread(self._abort)

    def intact(self) -> bool:
        return self._weights.intact()

    async def close(self) -> None:
        await self.abort()
        self._thread.shutdown()
        self._reader.close()

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _open(self, plan: ReceivePlan) -> None:
        self._staging = plan.staging
        self._weights.open(plan.session, plan.manifest)
        self._reader.connect(plan.session, plan.addresses, plan.deadline_s)

    def _receive(self, deadline_s: float) -> int:
        take, destination = (self._take, self._destination) if self._staging == "bucket" else (self._stage, None)
        nbytes = 0
        # Closed as soon as a bucket is refused, so that the senders do not wait for this replica.
        with contextlib.closing(self._reader.buckets(deadline_s, destination)) as buckets:  # type: ignore[type-var]
            for bucket in buckets:
                take(bucket)
                nbytes += sum(part.nbytes for part in bucket.parts)
        return nbytes

    def _destination(self, session: str, part: TensorPart, device: torch.device) -> torch.Tensor | None:
        return self._weights.destination(session, part, device)

    def _take(self, bucket: Bucket) -> None:
        self._weights.take(bucket)

    def _stage(self, bucket: Bucket) -> None:
        """Add a bucket to the host copy if its checksum matches. The rest of the buffer is left out."""
        end = max((part.offset + part.nbytes for part in bucket.parts), default=0)
        bucket = bucket._replace(data=bucket.data[: max(end, 0)])
        check_checksum(bucket)
        data = bucket.data if bucket.kept else memoryview(bytes(host_bytes(bucket)))
        self._copy.append(bucket._replace(data=data, checksum=None))

    def _load(self) -> None:
        copy, self._copy = self._copy, []
        for bucket in copy:
            self._take(bucket)

    def _abort(self) -> None:
        self._copy = []
        self._weights.abort()
