"""Buckets in the memory of one GPU, between two processes. test_param_sync_transport covers the parts without a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

import pytest
import torch

from asyncrl.param_sync.buckets import check_checksum, pack
from asyncrl.param_sync.digest import flat_bytes
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.transports.base import NoReaders
from asyncrl.param_sync.transports.cuda_ipc import CudaIpcReader, CudaIpcWriter
from asyncrl.param_sync.transports.cuda_memory import CudaError, DeviceMemory, cuda_device
from asyncrl.param_sync.transports.shared_memory import SharedMemoryReader
from benchmarks.remote import Remote

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]

BUCKET_BYTES = 8192


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Tensors on the GPU: more bytes than two buckets, one tensor larger than a bucket, a strided one."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")
    return {f"t{i}": rand(1000) for i in range(10)} | {"large": rand(5000).bfloat16(), "strided": rand(30, 40).t()}


class SenderProcess:
    def __init__(self, buffers: int) -> None:
        self._writer = CudaIpcWriter(0, BUCKET_BYTES, buffers=buffers)

    async def address(self) -> Any:
        return self._writer.address

    async def send(self, session: str, seed: int, keep: bool = False) -> dict[str, str]:
        return await asyncio.to_thread(self._send, session, seed, keep)

    async def ceiling(self) -> float | None:
        return self._writer.ceiling

    def _send(self, session: str, seed: int, keep: bool) -> dict[str, str]:
        with contextlib.suppress(NoReaders):
            self._writer.open(session, ["r0"], 60.0, 5.0, keep)
            for filled in pack(tensors(seed).items(), self._writer.buffer):
                self._writer.publish(filled)
            self._writer.finish()
        return dict(self._writer.dropped)


class ReaderProcess:
    def __init__(self) -> None:
        self._reader = CudaIpcReader("r0")

    async def connect(self, session: str, address: Any) -> None:
        await asyncio.to_thread(self._reader.connect, session, [address], 20.0)

    async def read(self, keep_views: bool = False) -> dict[str, bytes]:
        """The bytes of each tensor."""
        return await asyncio.to_thread(self._read, keep_views)

    async def close(self) -> None:
        self._reader.close()

    async def openings(self) -> list[int]:
        return [id(memory) for memory in self._reader._opened.values()]

    def _read(self, keep_views: bool) -> dict[str, bytes]:
        got: dict[str, bytes] = {}
        views = []
        for bucket in self._reader.buckets(60.0):
            assert isinstance(bucket.data, torch.Tensor)
            assert bucket.data.is_cuda
            assert not bucket.kept
            check_checksum(bucket)
            for name, _, nbytes, offset in bucket.parts:
                part = bucket.data[offset : offset + nbytes]
                got[name] = got.get(name, b"") + part.cpu().numpy().tobytes()
                views += [part] if keep_views else []
            del part  # a view of the bucket, whose memory is reused
        return got


@contextlib.asynccontextmanager
async def two_processes(buffers=2):
    sender, reader = Remote(SenderProcess, buffers), Remote(ReaderProcess)
    try:
        yield sender, reader
    finally:
        sender.end()
        reader.end()


async def session(sender, reader, number, **options):
    await reader.connect(str(number), await sender.address())
    sending = asyncio.create_task(sender.send(str(number), number, **options))
    return sending, await reader.read()


def sent(number):
    return {name: flat_bytes(tensor).cpu().numpy().tobytes() for name, tensor in tensors(number).items()}


@pytest.mark.parametrize("buffers", [1, 2, 3])
async def test_every_byte_arrives_over_sessions_that_share_one_opening(buffers):
    async with two_processes(buffers) as (sender, reader):
        openings = []
        for number in range(5):
            sending, got = await session(sender, reader, number, keep=number % 2 == 1)
            assert got == sent(number)
            assert await sending == {}
            openings.append(await reader.openings())
        assert openings == [openings[0]] * 5
        assert await sender.ceiling() > 0


async def test_a_kept_view_is_detected():
    async with two_processes() as (sender, reader):
        await reader.connect("1", await sender.address())
        sending = asyncio.create_task(sender.send("1", 1))
        with pytest.raises(SyncError, match="kept a view into a bucket"):
            await reader.read(keep_views=True)
        assert "went away" in (await sending)["r0"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_lost_reader_is_dropped_and_replaced_by_another(number):
    async with two_processes() as (sender, reader):
        await session(sender, reader, 1)
        await reader.connect("2", await sender.address())
        reader.signal(number)
        assert (await sender.send("2", 2)).keys() == {"r0"}
        other = Remote(ReaderProcess)
        try:
            sending, got = await session(sender, other, 3)
            assert await sending == {}
            assert got == sent(3)
        finally:
            other.end()


async def test_a_reader_outlives_its_sender_and_takes_the_next_one():
    async with two_processes() as (sender, reader):
        await session(sender, reader, 1)
        await reader.connect("2", await sender.address())
        sender.signal(signal.SIGKILL)
        with pytest.raises(SyncError, match="sender 0 went away"):
            await reader.read()
        other = Remote(SenderProcess, 2)
        try:
            _, got = await session(other, reader, 3)
            assert got == sent(3)
            await reader.close()
        finally:
            other.end()


def test_a_reader_of_host_memory_is_refused():
    with (
        contextlib.closing(CudaIpcWriter(0, BUCKET_BYTES)) as writer,
        pytest.raises(SyncError, match=r"has its buckets in GPU .*, but this replica reads from host memory"),
    ):
        SharedMemoryReader("r0").connect("s", [writer.address], 5)


def test_missing_memory_and_an_unknown_handle_are_reported():
    device = cuda_device(None)
    with pytest.raises(CudaError, match="cudaMalloc on cuda:0 failed: out of memory"):
        DeviceMemory.allocate(1 << 50, device)
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle on cuda:0 failed"):
        DeviceMemory.open(b"\0" * 64, 4096, device)
    torch.ones(1, device=device).add_(1).cpu()  # torch still works
