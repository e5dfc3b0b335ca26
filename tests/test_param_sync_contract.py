"""Transport contract: every registered transport that this machine can run and the example, through the interface.

To test your own: ``ASYNCRL_TRANSPORT=my_package.transport:TRANSPORT pytest tests/test_param_sync_contract.py``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.param_sync.buckets import check_checksum, host_bytes, pack
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.manifest import Manifest, TensorSpec
from asyncrl.param_sync.sender import Sender
from asyncrl.param_sync.session_protocol import SendPlan
from asyncrl.param_sync.transports.base import TRANSPORTS, NoReaders
from asyncrl.param_sync.transports.choose import bucket_sizes, choose, make_reader, make_writer, problems
from asyncrl.param_sync.transports.placement import DevicePlacement
from asyncrl.types.versions import PolicyVersion
from tests.support.sync_processes import config, digests, fleet_of, processes, sync, version

TOY = "docs.examples.toy_transport:TRANSPORT"
NAMES = [*TRANSPORTS.names(), TOY, *filter(None, [os.environ.get("ASYNCRL_TRANSPORT")])]
HOST = "127.0.0.1"
TENSORS = {f"t{i}": torch.full((1024,), float(i)) for i in range(10)}  # one per bucket of 4096 bytes
HERE = [DevicePlacement("here")]


def runs_here(name):
    try:
        make_writer(name, 0, 4096, HOST).close()
    except ValueError:  # no such device
        return False
    return True


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    if not runs_here(request.param):
        pytest.skip(f"this machine cannot run {request.param}")
    return request.param


@pytest.fixture
def ends(name):
    """Makes writers and readers, and closes them after the test."""
    with contextlib.ExitStack() as stack:

        class Ends:
            def writer(self, sender=0, bucket_bytes=4096):
                return stack.enter_context(contextlib.closing(make_writer(name, sender, bucket_bytes, HOST)))

            def reader(self, who="r0"):
                return stack.enter_context(contextlib.closing(make_reader(name, who)))

        yield Ends()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def write(writer, session, readers, tensors=TENSORS, stall_s=20.0, keep=False):
    writer.open(session, readers, 20.0, stall_s, keep)
    for filled in pack(tensors.items(), writer.buffer, zero_copy_from=writer.zero_copy_from):
        writer.publish(filled)
    writer.finish()


def read(reader, deadline_s=20.0):
    """(sender, sequence, tensor's name, bytes) of every part, each checked against its checksum."""
    return [part for bucket in reader.buckets(deadline_s) for part in parts_of(bucket)]


def parts_of(bucket):
    check_checksum(bucket)
    data, key = host_bytes(bucket), (bucket.sender, bucket.sequence)
    return [(*key, part.name, bytes(data[part.offset : part.offset + part.nbytes])) for part in bucket.parts]


def sent_by(sender, tensors=TENSORS):
    return [(sender, i, name, t.numpy().tobytes()) for i, (name, t) in enumerate(tensors.items())]


@pytest.mark.parametrize("keep", [False, True])
def test_every_reader_gets_every_bucket_in_order_in_each_session(ends, threads, keep):
    writer, readers = ends.writer(), [ends.reader("r0"), ends.reader("r1")]
    for session in ("s1", "s2"):
        for reader in readers:
            reader.connect(session, [writer.address], 5)
        done = threads.submit(write, writer, session, ["r0", "r1"], keep=keep)
        assert [*threads.map(read, readers)] == [sent_by(0), sent_by(0)]
        done.result()
        assert writer.dropped == {}


def test_a_reader_reads_from_several_senders(ends, threads):
    writers, reader = [ends.writer(0), ends.writer(1)], ends.reader()
    reader.connect("s", [writer.address for writer in writers], 5)
    done = [threads.submit(write, writer, "s", ["r0"]) for writer in writers]
    got = read(reader)
    for writer in done:
        writer.result()
    assert [[part for part in got if part[0] == sender] for sender in (0, 1)] == [sent_by(0), sent_by(1)]


def test_a_tensor_larger_than_a_bucket_arrives_complete(ends, threads):
    tensor = torch.arange(5000, dtype=torch.int32)
    writer, reader = ends.writer(), ends.reader()
    reader.connect("s", [writer.address], 5)
    done = threads.submit(write, writer, "s", ["r0"], {"large": tensor})
    got = read(reader)
    done.result()
    assert b"".join(data for *_, data in got) == tensor.numpy().tobytes()


def test_an_address_crosses_processes(ends):
    address = ends.writer().address
    assert pickle.loads(pickle.dumps(address)) == address


def test_only_readers_of_this_session_are_admitted(ends, threads):
    writer = ends.writer()
    late, uninvited, expected = ends.reader("r0"), ends.reader("uninvited"), ends.reader("r0")
    late.connect("older", [writer.address], 5)
    uninvited.connect("s", [writer.address], 5)
    expected.connect("s", [writer.address], 5)
    done = threads.submit(write, writer, "s", ["r0"])
    assert read(expected) == sent_by(0)
    done.result()
    for reader in (late, uninvited):
        with pytest.raises(SyncError, match=r"^sync phase transfer"):
            read(reader, 5)


def test_a_silent_or_absent_reader_is_dropped_after_the_stall_time_and_the_others_continue(ends, threads):
    writer, silent, reader = ends.writer(), ends.reader("silent"), ends.reader("r0")
    for each in (silent, reader):
        each.connect("s", [writer.address], 5)
    done = threads.submit(write, writer, "s", ["r0", "silent", "absent"], stall_s=2.0)
    assert read(reader) == sent_by(0)
    done.result(timeout=20)
    assert writer.dropped.keys() == {"silent", "absent"}
    assert all(writer.dropped.values())


def test_a_writer_without_readers_raises(ends):
    writer = ends.writer()
    with pytest.raises(NoReaders):
        write(writer, "s", ["absent"], stall_s=0.1)
    assert writer.dropped.keys() == {"absent"}


def test_a_reader_that_gives_up_is_dropped(ends, threads):
    writer, reader = ends.writer(), ends.reader()
    reader.connect("s", [writer.address], 5)
    done = threads.submit(write, writer, "s", ["r0"], stall_s=2.0)
    buckets = reader.buckets(5)
    next(buckets)
    buckets.close()
    with pytest.raises(NoReaders):
        done.result(timeout=20)
    assert writer.dropped.keys() == {"r0"}


def test_abort_ends_a_wait_at_either_end(ends, threads):
    writer, reader = ends.writer(), ends.reader()
    reader.connect("s", [writer.address], 5)
    done = threads.submit(write, writer, "s", ["r0"])
    buckets = reader.buckets(20)
    next(buckets)
    writer.abort("another")
    assert not done.done()
    writer.abort("s")
    with pytest.raises(NoReaders):
        done.result(timeout=10)
    assert "aborted" in writer.dropped["r0"]

    reader.connect("s2", [writer.address], 5)
    reading = threads.submit(read, reader)
    reader.abort()
    with pytest.raises(SyncError):
        reading.result(timeout=10)


def test_a_reader_gives_up_at_the_deadline(ends):
    writer, reader = ends.writer(2), ends.reader()
    reader.connect("s", [writer.address], 5)
    with pytest.raises(SyncError, match=r"^sync phase transfer, r0.*sender 2"):
        read(reader, 0.2)


def test_a_sender_that_is_gone_is_reported(name, ends):
    gone = make_writer(name, 3, 4096, HOST)
    gone.close()
    with pytest.raises(SyncError, match=r"^sync phase plan, r0: sender 3 "):
        ends.reader().connect("s", [gone.address], 5)


def test_a_bucket_that_is_too_small_is_refused(ends):
    with pytest.raises(ValueError, match=r"^bucket_bytes: expected at least 64, found 63$"):
        ends.writer(0, 63)


def test_a_sender_reports_what_it_sent(ends, threads):
    manifest = Manifest(tuple(TensorSpec(name, "float32", tuple(t.shape)) for name, t in TENSORS.items()))
    plan = SendPlan("s", PolicyVersion(0, 1), manifest, ("r0",), 20.0, 20.0, checksum=True)
    writer, reader = ends.writer(), ends.reader()
    sender = Sender("trainer/0", writer)
    reader.connect("s", [writer.address], 5)

    def send():
        sender.open(plan)
        return sender.send(iter(TENSORS.items()))

    report = threads.submit(send)
    assert read(reader) == sent_by(0)
    assert report.result().nbytes == manifest.nbytes
    assert report.result().ceiling is None or np.isfinite(report.result().ceiling)


# -- the specification -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", NAMES)
def test_a_transport_declares_where_it_fits(named):
    """Including transports that this machine cannot run."""
    transport = TRANSPORTS.find(named)
    assert transport.bucket_bytes >= 4096
    for senders, replicas in ((HERE, HERE), (HERE, [DevicePlacement("there")]), ([DevicePlacement("a", "a/0")],) * 2):
        unfit = transport.unfit(senders, replicas)
        assert unfit is None or unfit.startswith("needs ")
        assert unfit is not None or transport.route(senders, replicas)
    reaches = transport.unfit([DevicePlacement("a", "a/0")], [DevicePlacement("b", "b/0")]) is None
    assert reaches == transport.across_machines


@pytest.mark.parametrize("named", NAMES)
def test_problems_begin_with_the_option(named):
    config = Config()
    config.param_sync.transport = named
    config.trainer.device = config.rollout.engine.device = "cpu"
    assert bucket_sizes(config) == [TRANSPORTS.find(named).bucket_bytes]
    assert all(problem.startswith("param_sync.transport: ") for problem in problems(config))


def test_the_example_is_selected_by_its_import_path_and_never_by_auto():
    assert choose(TOY, HERE, HERE) == (TOY, "as configured")
    assert choose("auto", HERE, HERE).transport != TOY


@pytest.mark.parametrize("staging", ["bucket", "full"])
async def test_a_whole_session_between_processes(name, staging):
    async with processes(2, transport=name) as (ranks, replicas):
        fleet, settings = fleet_of(replicas), replace(config(), staging=staging)
        for number in (1, 2):
            report = await sync(ranks, fleet, number, settings)
            assert report.evicted == {}
            assert fleet.routable == dict.fromkeys(replicas, version(number))
            for replica in replicas.values():
                assert (await replica.look())["digests"] == digests(number)
