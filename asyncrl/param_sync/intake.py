"""Where a replica's weights arrive: the half of a sync session that reads buckets and hands them to receivers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from asyncrl.param_sync.buckets import check_checksum, host_bytes
from asyncrl.param_sync.handles import ReceivePlan, Staging
from asyncrl.param_sync.receiver import Bucket, Receiver, TensorPart
from asyncrl.param_sync.transports.base import BucketReader
from asyncrl.sample import PolicyVersion

T = TypeVar("T")


class Intake(Protocol):
    """In the replica's own process (`LocalIntake`), or in the engine's workers.

    `ReplicaEndpoint` calls it in this order: ``open``, ``receive``, with staging ``full`` also ``load``, ``verify``,
    ``commit``; ``abort`` at any point."""

    def needs_base(self) -> bool:
        """Whether the next session must send all of the target, and not an adapter alone."""
        ...

    async def open(self, plan: ReceivePlan) -> Sequence[str]:
        """Check the manifest and connect to the senders; returns the names under which the readers did. Generation
        goes on meanwhile. Raises ManifestError."""
        ...

    async def receive(self, deadline_s: float) -> int:
        """Take every bucket; returns their bytes."""
        ...

    async def load(self) -> None:
        """Staging ``full``: write the copy that ``receive`` made into the live weights."""

    async def verify(self) -> None:
        """Raises SyncError unless everything has arrived."""

    async def commit(self, version: PolicyVersion) -> None: ...

    async def abort(self) -> None:
        """Be in no session; returns when nobody writes into the weights any more."""

    def intact(self) -> bool:
        """Whether the live weights are those of one version."""
        ...

    async def close(self) -> None: ...


class LocalIntake:
    """Implements `Intake` with receivers of this process, all of which see each bucket. They run in one thread of their
    own, so that copying does not hold the event loop up."""

    def __init__(self, name: str, receivers: Callable[[], Sequence[Receiver]], reader: BucketReader) -> None:
        self._name, self._receivers, self._reader = name, receivers, reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="param-sync")
        self._staging: Staging = "bucket"
        self._copy: list[Bucket] = []  # staging full: all that has arrived

    def needs_base(self) -> bool:
        return any(receiver.needs_base for receiver in self._receivers())

    async def open(self, plan: ReceivePlan) -> Sequence[str]:
        await self._in_thread(self._open, plan)
        return (self._name,)

    async def receive(self, deadline_s: float) -> int:
        return await self._in_thread(self._receive, deadline_s)

    async def load(self) -> None:
        await self._in_thread(self._load)

    async def verify(self) -> None:
        await self._in_thread(self._each, lambda receiver: receiver.verify())

    async def commit(self, version: PolicyVersion) -> None:
        await self._in_thread(self._each, lambda receiver: receiver.commit(version))

    async def abort(self) -> None:
        self._reader.abort()
        await self._in_thread(self._abort)

    def intact(self) -> bool:
        return all(receiver.intact() for receiver in self._receivers())

    async def close(self) -> None:
        await self.abort()
        self._thread.shutdown()
        self._reader.close()

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _open(self, plan: ReceivePlan) -> None:
        self._staging = plan.staging
        for receiver in self._receivers():
            receiver.open(plan.session, plan.manifest)
        self._reader.connect(plan.session, plan.addresses, plan.deadline_s)

    def _receive(self, deadline_s: float) -> int:
        take, place = (self._take, self._place) if self._staging == "bucket" else (self._stage, None)
        nbytes = 0
        # closed at once when a receiver fails, so that the senders do not wait for this replica
        with contextlib.closing(self._reader.buckets(deadline_s, place)) as buckets:  # type: ignore[type-var]
            for bucket in buckets:
                take(bucket)
                nbytes += sum(part.nbytes for part in bucket.parts)
        return nbytes

    def _each(self, step: Callable[[Receiver], None]) -> None:
        for receiver in self._receivers():
            step(receiver)

    def _place(self, session: str, part: TensorPart, device: torch.device) -> torch.Tensor | None:
        receivers = self._receivers()
        return receivers[0].place(session, part, device) if len(receivers) == 1 else None

    def _take(self, bucket: Bucket) -> None:
        self._each(lambda receiver: receiver.take(bucket))

    def _stage(self, bucket: Bucket) -> None:
        """Keep a bucket that is as it was sent."""
        check_checksum(bucket)
        data = bucket.data if bucket.kept else memoryview(bytes(host_bytes(bucket)))
        self._copy.append(bucket._replace(data=data, checksum=None))

    def _load(self) -> None:
        copy, self._copy = self._copy, []
        for bucket in copy:
            self._take(bucket)

    def _abort(self) -> None:
        self._copy = []
        self._each(lambda receiver: receiver.abort())
