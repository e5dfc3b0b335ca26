"""Senders and readers of the collective transport, to run in separate processes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from asyncrl.param_sync.buckets import TensorPart, pack
from asyncrl.param_sync.transports import gloo
from asyncrl.param_sync.transports.base import NoReaders
from asyncrl.param_sync.transports.collective import CollectiveAddress, CollectiveWriter
from asyncrl.param_sync.transports.collective_reader import CollectiveReader

HOST = "127.0.0.1"
BUCKET_BYTES = 1 << 20


def payload(seed: int, buckets: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of distinct bytes, one per bucket; all travel without a copy except the last, which does not fill its
    bucket."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(buckets):
        nbytes = BUCKET_BYTES if i < buckets - 1 else 1000
        yield f"t{seed % 10}.{i}", torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def payload_digest(seed: int, buckets: int) -> str:
    """Digest that `ReaderProcess.read` returns for a sender if each byte arrived once and in order."""
    h = hashlib.sha256()
    for _, tensor in payload(seed, buckets):
        h.update(tensor.numpy())
    return h.hexdigest()


class Gated:
    """Blocks once at a chosen bucket, until `release`."""

    def __init__(self) -> None:
        self.hold_at = -1
        self._gate, self._reached = threading.Event(), threading.Event()

    async def hold(self, at: int) -> None:
        self._gate.clear()
        self._reached.clear()
        self.hold_at = at

    async def held(self) -> None:
        """Wait until it blocks there."""
        await asyncio.to_thread(self._reached.wait)

    async def release(self) -> None:
        self._gate.set()

    def pass_gate(self, at: int) -> None:
        if at == self.hold_at:
            self.hold_at = -1
            self._reached.set()
            self._gate.wait()


def resources() -> dict[str, int]:
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"fds": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")), "bytes": resident}


class SenderProcess(Gated):
    """Sends `payload(seed, buckets)`."""

    def __init__(self, sender: int) -> None:
        super().__init__()
        self._writer = CollectiveWriter(sender, BUCKET_BYTES, HOST, gloo.TRANSPORT)

    async def address(self) -> CollectiveAddress:
        return self._writer.address

    async def send(self, session: str, readers: list[str], seed: int, buckets: int, stall_s: float) -> dict[str, str]:
        """Returns the dropped readers and the reasons."""
        return await asyncio.to_thread(self._send, session, readers, seed, buckets, stall_s)

    async def abort(self, session: str) -> None:
        self._writer.abort(session)

    async def generation(self) -> str:
        return self._writer._generation

    async def resources(self) -> dict[str, int]:
        return resources()

    def _send(self, session: str, readers: list[str], seed: int, buckets: int, stall_s: float) -> dict[str, str]:
        try:
            self._writer.open(session, readers, 60.0, stall_s)
            tensors, zero_copy_from = payload(seed, buckets), self._writer.zero_copy_from
            for at, filled in enumerate(pack(tensors, self._writer.buffer, zero_copy_from=zero_copy_from)):
                self.pass_gate(at)
                self._writer.publish(filled)
            self._writer.finish()
        except NoReaders:
            pass
        return dict(self._writer.dropped)


class ReaderProcess(Gated):
    """Reads sessions. Every other zero-copy tensor is received into live memory, which is kept between sessions."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._reader = CollectiveReader(who, gloo.TRANSPORT)
        self._linger_s: dict[int, float] = {}
        self._live: dict[str, torch.Tensor] = {}
        self._placed = 0
        self._stop_at = -1

    async def linger(self, seconds: dict[int, float]) -> None:
        """Set the seconds to spend on each bucket, by its sequence number."""
        self._linger_s = seconds

    async def connect(self, session: str, addresses: list[CollectiveAddress]) -> None:
        await asyncio.to_thread(self._reader.connect, session, addresses, 20.0)

    async def read(self, deadline_s: float = 60.0) -> dict[int, tuple[list[int], str]]:
        """By sender: the sequences of its buckets and the digest of their bytes."""
        return await asyncio.to_thread(self._read, deadline_s)

    async def resources(self) -> dict[str, int]:
        return resources()

    async def stop_at(self, placed: int) -> None:
        """Send SIGSTOP to this process at the given receive into live memory, counted from 1."""
        self._placed, self._stop_at = 0, placed

    async def live(self) -> dict[str, str]:
        """Digest of each tensor in live memory."""
        return {name: hashlib.sha256(tensor.numpy()).hexdigest() for name, tensor in self._live.items()}

    def _place(self, session: str, part: TensorPart, device: torch.device) -> torch.Tensor | None:
        if int(part.name.rpartition(".")[2]) % 2:
            return None
        self._placed += 1
        if self._placed == self._stop_at:
            # shortly after, so that the receive has begun
            threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        if part.name not in self._live:
            self._live[part.name] = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
        return self._live[part.name][: part.nbytes]

    def _read(self, deadline_s: float) -> dict[int, tuple[list[int], str]]:
        sequences: dict[int, list[int]] = {}
        hashes: dict[int, Any] = {}
        for bucket in self._reader.buckets(deadline_s, self._place):
            self.pass_gate(bucket.sequence)
            time.sleep(self._linger_s.get(bucket.sequence, 0.0))
            sequences.setdefault(bucket.sender, []).append(bucket.sequence)
            h = hashes.setdefault(bucket.sender, hashlib.sha256())
            for part in bucket.parts:
                in_place = bucket.in_place.get(part.name)
                h.update(bucket.data[part.offset : part.offset + part.nbytes] if in_place is None else in_place.numpy())
        return {sender: (sequences[sender], hashes[sender].hexdigest()) for sender in sequences}
