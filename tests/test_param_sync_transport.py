"""Built-in transports without a sync session: a writer and readers in threads."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.buckets import pack
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.manifest import Manifest, TensorSpec
from asyncrl.param_sync.sender import Sender
from asyncrl.param_sync.session_protocol import SendPlan
from asyncrl.param_sync.transports import gloo
from asyncrl.param_sync.transports.base import BucketReader, BucketWriter, NoReaders
from asyncrl.param_sync.transports.collective import CollectiveWriter
from asyncrl.param_sync.transports.collective_reader import CollectiveReader
from asyncrl.param_sync.transports.listener import Listener, count_refusals
from asyncrl.param_sync.transports.local import LocalAddress, LocalReader, LocalWriter
from asyncrl.param_sync.transports.local import _machine as this_machine
from asyncrl.param_sync.transports.messages import framed
from asyncrl.param_sync.transports.shared_memory import (
    MappedFile,
    MemoryFile,
    SharedMemoryReader,
    SharedMemoryWriter,
)
from asyncrl.types.versions import PolicyVersion
from tests.support.stranger import PAYLOADS, stranger

TENSORS = {f"t{i}": torch.full((16,), float(i)) for i in range(10)}  # one to a bucket of 64 bytes


class Transport(NamedTuple):
    """A transport. ``connection`` connects to a writer without a hello. ``token``: prefix of a hello; ``more``: fields
    of a hello besides session and reader."""

    writer: Callable[[int, int], BucketWriter]
    reader: Callable[[str], BucketReader]
    connection: Callable[[Any], socket.socket]
    token: Callable[[Any], bytes]
    more: Mapping[str, str]


def unix_connection(address):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + address.socket)
    return sock


TRANSPORTS = {
    "shared_memory": Transport(SharedMemoryWriter, SharedMemoryReader, unix_connection, lambda address: b"", {}),
    "gloo": Transport(
        lambda sender, bucket_bytes: CollectiveWriter(sender, bucket_bytes, "127.0.0.1", gloo.TRANSPORT),
        lambda who: CollectiveReader(who, gloo.TRANSPORT),
        lambda address: socket.create_connection((address.host, address.port)),
        lambda address: address.token.encode(),
        {"holds": ""},
    ),
}


@pytest.fixture(params=list(TRANSPORTS))
def transport(request):
    return TRANSPORTS[request.param]


@pytest.fixture
def writer(transport):
    writer = transport.writer(0, 100)  # rounded down to 64
    yield writer
    writer.close()


@pytest.fixture
def reader_named(transport):
    """Makes readers, and closes them after the test."""
    made = []

    def make(who):
        made.append(transport.reader(who))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def write(writer, session, readers, stall_s=20.0, keep=False):
    writer.open(session, readers, 20.0, stall_s, keep)
    for filled in pack(TENSORS.items(), writer.buffer):
        writer.publish(filled)
    writer.finish()


def test_every_reader_sees_every_bucket_in_order(writer, reader_named, thread):
    readers = [reader_named(f"r{i}") for i in range(2)]
    with ThreadPoolExecutor(2) as others:
        for session in ("s1", "s2"):
            for reader in readers:
                reader.connect(session, [writer.address], 5)
            done = thread.submit(write, writer, session, ["r0", "r1"])
            read = lambda reader: [(b.session, b.sequence, b.data[0:4].tobytes()) for b in reader.buckets(5)]
            expected = [(session, i, t.numpy().tobytes()[:4]) for i, t in enumerate(TENSORS.values())]
            assert list(others.map(read, readers)) == [expected, expected]
            done.result()
            assert writer.dropped == {}


@pytest.mark.parametrize(
    "view",
    [
        lambda data: data[8:16],
        lambda data: np.frombuffer(data, np.uint8),
        lambda data: np.frombuffer(data[8:16], np.float32)[1:],
    ],
)
def test_a_receiver_that_keeps_a_view_into_a_bucket_is_detected(writer, reader_named, thread, view):
    reader = reader_named("r0")
    reader.connect("s", [writer.address], 5)
    done = thread.submit(write, writer, "s", ["r0"])
    with pytest.raises(SyncError, match="kept a view into a bucket"):
        _ = [view(bucket.data) for bucket in reader.buckets(5)]
    with pytest.raises(NoReaders):
        done.result()
    assert "went away" in writer.dropped["r0"]


def test_a_reader_of_another_session_or_without_an_invitation_is_refused(writer, reader_named, thread):
    late, stranger, expected = (reader_named(who) for who in ("r0", "stranger", "r0"))
    late.connect("older", [writer.address], 5)
    stranger.connect("s", [writer.address], 5)
    expected.connect("s", [writer.address], 5)
    done = thread.submit(write, writer, "s", ["r0"])
    assert len(list(expected.buckets(5))) == len(TENSORS)
    for reader in (late, stranger):
        with pytest.raises(SyncError, match="went away during the session"):
            list(reader.buckets(5))
    done.result()


def test_a_silent_connection_does_not_delay_the_others(transport, writer, reader_named, thread):
    mute = transport.connection(writer.address)
    reader = reader_named("r0")
    reader.connect("s", [writer.address], 5)
    done = thread.submit(write, writer, "s", ["r0"])
    assert len(list(reader.buckets(5))) == len(TENSORS)
    done.result(timeout=5)
    mute.close()


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_an_invalid_hello_closes_only_its_own_connection(transport, writer, reader_named, thread, payload, caplog):
    """Even from a peer with the token or of the same user."""
    reader, recorder = reader_named("r0"), Recorder("trainer/0")
    count_refusals(Recorder("earlier tests"))
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(transport.connection(writer.address)) for _ in range(2)]
        for caller in callers:
            caller.sendall(transport.token(writer.address) + payload)
        reader.connect("s", [writer.address], 5)
        done = thread.submit(write, writer, "s", ["r0"])
        assert len(list(reader.buckets(5))) == len(TENSORS)
        done.result(timeout=5)
        for caller in callers:
            caller.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert caller.recv(1) == b""
    count_refusals(recorder)
    assert recorder.drain().counters == {"param_sync/refused_connections": 2}
    assert [r.levelname for r in caplog.records if "was refused" in r.message] == ["WARNING"]


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_reader_that_sends_garbage_is_dropped_alone(transport, writer, reader_named, thread, payload):
    reader = reader_named("r0")
    with transport.connection(writer.address) as caller:
        caller.sendall(transport.token(writer.address) + framed({"session": "s", "who": "bad"} | transport.more))
        reader.connect("s", [writer.address], 5)
        done = thread.submit(write, writer, "s", ["r0", "bad"], 5.0)
        caller.sendall(payload)
        assert len(list(reader.buckets(20))) == len(TENSORS)
        done.result(timeout=20)
    assert writer.dropped.keys() == {"bad"}


def test_a_connection_without_a_complete_hello_is_closed_at_the_deadline(caplog):
    hellos = []
    sock = socket.create_server(("127.0.0.1", 0))
    listener = Listener(sock, frozenset({"who"}), lambda *hello: hellos.append(hello), hello_s=0.2)
    with contextlib.closing(listener), socket.create_connection(sock.getsockname()) as mute:
        mute.sendall(b"\0")
        mute.settimeout(10)
        assert mute.recv(1) == b""
    assert "127.0.0.1 was refused (no hello within 0.2 s)" in caplog.text
    assert hellos == []


def test_a_handler_that_fails_does_not_end_the_listener(caplog, monkeypatch):
    hellos, sock = [], socket.create_server(("127.0.0.1", 0))
    read = Listener._on_readable

    def fail_once(listener, caller):
        monkeypatch.setattr(Listener, "_on_readable", read)
        raise RuntimeError("unexpected")

    monkeypatch.setattr(Listener, "_on_readable", fail_once)
    with contextlib.closing(Listener(sock, frozenset({"who"}), lambda *hello: hellos.append(hello))):
        with socket.create_connection(sock.getsockname()) as peer:
            peer.sendall(framed({"who": "r0"}))
            peer.settimeout(10)
            with pytest.raises(ConnectionResetError):  # closed with its data unread
                peer.recv(1)
        with socket.create_connection(sock.getsockname()) as peer:
            peer.sendall(framed({"who": "r0"}))
            give_up_s = time.monotonic() + 10
            while not hellos and time.monotonic() < give_up_s:
                time.sleep(0.001)
    assert [hello for _, hello in hellos] == [{"who": "r0"}]
    assert caplog.text.count("a connection failed; the listener continues") == 1
    hellos[0][0].close()


def test_more_silent_connections_than_the_backlog_keep_no_reader_out(transport, writer, reader_named, thread):
    reader = reader_named("r0")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(transport.connection(writer.address))
        reader.connect("s", [writer.address], 5)
        done = thread.submit(write, writer, "s", ["r0"])
        assert len(list(reader.buckets(5))) == len(TENSORS)
        done.result(timeout=5)


def test_a_reader_waits_until_a_full_backlog_has_room(thread):
    name = "asyncrl-test-" + os.urandom(8).hex()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind("\0" + name)
        listener.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect("\0" + name)  # fills the backlog
        address = LocalAddress(0, name, this_machine(), None)
        reader = stack.enter_context(contextlib.closing(SharedMemoryReader("r0")))
        with pytest.raises(SyncError, match="sender 0 does not listen"):
            reader.connect("s", [address], 0.1)
        connecting = thread.submit(reader.connect, "s", [address], 30)
        with pytest.raises(TimeoutError):
            connecting.result(timeout=0.2)
        stack.enter_context(listener.accept()[0])
        connecting.result(timeout=30)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_can_neither_read_a_session_nor_disturb_it(reader_named, thread):
    """Even if it knows the session and the readers' names, and attacks during sessions."""
    with contextlib.closing(SharedMemoryWriter(0, 100)) as writer:
        payloads = [framed({"session": "s", "who": "r0"}), *PAYLOADS.values()]
        with stranger([writer.address.socket], payloads) as attack:
            for session in ("s", "s2", "s3"):
                attack.stdout.readline()  # another attack round is over
                reader = SharedMemoryReader("r0")
                with contextlib.closing(reader):
                    reader.connect(session, [writer.address], 5)
                    done = thread.submit(write, writer, session, ["r0"])
                    buckets = reader.buckets(20)
                    next(buckets)
                    attack.stdout.readline()
                    assert len(list(buckets)) == len(TENSORS) - 1
                    done.result(timeout=5)
                    assert writer.dropped == {}
            assert attack.poll() is None


ATTACKS = {
    "write": lambda file: os.write(file, b"x"),
    "map for writing": lambda file: mmap.mmap(file, 64),
    "shrink": lambda file: os.ftruncate(file, 0),
    "open again and shrink": lambda file: os.truncate(f"/proc/self/fd/{file}", 0),
    "forbid to grow": lambda file: fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_reader_can_neither_write_to_the_memory_nor_shrink_it(thread, attack):
    """A writer would die of mapped memory whose file has shrunk."""
    received = []

    def opened(message, files):
        received.extend(os.dup(file) for file in files)
        return MappedFile(message, files)

    writer, reader = SharedMemoryWriter(0, 100), LocalReader("r0", None, opened)
    for session in ("s1", "s2"):
        reader.connect(session, [writer.address], 20)
        writing = thread.submit(write, writer, session, ["r0"], keep=session == "s2")  # then the file grows
        assert [bytes(bucket.data) for bucket in reader.buckets(20)] == [t.numpy().tobytes() for t in TENSORS.values()]
        writing.result()
        with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument|not permitted|denied"):
            attack(received[0])
    reader.close()
    writer.close()
    os.close(received[0])


def test_a_silent_reader_is_dropped_after_the_stall_time(writer, reader_named, thread):
    reader = reader_named("r0")
    reader.connect("s", [writer.address], 5)
    with pytest.raises(NoReaders):
        write(writer, "s", ["r0", "absent"], stall_s=1.0)
    assert "was silent for 1.0 s; buckets it had read: 0" in writer.dropped["r0"]
    assert "did not join within 1 s" in writer.dropped["absent"]


def test_abort_ends_a_wait_at_either_end(writer, reader_named, thread):
    reader = reader_named("r0")
    reader.connect("s", [writer.address], 5)
    done = thread.submit(write, writer, "s", ["r0"])
    buckets = reader.buckets(5)
    next(buckets)
    writer.abort("another")
    assert not done.done()
    writer.abort("s")
    with pytest.raises(NoReaders):
        done.result(timeout=5)
    assert "the session was aborted" in writer.dropped["r0"]

    reader.connect("s2", [writer.address], 5)
    reading = thread.submit(lambda: list(reader.buckets(20)))
    reader.abort()
    with pytest.raises(SyncError, match="went away"):
        reading.result(timeout=5)


def test_a_sender_on_another_machine_is_refused():
    with contextlib.closing(SharedMemoryWriter(0, 64)) as writer, pytest.raises(SyncError, match="on another machine"):
        SharedMemoryReader("r0").connect("s", [writer.address._replace(machine="other")], 5)


def test_a_sender_whose_buckets_are_on_another_device_is_refused():
    class Elsewhere(MemoryFile):
        device = "GPU 1"

    with contextlib.closing(LocalWriter(3, Elsewhere(64))) as writer:
        for reader, ours in (
            (SharedMemoryReader("r0"), "host memory"),
            (LocalReader("r0", "GPU 2", MappedFile), "GPU 2"),
        ):
            message = f"sender 3 has its buckets in GPU 1, but this replica reads from {ours}"
            with pytest.raises(SyncError, match=message):
                reader.connect("s", [writer.address], 5)


@pytest.mark.parametrize("buffers", [1, 2, 5])
def test_memory_that_keeps_nothing_reuses_its_buffers_in_every_session(thread, buffers):
    class OfAGpu(MemoryFile):
        device = "GPU 1"
        keeps = False

    opened = []

    def open_memory(*welcome):
        opened.append(MappedFile(*welcome))
        return opened[-1]

    memory = OfAGpu(64, buffers)
    with (
        contextlib.closing(LocalWriter(0, memory, buffers)) as writer,
        contextlib.closing(LocalReader("r0", "GPU 1", open_memory)) as reader,
    ):
        for session in ("s1", "s2"):
            reader.connect(session, [writer.address], 5)

            def send(session=session):
                writer.open(session, ["r0"], 20.0, 20.0, keep=True)
                for filled in pack(TENSORS.items(), writer.buffer):
                    writer.publish(filled)
                writer.finish()

            done = thread.submit(send)
            got = [(bucket.kept, bucket.data[0:4].tobytes()) for bucket in reader.buckets(5)]
            assert got == [(False, tensor.numpy().tobytes()[:4]) for tensor in TENSORS.values()]
            done.result()
        assert len(opened) == 1
        assert memory.buffer(buffers - 1) is not None
        assert len(memory._buffers) == buffers


def test_an_export_is_sent_tensor_by_tensor(writer, reader_named, thread):
    """So the experts of a large model can be gathered one by one, each after the previous one is freed."""
    count, nbytes = 12, 1000
    arrays: list[weakref.ref[np.ndarray]] = []
    alive = lambda: sum(array() is not None for array in arrays)
    most = 0

    def make(i):
        nonlocal most
        array = np.full(nbytes, i, np.uint8)
        arrays.append(weakref.ref(array))
        most = max(most, alive())
        return torch.from_numpy(array)

    names = [f"experts.{i}.weight" for i in range(count)]
    manifest = Manifest(tuple(TensorSpec(name, "uint8", (nbytes,)) for name in names))
    plan = SendPlan("s", PolicyVersion(0, 1), manifest, ("r0",), 20.0, 20.0, checksum=True)
    sender, reader = Sender("trainer/0", writer), reader_named("r0")
    reader.connect("s", [writer.address], 5)

    def send():
        sender.open(plan)
        return sender.send((name, make(i)) for i, name in enumerate(names))

    done = thread.submit(send)
    received = sum(part.nbytes for bucket in reader.buckets(20) for part in bucket.parts)
    assert received == done.result().nbytes == count * nbytes
    assert most == 2  # the tensor just made, and the one before it
    assert alive() == 0


def test_a_sender_that_is_gone_is_reported(transport, reader_named):
    gone = transport.writer(3, 64)
    gone.close()
    with pytest.raises(SyncError, match="sender 3 does not listen"):
        reader_named("r0").connect("s", [gone.address], 5)


def test_a_bucket_holds_at_least_one_line(transport):
    with pytest.raises(ValueError, match="at least 64, found 63"):
        transport.writer(0, 63)
