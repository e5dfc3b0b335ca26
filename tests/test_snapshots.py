"""Store of snapshots: chains of parts on disk, through restarts, damage and ended groups."""

import asyncio
import os
import signal
import sqlite3

import pytest

from asyncrl.sample_queue.messages import Snapshot
from asyncrl.sample_queue.snapshots import FILE, SnapshotStore
from tests.test_spool import flip, in_child

IN_FLIGHT = {"a": 0, "b": 0}


@pytest.fixture
def opened(tmp_path):
    """Open the store in a folder; closes it at the end."""
    stores = []

    def opened(in_flight=IN_FLIGHT) -> SnapshotStore:
        while stores:
            stores.pop().close()
        stores.append(SnapshotStore(tmp_path, in_flight))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def part(uid: str, number: int, data: bytes, attempt: int = 0) -> Snapshot:
    return Snapshot(uid, attempt, number, data)


def test_parts_are_read_in_order_and_part_0_replaces_the_chain(opened):
    store = opened()
    store.store([part("a", 0, b"a0"), part("b", 0, b"b0")]).result()
    store.store([part("a", 1, b"a1")]).result()
    store.store([part("a", 2, b"a2")]).result()
    assert opened().read(IN_FLIGHT) == {"a": [b"a0", b"a1", b"a2"], "b": [b"b0"]}
    store = opened()
    store.store([part("a", 0, b"whole")]).result()
    assert store.read(IN_FLIGHT) == {"a": [b"whole"], "b": [b"b0"]}


def test_a_repeated_part_replaces_itself(opened):
    store = opened()
    store.store([part("a", 0, b"a0")]).result()
    store.store([part("a", 1, b"a1")]).result()
    store.store([part("a", 1, b"a1 and more")]).result()
    assert store.read(IN_FLIGHT) == {"a": [b"a0", b"a1 and more"]}


def test_parts_of_another_attempt_are_not_read(opened):
    store = opened()
    store.store([part("a", 0, b"a0"), part("a", 1, b"a1")]).result()
    assert store.read({"a": 1}) == {}
    store.store([part("a", 0, b"again", attempt=1)]).result()
    assert store.read({"a": 1}) == {"a": [b"again"]}


def test_groups_that_end_are_forgotten_also_those_that_ended_while_the_store_was_closed(opened):
    store = opened()
    store.store([part("a", 0, b"a0"), part("b", 0, b"b0")]).result()
    store.end(["a", "never stored"])
    store.store([]).result()
    assert store.read(IN_FLIGHT) == {"b": [b"b0"]}
    assert opened({"a": 0}).read(IN_FLIGHT) == {}


def test_a_stored_part_survives_kill_9(tmp_path, opened):
    def body() -> None:
        store = SnapshotStore(tmp_path, IN_FLIGHT)
        store.store([part("a", 0, b"a0")]).result()
        store.store([part("a", 1, b"a1")]).result()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(body) == -signal.SIGKILL
    assert opened().read(IN_FLIGHT) == {"a": [b"a0", b"a1"]}


def test_the_file_stays_within_four_times_of_what_is_alive(tmp_path, opened):
    """Two hundred groups of 100 kB pass through, four at a time, each in four parts; then only one is left."""
    live = {str(i): 0 for i in range(200)}
    store = opened(live)
    largest = 0
    for i in range(200):
        for number in range(4):
            store.store([part(str(i), number, bytes(25_000))])
        store.end([str(i - 4)])
        if i % 20 == 19:
            store.read({})  # waits for all before
            largest = max(largest, (tmp_path / FILE).stat().st_size)
    assert largest <= 4 * 4 * 100_000
    store.end(map(str, range(199)))
    opened({"199": 0})  # moves the write-ahead log into the file
    assert (tmp_path / FILE).stat().st_size <= 4 * 100_000


def test_a_damaged_part_costs_its_group_and_no_other(tmp_path, opened, caplog):
    store = opened()
    store.store([part("a", 0, b"the beginning of a" * 10), part("b", 0, b"b0")]).result()
    opened()  # moves the write-ahead log into the file
    flip(tmp_path / FILE, (tmp_path / FILE).read_bytes().index(b"the beginning of a"))
    store = opened()
    assert store.read(IN_FLIGHT) == {"b": [b"b0"]}
    assert "the snapshot of group a is damaged" in caplog.text
    store.store([part("a", 0, b"again")]).result()
    assert store.read(IN_FLIGHT) == {"a": [b"again"], "b": [b"b0"]}


@pytest.mark.parametrize("content", [b"not a database" * 1000, b"SQLite format 3\0" + bytes(5000)])
def test_a_damaged_file_is_set_aside(tmp_path, opened, caplog, content):
    (tmp_path / FILE).write_bytes(content)
    store = opened()
    assert store.read(IN_FLIGHT) == {}
    assert "groups in flight start again" in caplog.text
    assert (tmp_path / "snapshots.damaged").read_bytes() == content
    store.store([part("a", 0, b"a0")]).result()
    assert opened().read(IN_FLIGHT) == {"a": [b"a0"]}


async def test_a_failed_write_is_reported_and_the_next_one_may_succeed(tmp_path, opened):
    store = opened()
    blocker = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    store._thread.submit(lambda: store._db.execute("PRAGMA busy_timeout = 10")).result()
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        await asyncio.wrap_future(store.store([part("a", 0, b"a0")]))
    blocker.execute("ROLLBACK")
    blocker.close()
    await asyncio.wrap_future(store.store([part("a", 0, b"a0")]))
    assert store.read(IN_FLIGHT) == {"a": [b"a0"]}
