"""The collective transport between real processes over gloo, with failures during transfers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import struct
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from asyncrl.param_sync.buckets import Bucket, Filled, TensorPart, check_checksum, pack
from asyncrl.param_sync.digest import combine_hashes, digest_tensors
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.param_sync.manifest import Manifest, TensorSpec
from asyncrl.param_sync.sender import Sender
from asyncrl.param_sync.session_protocol import SendPlan
from asyncrl.param_sync.transports import gloo, nccl, process_group
from asyncrl.param_sync.transports.base import NoReaders
from asyncrl.param_sync.transports.broadcast import GroupRendezvous
from asyncrl.param_sync.transports.collective import CollectiveWriter
from asyncrl.param_sync.transports.collective_reader import CollectiveReader
from asyncrl.param_sync.transports.messages import framed, read_message
from asyncrl.param_sync.transports.process_group import Group, host_store
from asyncrl.types.versions import PolicyVersion
from benchmarks.remote import Remote
from tests.support.collective_processes import HOST, ReaderProcess, SenderProcess, payload_digest
from tests.support.stuck_channel import StuckBackend

BUCKETS = 8


@asynccontextmanager
async def processes(senders, readers):
    """Starts senders, and readers by name; ends them on exit."""
    sending = [Remote(SenderProcess, i) for i in range(senders)]
    reading = {f"r{i}": Remote(ReaderProcess, f"r{i}") for i in range(readers)}
    try:
        yield sending, reading
    finally:
        for remote in [*sending, *reading.values()]:
            remote.end()


class Session:
    """A running session: readers dropped by each sender, and what each reader read, or its error."""

    def __init__(self, number, senders, readers, buckets, stall_s, deadline_s):
        self.number, self.buckets = number, buckets
        self.sends = [
            asyncio.create_task(s.send(str(number), list(readers), self.seed(i), buckets, stall_s))
            for i, s in enumerate(senders)
        ]
        self.reads = {who: asyncio.create_task(r.read(deadline_s)) for who, r in readers.items()}

    def seed(self, sender):
        return self.number * 10 + sender

    async def dropped(self):
        return await asyncio.gather(*self.sends)

    async def assert_whole(self, who):
        """Check that the reader ``who`` read every bucket of every sender once, in order, with the sent bytes."""
        got = await self.reads[who]
        assert got == {
            i: (list(range(self.buckets)), payload_digest(self.seed(i), self.buckets)) for i in range(len(self.sends))
        }


async def session(number, senders, readers, buckets=BUCKETS, stall_s=20.0, deadline_s=60.0):
    addresses = [await sender.address() for sender in senders]
    await asyncio.gather(*(reader.connect(str(number), addresses) for reader in readers.values()))
    return Session(number, senders, readers, buckets, stall_s, deadline_s)


async def assert_all_whole(running):
    assert await running.dropped() == [{}] * len(running.sends)
    for who in running.reads:
        await running.assert_whole(who)


async def test_two_readers_get_every_bucket_of_two_senders_and_the_groups_are_reused():
    async with processes(2, 2) as (senders, readers):
        generations = set()
        for number in range(3):
            await assert_all_whole(await session(number, senders, readers))
            generations.add(tuple([await sender.generation() for sender in senders]))
        assert len(generations) == 1


async def test_different_members_form_another_group():
    async with processes(1, 2) as ((sender,), readers):
        generations = []
        for number, members in enumerate(["r0", "r0 r1", "r1", "r1"]):
            taking_part = {who: readers[who] for who in members.split()}
            await assert_all_whole(await session(number, [sender], taking_part))
            generations.append(await sender.generation())
        assert len(set(generations)) == 3
        assert generations[2] == generations[3]


@pytest.mark.parametrize("held", ["sender", "reader"])
async def test_a_reader_killed_during_the_transfer_does_not_delay_the_survivor(held):
    async with processes(2, 2) as (senders, readers):
        # block the sender with nothing in transit, or the reader with two buckets that it has not read
        gate = senders[0] if held == "sender" else readers["r1"]
        await gate.hold(3)
        running = await session(0, senders, readers)
        await gate.held()
        readers["r1"].signal(signal.SIGKILL)
        started = time.monotonic()
        await gate.release() if held == "sender" else None
        for dropped in await running.dropped():
            assert dropped.keys() <= {"r1"}
        assert "went away" in running.sends[0].result()["r1"]
        assert "buckets it had read: " in running.sends[0].result()["r1"]
        await running.assert_whole("r0")
        assert time.monotonic() - started < 8  # the time-outs are 20 s and more
        with contextlib.suppress(ConnectionError):
            await running.reads["r1"]

        readers["r1"].end()
        readers["r1"] = Remote(ReaderProcess, "r1")
        await assert_all_whole(await session(1, senders, readers))


async def test_a_stopped_reader_is_dropped_and_changes_nothing_when_it_wakes():
    async with processes(1, 3) as (senders, readers):
        await senders[0].hold(3)
        running = await session(0, senders, readers, stall_s=2.0)
        await senders[0].held()
        readers["r1"].signal(signal.SIGSTOP)
        await senders[0].release()
        started = time.monotonic()
        (dropped,) = await running.dropped()
        assert time.monotonic() - started < 8
        assert dropped.keys() == {"r1"}
        assert "was silent for 2.0 s; buckets it had read: " in dropped["r1"]
        await running.assert_whole("r0")
        await running.assert_whole("r2")

        readers["r1"].signal(signal.SIGCONT)
        with pytest.raises(SyncError, match=r"sync phase transfer, r1, bucket 0/\d of session 0: sender 0 went away"):
            await running.reads["r1"]
        await assert_all_whole(await session(1, senders, readers))


async def test_a_reader_stopped_during_a_receive_into_live_memory_writes_nothing_once_it_has_failed():
    async with processes(1, 3) as (senders, readers):
        await assert_all_whole(await session(0, senders, readers))
        await readers["r0"].stop_at(2)  # first in the chain: it has bytes for the others when it wakes
        running = await session(1, senders, readers, buckets=64, stall_s=2.0)
        (dropped,) = await running.dropped()
        assert dropped.keys() == {"r0"}
        survivors = {who: readers[who] for who in ("r1", "r2")}
        for who in survivors:
            await running.assert_whole(who)
        await assert_all_whole(await session(2, senders, survivors))
        before = [await reader.live() for reader in survivors.values()]

        readers["r0"].signal(signal.SIGCONT)
        with pytest.raises(SyncError, match=r"r0, bucket 0/\d+ of session 1: sender 0 went away"):
            await running.reads["r0"]
        its = await readers["r0"].live()
        await asyncio.sleep(0.5)
        assert await readers["r0"].live() == its
        assert [await reader.live() for reader in survivors.values()] == before
        await assert_all_whole(await session(3, senders, readers))


async def test_a_slow_reader_is_awaited_and_no_reader_gets_a_bucket_twice():
    async with processes(1, 2) as (senders, readers):
        # longer than half of the stall time: meanwhile the group is aborted and formed again
        await readers["r1"].linger({2: 1.8})
        await readers["r0"].linger({BUCKETS - 1: 1.8})
        for number in range(2):
            await assert_all_whole(await session(number, senders, readers, stall_s=3.0))


async def test_a_killed_sender_is_reported_by_its_readers_at_once():
    async with processes(2, 2) as (senders, readers):
        await senders[1].hold(3)
        running = await session(0, senders, readers)
        await senders[1].held()
        senders[1].signal(signal.SIGKILL)
        started = time.monotonic()
        for read in running.reads.values():
            with pytest.raises(SyncError, match=r"bucket 1/\d of session 0: sender 1 went away during the session"):
                await read
        assert time.monotonic() - started < 5


async def test_a_stopped_sender_is_reported_by_its_readers_at_the_deadline():
    async with processes(1, 2) as (senders, readers):
        await senders[0].hold(3)
        running = await session(0, senders, readers, deadline_s=3.0)
        await senders[0].held()
        senders[0].signal(signal.SIGSTOP)
        started = time.monotonic()
        for read in running.reads.values():
            with pytest.raises(
                SyncError, match=r"bucket 0/\d of session 0: sender 0 was not done by the deadline of 3 s"
            ):
                await read
        assert time.monotonic() - started < 5
        senders[0].signal(signal.SIGCONT)


async def test_abort_ends_a_wait_for_a_stopped_reader():
    async with processes(1, 2) as (senders, readers):
        await readers["r1"].hold(2)
        running = await session(0, senders, readers)
        await readers["r1"].held()
        readers["r1"].signal(signal.SIGSTOP)
        started = time.monotonic()
        await senders[0].abort("0")
        (dropped,) = await running.dropped()
        assert time.monotonic() - started < 3
        assert all("the session was aborted" in why for why in dropped.values())
        assert dropped.keys() == {"r0", "r1"}
        with pytest.raises(SyncError, match="went away"):
            await running.reads["r0"]
        readers["r1"].signal(signal.SIGCONT)
        await readers["r1"].release()
        with pytest.raises(SyncError, match="went away"):
            await running.reads["r1"]
        await assert_all_whole(await session(1, senders, readers))


@pytest.mark.faults
async def test_many_sessions_and_groups_leak_nothing():
    async with processes(1, 2) as (senders, readers):
        everyone = [*senders, *readers.values()]

        async def used(numbers, members):
            for number in numbers:
                taking_part = {who: readers[who] for who in members(number).split()}
                await assert_all_whole(await session(number, senders, taking_part, buckets=2))
            return [await remote.resources() for remote in everyone]

        alternating = lambda number: "r0 r1" if number % 2 else "r0"
        warm = await used(range(20), alternating)
        many_groups = await used(range(20, 50), alternating)  # each would leave 2 MiB of buffers behind if it were kept
        many_sessions = await used(range(51, 251), lambda _: "r0 r1")
        for first, then, last in zip(warm, many_groups, many_sessions):
            assert abs(then["fds"] - first["fds"]) <= 2
            assert abs(then["threads"] - first["threads"]) <= 2
            assert then["bytes"] < first["bytes"] + 40e6
            assert last["fds"] <= then["fds"] + 2
            assert last["threads"] <= then["threads"] + 2
            assert last["bytes"] < then["bytes"] + 10e6


class Members:
    """The members of one generation in this process; ``done`` and ``failed`` by rank."""

    def __init__(self, size):
        self._store = host_store(HOST)
        members = [GroupRendezvous("g", rank, size, HOST, self._store.port, 20.0) for rank in range(size)]
        self.done = [threading.Semaphore(0) for _ in members]
        self.failed = [threading.Event() for _ in members]
        on_done = lambda rank, _, error: self.done[rank].release() if error is None else self.failed[rank].set()
        cpu = torch.device("cpu")
        self.groups = [
            Group(member, HOST, gloo.TRANSPORT, cpu, functools.partial(on_done, member.rank)) for member in members
        ]

    def broadcast(self, *pieces_of_each):
        for group, pieces in zip(self.groups, pieces_of_each, strict=True):
            if pieces is not None:
                group.broadcast(pieces)


@pytest.fixture
def members():
    made = []

    def make(size):
        made.append(Members(size))
        return made[-1]

    yield make
    for group in [group for each in made for group in each.groups]:
        assert group.abort()


def bytes_of(*sizes):
    return [torch.randint(1, 256, (n,), dtype=torch.uint8) for n in sizes]


@pytest.mark.parametrize("size", [2, 4])
def test_pieces_of_any_size_pass_down_the_chain(members, size):
    sizes = (1, 9 << 20, 4 << 20, 3)
    chain = members(size)
    for _ in range(2):
        sent = bytes_of(*sizes)
        received = [[torch.zeros_like(piece) for piece in sent] for _ in range(size - 1)]
        chain.broadcast(sent, *received)
        assert all(done.acquire(timeout=20) for done in chain.done)
        for pieces in received:
            assert all(torch.equal(got, piece) for got, piece in zip(pieces, sent, strict=True))


def test_an_aborted_broadcast_is_neither_written_nor_forwarded(members):
    chain, sent = members(3), bytes_of(16 << 20)
    middle, last = [torch.zeros_like(sent[0])], [torch.zeros_like(sent[0])]
    chain.broadcast(sent, None, last)  # the middle member takes no part yet, as if it were stopped
    assert not chain.done[2].acquire(timeout=0.3)
    began = time.monotonic()
    assert chain.groups[2].abort()
    assert time.monotonic() - began < 1
    chain.groups[1].broadcast(middle)
    assert chain.failed[1].wait(5)
    assert last[0].eq(0).all()
    assert chain.failed[2].is_set()
    chain.groups[2].broadcast(last)  # nothing starts afterwards either
    assert chain.groups[2].abort()
    assert last[0].eq(0).all()


def test_an_aborted_receive_stops_writing_its_tensor(members):
    sent = [torch.ones(64 << 20, dtype=torch.uint8)]
    for _ in range(10):  # until one is aborted before it is complete
        pair, received = members(2), [torch.zeros_like(sent[0])]
        pair.broadcast(sent, received)
        while not received[0][1 << 20]:
            pass
        assert pair.groups[1].abort()
        seen = received[0].clone()
        if not seen[-1]:
            time.sleep(0.3)
            assert torch.equal(received[0], seen)
            assert not pair.done[1].acquire(blocking=False)
            return
    pytest.fail("all 64 MiB always arrived before the abort")


def test_a_group_that_is_still_forming_can_be_aborted():
    store = host_store(HOST)
    alone = Group(
        GroupRendezvous("g", 1, 2, HOST, store.port, 3.0), HOST, gloo.TRANSPORT, torch.device("cpu"), lambda *_: None
    )
    tensor = torch.zeros(10, dtype=torch.uint8)
    alone.broadcast([tensor])
    assert alone.abort()


def test_a_group_that_does_not_end_is_left_in_time(monkeypatch, caplog):
    """The thread that computes must not wait for it."""
    monkeypatch.setattr(process_group, "_ENDING_S", 0.2)
    backend = StuckBackend()
    group = Group(GroupRendezvous("g", 1, 2, HOST, 1, 20.0), HOST, backend, torch.device("cpu"), lambda *_: None)
    group.broadcast([torch.zeros(10, dtype=torch.uint8)])
    assert backend.channel.receiving.wait(60)
    assert not group.abort()
    assert not group.abort()  # the first one still waits
    assert "an aborted broadcast did not end within 0.2 s" in caplog.text
    backend.channel.released.set()
    monkeypatch.setattr(process_group, "_ENDING_S", 60.0)
    assert group.abort()


def write(writer, session, readers, tensors=None):
    writer.open(session, readers, 20.0, 20.0)
    for filled in pack((tensors or {"t": torch.ones(100)}).items(), writer.buffer):
        writer.publish(filled)
    writer.finish()


@pytest.fixture
def pair():
    with (
        contextlib.closing(CollectiveWriter(0, 4096, HOST, gloo.TRANSPORT)) as writer,
        contextlib.closing(CollectiveReader("r0", gloo.TRANSPORT)) as reader,
    ):
        yield writer, reader


def test_zero_copy_tensors_arrive_at_their_destinations_and_are_held_no_longer_than_two_buckets(pair):
    writer, reader = pair
    writer.zero_copy_from = 1000
    live = {f"t{i}": torch.zeros(2000, dtype=torch.uint8) for i in range(20)}
    live["t7"] = torch.zeros(50, 40, dtype=torch.uint8).t()  # not contiguous: arrives in its bucket
    manifest = Manifest(tuple(TensorSpec(name, "uint8", tuple(view.shape)) for name, view in live.items()))
    made: list[weakref.ref[np.ndarray]] = []

    def at_most(count):
        """Wait until at most ``count`` arrays are alive: the group's threads release theirs with a delay."""
        limit_s = time.monotonic() + 10
        while sum(array() is not None for array in made) > count:
            assert time.monotonic() < limit_s
            time.sleep(0.001)

    def export():
        for i, (name, view) in enumerate(live.items()):
            array = np.full(tuple(view.shape), i + 1, np.uint8)
            made.append(weakref.ref(array))
            at_most(2 * 2 + 2)  # two to a bucket; one is being packed, one was just made
            yield name, torch.from_numpy(array)
            del array

    receiver = LiveWeights(live, {}, lambda version: None)
    receiver.open("s", manifest)
    sender = Sender("trainer/0", writer)
    reader.connect("s", [writer.address], 5)
    with ThreadPoolExecutor(1) as thread:

        def send():
            sender.open(SendPlan("s", PolicyVersion(0, 1), manifest, ("r0",), 20.0, 20.0, checksum=True))
            return sender.send(export())

        done = thread.submit(send)
        in_place = []
        for bucket in reader.buckets(20, receiver.destination):
            in_place += bucket.in_place
            receiver.take(bucket)
        report = done.result()
    assert in_place == [name for name in live if name != "t7"]
    receiver.verify()
    receiver.commit(PolicyVersion(0, 1))
    assert combine_hashes(report.hashes["target"]) == digest_tensors(live.items())
    at_most(0)


def test_the_default_group_is_not_touched(pair):
    writer, reader = pair
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        default = dist.group.WORLD
        reader.connect("s", [writer.address], 5)
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(write, writer, "s", ["r0"])
            assert len(list(reader.buckets(20))) == 1
            done.result()
        assert dist.group.WORLD is default
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_a_peer_without_the_token_is_refused(pair):
    writer, reader = pair
    stranger = CollectiveReader("r0", gloo.TRANSPORT)
    stranger.connect("s", [replace(writer.address, token="0" * 32)], 5)
    reader.connect("s", [writer.address], 5)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(write, writer, "s", ["r0"])
        assert len(list(reader.buckets(20))) == 1
        with pytest.raises(SyncError, match="it did not admit this replica"):
            list(stranger.buckets(5))
        done.result()
    assert writer.address.token not in repr(writer.address)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\xff" * 10_000, b"\0" * 32])
def test_garbage_on_the_port_is_refused(pair, garbage):
    writer, reader = pair
    with (
        socket.create_connection((writer.address.host, writer.address.port)) as caller,
        ThreadPoolExecutor(1) as thread,
    ):
        caller.sendall(garbage)
        caller.settimeout(10)
        reader.connect("s", [writer.address], 5)
        done = thread.submit(write, writer, "s", ["r0"])
        assert len(list(reader.buckets(20))) == 1
        done.result()
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""


def test_an_overlong_hello_is_refused(pair):
    writer, _ = pair
    with socket.create_connection((writer.address.host, writer.address.port)) as caller:
        caller.sendall(writer.address.token.encode() + struct.pack("<I", 1 << 31) + b" " * 5000)
        with pytest.raises(NoReaders):
            writer.open("s", ["r0"], 20.0, 0.5)
        caller.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""


def test_a_wrong_acknowledgement_drops_its_reader(pair):
    writer, _ = pair
    address = writer.address
    with socket.create_connection((address.host, address.port)) as caller, ThreadPoolExecutor(1) as thread:
        caller.sendall(address.token.encode() + framed({"session": "s", "who": "r0", "holds": ""}))
        done = thread.submit(write, writer, "s", ["r0"])
        while "sequence" not in read_message(caller):
            pass
        caller.sendall(framed({"read": 7}))
        done.result()
    assert writer.dropped == {"r0": "acknowledged bucket 7 where 0 was next; buckets it had read: 0"}


def test_both_sides_need_the_same_backend(pair):
    writer, reader = pair
    with pytest.raises(SyncError, match="sends over nccl, but this replica receives over gloo; both must be the same"):
        reader.connect("s", [replace(writer.address, backend="nccl")], 5)


def test_a_host_that_is_not_this_machine_is_refused():
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1 .*must be an address of this machine"):
        CollectiveWriter(0, 4096, "192.0.2.1", gloo.TRANSPORT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nccl_without_a_device_is_refused():
    with pytest.raises(ValueError, match="nccl needs a CUDA device"):
        CollectiveWriter(0, 4096, HOST, nccl.TRANSPORT)


def test_a_bucket_of_only_empty_tensors_is_sent(pair):
    writer, reader = pair
    reader.connect("s", [writer.address], 5)
    with ThreadPoolExecutor(1) as thread:

        def send():
            writer.open("s", ["r0"], 20.0, 20.0)
            for filled in pack([("none", torch.empty(0, 3))], writer.buffer):
                writer.publish(filled)
            writer.finish()

        done = thread.submit(send)
        assert [(b.parts, len(b.data)) for b in reader.buckets(20)] == [((TensorPart("none", 0, 0, 0),), 0)]
        done.result()


def test_the_checksum_of_a_device_bucket_covers_its_bytes():
    buffer = torch.zeros(4096, dtype=torch.uint8)
    (filled,) = pack([("a", torch.arange(100.0)), ("b", torch.ones(3))], lambda: buffer)
    bucket = Bucket("s", 0, 0, filled.parts, buffer, filled.checksum)
    check_checksum(bucket)
    buffer[5] ^= 1
    with pytest.raises(SyncError, match="damaged in transit"):
        check_checksum(bucket)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_packing_to_a_device_gives_the_same_bytes_and_checksum():
    tensors = {"a": torch.randn(5, 6).t(), "b": torch.randn(70).bfloat16(), "c": torch.tensor(True)}
    seen: dict[str, list[tuple[Filled, bytes]]] = {}
    for device in ("cpu", "cuda"):
        buffer = torch.zeros(128, dtype=torch.uint8, device=device)
        packed = pack(((n, t.to(device)) for n, t in tensors.items()), lambda buffer=buffer: buffer)
        seen[device] = [(filled, buffer.cpu().numpy().tobytes()) for filled in packed]
    assert [f for f, _ in seen["cpu"]] == [f for f, _ in seen["cuda"]]
    assert seen["cpu"] == seen["cuda"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_carries_buckets_from_one_device_to_another():
    tensors = {f"t{i}": torch.randn(1000, device="cuda:0") for i in range(10)}
    with (
        contextlib.closing(CollectiveWriter(0, 8192, HOST, nccl.TRANSPORT, "cuda:0")) as writer,
        contextlib.closing(CollectiveReader("r0", nccl.TRANSPORT, "cuda:1")) as reader,
        ThreadPoolExecutor(1) as thread,
    ):

        def send(session):
            writer.open(session, ["r0"], 60.0, 60.0)
            for filled in pack(tensors.items(), writer.buffer):
                writer.publish(filled)
            writer.finish()

        for session in ("s1", "s2"):
            reader.connect(session, [writer.address], 5)
            done = thread.submit(send, session)
            got = {}
            for bucket in reader.buckets(60):
                assert bucket.data.device == torch.device("cuda:1")
                check_checksum(bucket)
                for part in bucket.parts:
                    got[part.name] = bucket.data[part.offset : part.offset + part.nbytes].clone().view(torch.float32)
            done.result()
            assert got.keys() == tensors.keys()
            assert all(torch.equal(got[name].cpu(), t.cpu()) for name, t in tensors.items())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_a_kept_view_of_a_bucket_on_a_device_is_detected():
    with (
        contextlib.closing(CollectiveWriter(0, 4096, HOST, gloo.TRANSPORT, "cuda")) as writer,
        contextlib.closing(CollectiveReader("r0", gloo.TRANSPORT, "cuda")) as reader,
        ThreadPoolExecutor(1) as thread,
    ):
        reader.connect("s", [writer.address], 5)
        # More buckets than buffers: one that has published all is left alone in `finish`, which does not raise.
        tensors = {f"t{i}": torch.ones(1000) for i in range(2 * process_group.BUFFERS)}
        done = thread.submit(write, writer, "s", ["r0"], tensors)
        with pytest.raises(SyncError, match="kept a view into a bucket"):
            _ = [bucket.data[8:16].view(torch.float32) for bucket in reader.buckets(20)]
        with pytest.raises(NoReaders):
            done.result()
        assert "went away" in writer.dropped["r0"]


def test_a_shared_store_keeps_its_port_and_is_reachable_by_its_address():
    """Ranks need that, which may join late after long imports."""
    store = host_store("127.0.0.1", shared=True)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", store.port))
    found, rank, ranks = next(dist.rendezvous(f"tcp://127.0.0.1:{store.port}", 0, 1))
    assert (rank, ranks) == (0, 1)
    found.set("from", "the other")
    assert store.get("from") == b"the other"
