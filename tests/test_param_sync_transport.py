"""Each transport by itself: a writer in a thread, readers beside it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from asyncrl.param_sync.buckets import pack
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.transports.base import BucketReader, BucketWriter, NoReaders
from asyncrl.param_sync.transports.collective import CollectiveWriter
from asyncrl.param_sync.transports.collective_reader import CollectiveReader
from asyncrl.param_sync.transports.local import SharedMemoryReader, SharedMemoryWriter

TENSORS = {f"t{i}": torch.full((16,), float(i)) for i in range(10)}  # one to a bucket of 64 bytes


class Transport(NamedTuple):
    """``connection``: one to a writer that says nothing."""

    writer: Callable[[int, int], BucketWriter]
    reader: Callable[[str], BucketReader]
    connection: Callable[[Any], socket.socket]


def unix_connection(address):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + address.socket)
    return sock


TRANSPORTS = {
    "shared_memory": Transport(SharedMemoryWriter, SharedMemoryReader, unix_connection),
    "gloo": Transport(
        lambda sender, bucket_bytes: CollectiveWriter(sender, bucket_bytes, "127.0.0.1"),
        CollectiveReader,
        lambda address: socket.create_connection((address.host, address.port)),
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
    """Makes readers, and closes them."""
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


def write(writer, session, readers, stall_s=20.0):
    writer.open(session, readers, 20.0, stall_s)
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
def test_a_receiver_that_keeps_a_view_into_a_bucket_is_found_out(writer, reader_named, thread, view):
    reader = reader_named("r0")
    reader.connect("s", [writer.address], 5)
    done = thread.submit(write, writer, "s", ["r0"])
    with pytest.raises(SyncError, match="kept a view into a bucket"):
        _ = [view(bucket.data) for bucket in reader.buckets(5)]
    with pytest.raises(NoReaders):
        done.result()
    assert "went away" in writer.dropped["r0"]


def test_a_reader_of_another_session_or_without_an_invitation_is_turned_away(writer, reader_named, thread):
    late, stranger, expected = (reader_named(who) for who in ("r0", "stranger", "r0"))
    late.connect("older", [writer.address], 5)
    stranger.connect("s", [writer.address], 5)
    expected.connect("s", [writer.address], 5)
    done = thread.submit(write, writer, "s", ["r0"])
    assert len(list(expected.buckets(5))) == len(TENSORS)
    for reader in (late, stranger):
        with pytest.raises(SyncError, match="went away amid the session"):
            list(reader.buckets(5))
    done.result()


def test_who_connects_and_says_nothing_does_not_hold_the_others_up(transport, writer, reader_named, thread):
    mute = transport.connection(writer.address)
    reader = reader_named("r0")
    reader.connect("s", [writer.address], 5)
    done = thread.submit(write, writer, "s", ["r0"])
    assert len(list(reader.buckets(5))) == len(TENSORS)
    done.result(timeout=5)
    mute.close()


def test_a_silent_reader_is_dropped_after_the_stall_time(writer, reader_named, thread):
    reader = reader_named("r0")
    reader.connect("s", [writer.address], 5)
    with pytest.raises(NoReaders):
        write(writer, "s", ["r0", "absent"], stall_s=0.2)
    assert "was silent for 0.2 s; bucket 0 was its next" in writer.dropped["r0"]
    assert "did not join within 0.2 s" in writer.dropped["absent"]


def test_abort_ends_a_wait_of_either_side(writer, reader_named, thread):
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


def test_a_sender_on_another_machine_is_named():
    with contextlib.closing(SharedMemoryWriter(0, 64)) as writer, pytest.raises(SyncError, match="on another machine"):
        SharedMemoryReader("r0").connect("s", [writer.address._replace(machine="other")], 5)


def test_a_sender_that_is_gone_is_named(transport, reader_named):
    gone = transport.writer(3, 64)
    gone.close()
    with pytest.raises(SyncError, match="sender 3 does not listen"):
        reader_named("r0").connect("s", [gone.address], 5)


def test_a_bucket_holds_at_least_one_line(transport):
    with pytest.raises(ValueError, match="at least 64"):
        transport.writer(0, 63)
