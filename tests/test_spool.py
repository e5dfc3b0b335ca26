"""Spool on real files: records round-trip, a torn tail is cut, damage is refused, a full disk loses nothing."""

import errno
import os
import resource
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.sample_queue.spool import (
    HEADER_BYTES,
    Disk,
    RecordLocation,
    Spool,
    SpoolError,
    record,
)


def in_child(body) -> int:
    """Run ``body`` in a forked process; returns its exit status: its result, 99 if it raises, −signal if killed."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = body()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def filled(folder, payloads, **options) -> list[RecordLocation]:
    spool = Spool(folder, **options)
    locations = [spool.append(payload) for payload in payloads]
    spool.flush()
    spool.close()
    return locations


def flip(path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(st.lists(st.binary(max_size=90), max_size=5), max_size=8),
    segment_bytes=st.integers(60, 400),
)
def test_records_are_read_back_in_order_even_after_reopening(tmp_path_factory, batches, segment_bytes):
    folder = tmp_path_factory.mktemp("spool") / "spool"
    locations = []
    for batch in batches:
        spool = Spool(folder, segment_bytes)
        assert spool.torn is None
        locations += spool.append_all([record(memoryview(payload)) for payload in batch])
        spool.flush()
        spool.close()
    payloads = [payload for batch in batches for payload in batch]
    spool = Spool(folder, segment_bytes)
    assert list(spool.records()) == [(location, p) for location, p in zip(locations, payloads, strict=True)]
    assert [spool.read(location) for location in locations] == payloads
    sizes = [path.stat().st_size for path in folder.glob("*.seg")]
    assert all(size <= max(segment_bytes, HEADER_BYTES + 90) for size in sizes)
    spool.close()


def test_a_batch_larger_than_one_system_call_is_written_whole(tmp_path):
    spool = Spool(tmp_path / "spool")
    payloads = [b"%d" % i for i in range(3000)]
    locations = spool.append_all([record(p) for p in payloads])
    assert [spool.read(location) for location in locations[::500]] == payloads[::500]
    assert [p for _, p in spool.records()] == payloads


@pytest.mark.parametrize("cut_bytes", [1, 10, 30, HEADER_BYTES + 39])
def test_a_torn_tail_is_cut_off_after_the_last_whole_record_and_reported(tmp_path, cut_bytes):
    folder = tmp_path / "spool"
    locations = filled(folder, [b"a" * 40, b"b" * 40])
    path = folder / "000001.seg"
    os.truncate(path, path.stat().st_size - cut_bytes)
    spool = Spool(folder)
    assert spool.torn is not None
    assert (spool.torn.path, spool.torn.offset) == (path, locations[1].offset)
    assert spool.torn.cut_bytes == HEADER_BYTES + 40 - cut_bytes
    assert spool.read(locations[0]) == b"a" * 40
    assert spool.append(b"c") == RecordLocation(1, locations[1].offset, 1)
    assert [p for _, p in spool.records()] == [b"a" * 40, b"c"]


@pytest.mark.parametrize("at", [0, 9, 17, HEADER_BYTES + 3])  # magic, length, checksum, payload
@pytest.mark.parametrize("segment_bytes", [100_000, 100])
def test_damage_in_the_middle_is_refused_and_nothing_is_cut(tmp_path, at, segment_bytes):
    folder = tmp_path / "spool"
    location = filled(folder, [b"a" * 40, b"b" * 40, b"c" * 40], segment_bytes=segment_bytes)[1]
    path = folder / f"{location.segment:06d}.seg"
    flip(path, location.offset + at)
    before = path.read_bytes()
    with pytest.raises(SpoolError, match=rf"{path.name} is damaged at offset {location.offset}.*expected.*found"):
        Spool(folder, segment_bytes)
    assert path.read_bytes() == before


def test_damage_at_the_end_is_a_torn_tail_only_if_it_was_not_acknowledged(tmp_path):
    folder = tmp_path / "spool"
    locations = filled(folder, [b"a" * 40, b"b" * 40])
    path = folder / "000001.seg"
    flip(path, locations[1].offset + HEADER_BYTES)
    with pytest.raises(SpoolError, match="expected 128 whole bytes: expected checksum"):
        Spool(folder, acknowledged=(1, path.stat().st_size))
    assert Spool(folder, acknowledged=(1, locations[1].offset)).torn is not None


def test_a_hole_before_unacknowledged_records_is_a_torn_tail(tmp_path):
    """A power loss may persist the pages of an unflushed write in any order."""
    folder = tmp_path / "spool"
    locations = filled(folder, [b"a" * 40, b"b" * 40, b"c" * 40])
    flip(folder / "000001.seg", locations[1].offset)
    spool = Spool(folder, acknowledged=(1, locations[1].offset))
    assert [p for _, p in spool.records()] == [b"a" * 40]


def test_missing_acknowledged_records_are_refused(tmp_path):
    folder = tmp_path / "spool"
    filled(folder, [b"a" * 40])
    with pytest.raises(SpoolError, match="expected 200 whole bytes: the file ends here"):
        Spool(folder, acknowledged=(1, 200))
    with pytest.raises(SpoolError, match=r"000002\.seg is missing"):
        Spool(folder, acknowledged=(2, 64))


def test_reading_verifies_checksum_and_location(tmp_path):
    folder = tmp_path / "spool"
    spool = Spool(folder)
    location = spool.append(b"a" * 40)
    with pytest.raises(SpoolError, match="expected a record of 39 bytes, found one of 40"):
        spool.read(location._replace(length=39))
    with pytest.raises(SpoolError, match=r"000007\.seg is missing"):
        spool.read(location._replace(segment=7))
    flip(folder / "000001.seg", HEADER_BYTES + 3)
    with pytest.raises(SpoolError, match=r"damaged at offset 0: expected checksum .*, found"):
        spool.read(location)


def test_finished_segments_can_be_deleted_but_not_the_active_one(tmp_path):
    spool = Spool(tmp_path / "spool", segment_bytes=100)
    locations = [spool.append(b"x" * 60) for _ in range(3)]
    assert spool.segments == (1, 2, 3)
    spool.release(1)
    assert spool.segments == (2, 3)
    assert not (tmp_path / "spool" / "000001.seg").exists()
    with pytest.raises(SpoolError, match="cannot be deleted"):
        spool.release(3)
    spool.close()
    again = Spool(tmp_path / "spool", segment_bytes=100)
    assert again.read(locations[1]) == b"x" * 60
    assert again.append(b"x" * 60).segment == 4  # numbers are never reused


class FaultyDisk(Disk):
    """Writes ``room_bytes``, the last of them as a short write, then reports a full disk."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self.sync_fails = False

    def write(self, fd, buffers, offset):
        if self.room_bytes <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = b"".join(buffers)[: self.room_bytes]
        self.room_bytes -= len(data)
        return os.pwrite(fd, data, offset)

    def sync(self, fd):
        if self.sync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)


@pytest.mark.parametrize("room", [1, HEADER_BYTES, 100])
def test_a_full_disk_loses_no_earlier_record_and_appending_continues_later(tmp_path, room):
    disk = FaultyDisk(10_000)
    spool = Spool(tmp_path / "spool", disk=disk)
    first = spool.append(b"a" * 40)
    size = (tmp_path / "spool" / "000001.seg").stat().st_size
    disk.room_bytes = room
    with pytest.raises(OSError, match="No space left"):
        spool.append_all([record(b"b" * 40)] * 3)
    assert (tmp_path / "spool" / "000001.seg").stat().st_size == size
    disk.room_bytes = 10_000
    second = spool.append(b"c")
    assert [spool.read(first), spool.read(second)] == [b"a" * 40, b"c"]
    assert Spool(tmp_path / "spool").torn is None


def test_after_a_failed_flush_the_spool_must_be_reopened(tmp_path):
    disk = FaultyDisk(10_000)
    spool = Spool(tmp_path / "spool", disk=disk)
    spool.append(b"a")
    disk.sync_fails = True
    with pytest.raises(OSError, match="Input/output error"):
        spool.flush()
    disk.sync_fails = False
    with pytest.raises(SpoolError, match="reopen the spool"):
        spool.append(b"b")


def test_a_file_size_limit_during_a_write_leaves_whole_records(tmp_path):
    folder = tmp_path / "spool"

    def body() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        spool = Spool(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        written = 0
        try:
            while True:
                spool.append(b"x" * 3000)
                written += 1
        except OSError as e:
            return written if e.errno == errno.EFBIG else 98

    assert in_child(body) == 3
    spool = Spool(folder)
    assert spool.torn is None
    assert [len(p) for _, p in spool.records()] == [3000] * 3
