"""Queue core: results and waiting of each call; no crash, restart or race loses or duplicates a group."""

import asyncio
import dataclasses
import itertools
from fractions import Fraction
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.sample_queue.group_state import QueueError
from asyncrl.sample_queue.journal import Journal
from asyncrl.sample_queue.ledger import FILE, reading
from asyncrl.sample_queue.messages import (
    ONLY,
    Admitted,
    Drop,
    Holder,
    InFlight,
    Issued,
    Recovery,
    Refusal,
    Snapshot,
    Ticket,
)
from asyncrl.sample_queue.records import JournalError
from asyncrl.simulation.records import InMemoryRecords
from asyncrl.types.groups import Group
from asyncrl.types.versions import PolicyVersion
from tests.support.in_memory import payload, put
from tests.support.scripted import settle
from tests.test_spool import FaultyDisk


def queue(per_version=2, threshold="0", total=100, records=None, order="fifo", overdue="wait", **more) -> SampleQueue:
    admission = Admission(per_version, Fraction(threshold), total)
    return SampleQueue(admission, records or InMemoryRecords(), order, overdue, **more)


async def started(q: SampleQueue, uids: str) -> None:
    assert await begin(q, uids) == len(uids)


async def trained(q: SampleQueue, step: int, count: int) -> str:
    """Train a step; returns the uids of its groups."""
    lease, _ = await q.lease(step, count)
    await q.trained(step)
    return "".join(g.uid for g in lease.groups)


def tickets(uids, first: int = 0) -> list[Ticket]:
    """``first``: place of the first one."""
    return [Ticket(uid, uid, 0, place) for place, uid in enumerate(uids, start=first)]


_places: WeakKeyDictionary[SampleQueue, dict[str, int]] = WeakKeyDictionary()  # of the groups that `begin` has started


async def begin(q: SampleQueue, uids, holder: Holder = ONLY) -> int:
    """Issue groups: those that were started before, and new ones, which come next in the run. How many have started."""
    known, next_place = _places.setdefault(q, {}), itertools.count(q.balance()["issued"])
    asked = [Ticket(uid, uid, 0, known[uid] if uid in known else next(next_place)) for uid in uids]
    admitted = await q.issue(asked, len(asked), holder)
    known |= {ticket.uid: ticket.place for ticket in asked if ticket.uid in admitted.started}
    return len(admitted.started)


async def waits(coroutine) -> asyncio.Task:
    """Start a call and check that it waits."""
    task = asyncio.create_task(coroutine)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_nothing_starts_before_the_first_version():
    q = queue()
    task = await waits(begin(q, ["a"]))
    await q.publish(PolicyVersion(0, 0))
    assert await task == 1


async def test_threshold_zero_admits_one_version_of_groups():
    q = queue(per_version=2)
    await q.publish(PolicyVersion(0, 0))
    assert await begin(q, ["a", "b", "c"]) == 2
    more = await waits(begin(q, ["c"]))
    await put(q, [payload("b", 0), payload("a", 0)])
    leased, buffers = await q.lease(1, 2)
    assert [g.uid for g in leased.groups] == ["a", "b"]  # the order of issue, not of arrival
    assert [Group.from_buffer(b).uid for b in buffers] == ["a", "b"]
    await q.trained(1)
    assert not more.done()  # trained is not enough: the groups must start under the new version
    await q.publish(PolicyVersion(0, 1))
    assert await more == 1


async def test_a_dropped_group_frees_its_place_at_once():
    q = queue(per_version=1)
    await q.publish(PolicyVersion(0, 0))
    await begin(q, ["a"])
    refill = await waits(begin(q, ["b"]))
    await q.drop([Drop("a", "zero_variance")])
    assert await refill == 1
    assert (await q.stats())["fully_async/dropped/zero_variance"] == 1


async def test_a_straggler_holds_back_the_groups_behind_it():
    q = queue(per_version=3, threshold="1")
    await q.publish(PolicyVersion(0, 0))
    await begin(q, ["slow", "b", "c"])
    await put(q, [payload("b", 0), payload("c", 0)])
    lease = await waits(q.lease(1, 2))
    await put(q, [payload("slow", 0)])
    assert [g.uid for g in (await lease)[0].groups] == ["slow", "b"]


async def test_a_released_lease_returns_in_order():
    q = queue(per_version=3, threshold="1")
    await q.publish(PolicyVersion(0, 0))
    await begin(q, ["a", "b", "c"])
    await put(q, [payload(u, 0) for u in "abc"])
    await q.lease(1, 2)
    await q.release(1)
    assert [g.uid for g in (await q.lease(1, 3))[0].groups] == ["a", "b", "c"]


async def test_a_batch_is_leased_in_parts_each_once():
    q = queue(per_version=3)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abc")
    await put(q, [payload("a", 0)])
    uids = lambda answer: [group.uid for group in answer[0].groups]
    assert uids(await q.lease(1, 1)) == uids(await q.lease(1, 1)) == ["a"]  # also if the call is repeated
    rest = await waits(q.lease(1, 2, ["a"]))
    await put(q, [payload(uid, 0) for uid in "cb"])
    assert uids(await rest) == uids(await q.lease(1, 2, ["a"])) == ["b", "c"]
    await q.trained(1)
    assert q.balance()["trained"] == 3


async def test_an_abandoned_step_takes_no_group_even_by_a_lease_that_waits():
    """Its caller has gone, but the call itself cannot be taken back."""
    q = queue(per_version=2)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    await put(q, [payload("a", 0)])
    await q.lease(1, 1)
    second = await waits(q.lease(1, 1, ["a"]))
    await q.release(1)
    assert (await second)[0].groups == ()
    assert (q.balance()["leased"], q.balance()["queued"]) == (0, 1)


async def test_untrained_groups_stay_for_a_run_that_resumes():
    q = queue(per_version=3, threshold="1")
    await q.publish(PolicyVersion(0, 0))
    await begin(q, ["a", "b", "c", "d"])
    await put(q, [payload(u, 0) for u in "abc"])
    await q.lease(1, 1)
    await q.trained(1)
    stats = await q.finish()
    assert (stats["fully_async/count/queued"], stats["fully_async/count/trained"]) == (2, 1)
    await put(q, [payload("d", 0)])  # too late, but not an error: it is in flight for the next run
    assert q.balance() == {"issued": 4, "trained": 1, "dropped": 0, "in_flight": 1, "queued": 2, "leased": 0}


async def test_the_run_issues_no_more_than_it_trains():
    q = queue(per_version=4, threshold="9", total=5)
    await q.publish(PolicyVersion(0, 0))
    assert await begin(q, map(str, range(9))) == 5


async def test_closing_wakes_all_waiting_calls():
    q = queue()
    issue = await waits(begin(q, ["a"]))
    lease = await waits(q.lease(1, 1))
    await q.close("the end")
    assert await issue == 0
    assert (await lease)[0].closed == "the end"


async def test_an_illegal_call_is_refused_with_the_group_and_its_state():
    q = queue()
    await q.publish(PolicyVersion(0, 0))
    await begin(q, ["a"])
    with pytest.raises(QueueError, match="group b is unknown, expected in_flight"):
        await put(q, [payload("b", 0)])
    await put(q, [payload("a", 0)])
    with pytest.raises(QueueError, match="group a is queued"):
        await q.drop([Drop("a", "late")])
    with pytest.raises(QueueError, match="group c has place 2, expected 1"):
        await q.issue(tickets("c", 2), 1)
    with pytest.raises(QueueError, match="step 7 has no lease"):
        await q.trained(7)
    await q.publish(PolicyVersion(0, 1))
    with pytest.raises(QueueError, match=r"0\.0 was published after 0\.1"):
        await q.publish(PolicyVersion(0, 0))


async def test_acknowledged_calls_are_in_the_ledger(tmp_path):
    journal = Journal(tmp_path)
    q = queue(per_version=2, records=journal)
    await q.publish(PolicyVersion(0, 0))
    await begin(q, ["a", "b"])
    await put(q, [payload("a", 0)])
    await q.drop([Drop("b", "zero_variance")])
    await begin(q, ["c"])
    found = journal.recover()
    assert [(g.uid, g.state) for g in found.groups] == [("a", "queued"), ("c", "in_flight")]
    assert (found.issued, found.dropped, found.version) == (3, {"zero_variance": 1}, (0, 0))
    await put(q, [payload("c", 0)])
    await q.lease(1, 2)
    await q.trained(1)
    assert [(g.state, g.final) for g in journal.recover().groups] == [("trained", 0)] * 2
    await q.covered(1)
    assert journal.recover().final == 2
    await q.finish()
    await journal.close()
    assert Journal(tmp_path).recover().issued == 3


async def test_a_failed_write_fails_its_callers_and_leaves_the_queue_with_what_is_on_disk(tmp_path):
    disk = FaultyDisk(1_000_000)
    journal = Journal(tmp_path, disk=disk)
    q = queue(per_version=3, records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abc")
    disk.room_bytes = 10
    calls = [put(q, [payload("a", 0)]), put(q, [payload("b", 0)]), q.drop([Drop("c", "zero_variance")])]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, JournalError) for error in errors[:2])
    dropped = int(errors[2] is None)  # it may have come late enough for a separate write
    assert q.balance() == {
        "issued": 3, "trained": 0, "dropped": dropped, "in_flight": 3 - dropped, "queued": 0, "leased": 0
    }  # fmt: skip
    disk.room_bytes = 1_000_000
    await put(q, [payload(u, 0) for u in "ab"])
    assert await trained(q, 1, 2) == "ab"
    assert [g.state for g in journal.recover().groups if g.state == "trained"] == ["trained"] * 2
    await journal.close()


async def test_a_repeated_call_is_answered_once_the_first_one_is_on_disk(tmp_path):
    journal = Journal(tmp_path)
    q = queue(records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    both = [payload(u, 0) for u in "ab"]
    lost = [asyncio.create_task(call) for call in (put(q, both), q.lease(1, 2), q.trained(1))]
    await asyncio.sleep(0)
    assert await put(q, both) == []
    assert journal.recover().groups[0].finished_s is not None
    await q.trained(1)
    assert [g.state for g in journal.recover().groups if g.state == "trained"] == ["trained"] * 2
    await asyncio.gather(*lost)
    await journal.close()


async def test_two_calls_for_the_lease_of_one_step_get_the_same_groups():
    q = queue(per_version=4)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abcd")
    calls = [await waits(q.lease(1, 2)) for _ in range(2)]
    await put(q, [payload(u, 0) for u in "abcd"])
    first, second = await asyncio.gather(*calls)
    assert first == second
    assert [g.uid for g in first[0].groups] == ["a", "b"]


# -- a restarted queue -------------------------------------------------------------------------------------------------


async def test_a_restarted_queue_recovers_its_state_and_every_call_may_be_repeated(tmp_path):
    """After each call the process dies before it answers; the next one, over the same records, gets the call again."""
    journal = Journal(tmp_path)

    async def twice(method: str, *args):
        await getattr(queue(per_version=3, threshold="1", records=journal), method)(*args)
        restarted = queue(per_version=3, threshold="1", records=journal)
        before = restarted.balance()
        answer = await getattr(restarted, method)(*args)
        assert restarted.balance() == before
        return answer

    await twice("publish", PolicyVersion(0, 0))
    assert await twice("issue", tickets("abcdefgh"), 8) == Admitted(list("abcdef"), [], 6, 0)
    await twice("put_and_issue", [payload(u, 0) for u in "bcd"], (), 0)
    await twice("drop", [Drop("a", "zero_variance")])
    lease, payloads = await twice("lease", 1, 3)
    assert [g.uid for g in lease.groups] == ["b", "c", "d"]
    assert payloads == [payload(u, 0) for u in "bcd"]
    await twice("release", 1)
    await queue(records=journal).lease(1, 3)
    await twice("trained", 1)
    await twice("covered", 1)
    await twice("trained", 1)  # final by now
    balance = await twice("publish", PolicyVersion(0, 1))
    assert balance == {"issued": 6, "trained": 3, "dropped": 1, "in_flight": 2, "queued": 0, "leased": 0}
    await journal.close()


async def test_a_restarted_rollouter_gets_the_groups_in_flight_and_the_last_uid():
    q = queue(per_version=4)
    assert await q.recover() == Recovery(0, None, [])
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abcd")
    await q.snapshot([Snapshot("c", 0, 0, b"c0"), Snapshot("b", 0, 0, b"half of b")])
    await q.snapshot([Snapshot("c", 0, 1, b"c1"), Snapshot("a", 1, 0, b"of an attempt that never was")])
    await put(q, [payload("b", 0)])
    await q.drop([Drop("d", "zero_variance")])
    await q.snapshot([Snapshot("b", 0, 0, b"too late")])
    found = await q.recover()
    a, _, c, _ = tickets("abcd")
    assert found == Recovery(4, "d", [InFlight(a, []), InFlight(c, [b"c0", b"c1"])])


async def test_a_restarted_rollouter_may_ask_for_all_groups_that_were_ever_issued(tmp_path):
    journal = Journal(tmp_path)
    q = queue(per_version=2, threshold="1", records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abcd")
    await put(q, [payload("b", 0), payload("a", 0)])
    await trained(q, 1, 2)
    await q.publish(PolicyVersion(0, 1))
    await q.covered(1)
    await q.drop([Drop("c", "zero_variance", 1.0), Drop("d", "too_small")])
    await started(q, "e")
    history = [("a", 0, 0.0), ("b", 0, 0.0), ("c", 0, 1.0), ("d", 0, 0.0), ("e", 1, None)]
    assert (await q.recover(history=True)).history == [Issued(*group) for group in history]
    assert (await q.recover()).history == []
    await journal.close()


async def test_a_group_that_is_chosen_late_asks_for_room_first():
    q = queue(per_version=2)
    asked = await waits(q.room(5))
    await q.publish(PolicyVersion(0, 0))
    assert await asked == (2, 0)
    await started(q, "a")
    assert await q.room(5) == (1, 0)
    assert await q.room(1) == (1, 0)
    await started(q, "b")
    asked = await waits(q.room(5))
    await q.drop([Drop("b", "zero_variance")])
    assert await asked == (1, 0)
    await started(q, "c")
    asked = await waits(q.room(5))
    await q.close("the end")
    assert await asked == (0, 0)


async def test_calls_of_a_rollouter_that_was_replaced_are_refused_even_those_that_wait(tmp_path):
    journal = Journal(tmp_path)
    q = queue(per_version=2, records=journal)
    await q.recover(Holder(0, 1))
    await q.publish(PolicyVersion(0, 0))
    assert await begin(q, "ab", Holder(0, 1)) == 2
    waiting = [asyncio.create_task(begin(q, "c", Holder(0, 1))), asyncio.create_task(q.overdue(Holder(0, 1)))]
    await settle()
    assert [g.uid for g in (await q.recover(Holder(0, 2))).in_flight] == ["a", "b"]
    late = [
        put(q, [payload("a", 0)], Holder(0, 1)),
        q.drop([Drop("b", "failed")], Holder(0, 1)),
        begin(q, "d", Holder(0, 1)),
        q.recover(Holder(0, 1)),
        q.room(1, Holder(0, 1)),
        q.end("the prompts ended", Holder(0, 1)),
    ]
    late.append(q.snapshot([Snapshot("a", 0, 0, b"late")], Holder(0, 1)))
    for call in [*waiting, *late]:
        with pytest.raises(QueueError, match="a call of rollouter 1 came after rollouter 2 had taken over"):
            await asyncio.wait_for(call, 30)
    assert await begin(q, "ab", Holder(0, 2)) == 2
    await journal.close()
    q = queue(per_version=2, records=(journal := Journal(tmp_path)))  # a restarted queue knows its holder
    with pytest.raises(QueueError, match="rollouter 2 had taken over"):
        await put(q, [payload("a", 0)], Holder(0, 1))
    assert await put(q, [payload("a", 0)], Holder(0, 2)) == []
    assert q.balance()["queued"] == 1
    await journal.close()


async def test_shards_take_the_groups_of_one_order_and_each_gets_its_own_back(tmp_path):
    journal = Journal(tmp_path)
    q = queue(per_version=8, records=journal, shards=2)
    one, two = Holder(0, 1), Holder(1, 2)
    for holder in (one, two):
        assert await q.recover(holder) == Recovery(0, None, [])
    await q.publish(PolicyVersion(0, 0))
    assert await q.issue(tickets("abcd"), 2, one) == Admitted(["a", "b"], [], 2, 0)
    # the other one does not know of these yet
    assert await q.issue(tickets("abcd"), 2, two) == Admitted(["c", "d"], ["a", "b"], 4, 0)
    assert await q.issue(tickets("cd", 2), 2, one) == Admitted([], ["c", "d"], 4, 0)
    with pytest.raises(QueueError, match="group f has place 5, expected 4"):
        await q.issue(tickets("f", 5), 1, one)
    assert await q.issue(tickets("efg", 4), 3, one) == Admitted(["e", "f"], [], 6, 0)  # half of all is its share
    assert await q.issue(tickets("cdefgh", 2), 9, two) == Admitted(list("cdgh"), ["e", "f"], 8, 0)  # c and d once more
    await journal.close()

    q = queue(per_version=8, records=(journal := Journal(tmp_path)), shards=2)
    found = await q.recover(Holder(1, 3))
    assert (found.issued, found.last_uid, [g.uid for g in found.in_flight]) == (8, "h", list("cdgh"))
    with pytest.raises(QueueError, match="a call of rollouter 2 came after rollouter 3 had taken over"):
        await put(q, [payload("c", 0)], two)
    assert await put(q, [payload("a", 0)], one) == []  # this one goes on
    waiting = await waits(q.issue(tickets("ij", 8), 2, one))  # the budget is that of all shards
    await q.drop([Drop("c", "zero_variance")], Holder(1, 3))
    assert await waiting == Admitted(["i"], [], 9, 0)
    await journal.close()


async def test_a_shard_gets_what_the_others_leave():
    q = queue(per_version=9, shards=3)
    await q.publish(PolicyVersion(0, 0))
    assert await q.issue(tickets("abcdefghi"), 9, Holder(0)) == Admitted(["a", "b", "c"], [], 3, 0)
    assert await q.issue(tickets("abcdef"), 3, Holder(1)) == Admitted(["d", "e", "f"], ["a", "b", "c"], 6, 0)
    more = await waits(q.issue(tickets("defghi", 3), 6, Holder(0)))
    assert await more == Admitted(["g", "h", "i"], ["d", "e", "f"], 9, 0)  # the third has not asked


async def test_groups_end_and_start_in_one_call_which_waits_for_neither():
    q = queue(per_version=2)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    bad = payload("b", 7)  # of a version that was never announced
    call = [payload("a", 0), bad], tickets("cd", 2), 2
    refusal = Refusal("b", "unknown_version", 1)
    for _ in range(2):  # also if the call is repeated
        assert await q.put_and_issue(*call) == ([refusal], Admitted([], [], 2, 0))  # a and b use up the budget
    assert (q.balance()["queued"], q.balance()["in_flight"]) == (1, 1)
    await q.skip(["a"])
    await q.publish(PolicyVersion(0, 0), starved_s=2.5)
    for _ in range(2):
        assert await q.put_and_issue([], tickets("cd", 2), 1) == ([], Admitted(["c"], [], 3, 0, 2.5))
    assert await q.put_and_issue([], tickets("abc"), 3) == ([], Admitted(["b", "c"], ["a"], 3, 0, 2.5))
    await q.finish()
    assert await q.put_and_issue([payload("c", 0)], tickets("d", 3), 1) == ([], Admitted([], [], 3, 0, 2.5))
    assert q.balance()["in_flight"] == 2  # for a run that resumes this one


async def test_a_call_that_fails_when_it_could_go_on_fails_alone():
    q = queue(per_version=2)
    gap = await waits(q.issue(tickets("b", 1), 1))  # a comes first, and was never issued
    await q.publish(PolicyVersion(0, 0))
    with pytest.raises(QueueError, match="group b has place 1, expected 0"):
        await gap


async def test_a_cancelled_call_no_longer_waits_and_of_two_that_could_go_on_one_does():
    q = queue(per_version=1)
    cancelled, first, second = [await waits(q.lease(step, 1)) for step in (1, 2, 3)]
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await q.publish(PolicyVersion(0, 0))
    await started(q, "a")
    await put(q, [payload("a", 0)])
    assert [group.uid for group in (await first)[0].groups] == ["a"]
    assert not second.done()
    await q.close("the prompts ended")
    assert (await second)[0].closed == "the prompts ended"
    assert not q._waiting


async def test_groups_that_another_rollouter_makes_are_passed_once_that_is_on_disk():
    class Slow(InMemoryRecords):
        on_disk = asyncio.Event()

        async def write(self, changes):
            await super().write(changes)
            await self.on_disk.wait()

    records = Slow()
    records.on_disk.set()
    q = queue(per_version=4, shards=2, records=records)
    await q.publish(PolicyVersion(0, 0))
    records.on_disk.clear()
    started = await waits(q.issue(tickets("ab"), 2, Holder(0)))
    passed = await waits(q.issue(tickets("ab"), 2, Holder(1)))
    records.on_disk.set()
    assert await started == Admitted(["a", "b"], [], 2, 0)
    assert await passed == Admitted([], ["a", "b"], 2, 0)


async def test_a_call_that_is_repeated_while_it_waits_gets_the_same_groups():
    q = queue(per_version=1)
    first, again = [await waits(q.issue(tickets("abc"), 3)) for _ in range(2)]
    await q.publish(PolicyVersion(0, 0))
    assert await first == await again == Admitted(["a"], [], 1, 0)


async def test_a_run_resumed_with_fewer_shards_divides_the_groups_of_the_others(tmp_path):
    records = InMemoryRecords()
    q = queue(per_version=6, records=records, shards=3)
    await q.publish(PolicyVersion(0, 0))
    for shard, uids in enumerate(("ab", "cd", "ef")):
        await q.issue(tickets(uids, 2 * shard), 2, Holder(shard))
    q = queue(per_version=6, records=records, shards=2)
    of = {shard: "".join(g.uid for g in (await q.recover(Holder(shard, 1))).in_flight) for shard in range(2)}
    assert of == {0: "abef", 1: "cd"}
    await q.issue(tickets("ef", 4), 2, Holder(0, 1))
    q = queue(per_version=6, records=records, shards=3)
    assert (await q.recover(Holder(2, 2))).in_flight == []


async def test_each_shard_hears_of_its_own_overdue_groups():
    q = queue(per_version=1, threshold="1", order="ready_first", overdue="drop", shards=2)
    await q.publish(PolicyVersion(0, 0))
    await q.issue(tickets("a"), 1, Holder(0))
    await q.issue(tickets("b", 1), 1, Holder(1))
    heard = [await waits(q.overdue(Holder(shard))) for shard in range(2)]
    for step in (1, 2):
        await put(q, [payload("bc"[step - 1], step - 1)], Holder(1))
        await trained(q, step, 1)
        await q.publish(PolicyVersion(0, step))
        if step == 1:
            await q.issue(tickets("c", 2), 1, Holder(1))
    assert await heard[0] == ["a"]
    assert not heard[1].done()
    await q.close("the end")
    assert await heard[1] == []


async def test_the_prompts_end_when_no_shard_has_a_group_in_flight():
    q = queue(per_version=2, shards=2)
    await q.publish(PolicyVersion(0, 0))
    await q.issue(tickets("a"), 1, Holder(0))
    await q.issue(tickets("b", 1), 1, Holder(1))
    await put(q, [payload("a", 0)], Holder(0))
    ending = await waits(q.end("the prompts ended", Holder(0)))
    await put(q, [payload("b", 0)], Holder(1))
    await ending
    assert [g.uid for g in (await q.lease(1, 2))[0].groups] == ["a", "b"]
    assert (await q.lease(2, 1))[0].closed == "the prompts ended"


async def test_skipped_groups_are_dropped_wherever_they_are(tmp_path):
    journal = Journal(tmp_path)
    q = queue(per_version=3, records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abc")
    await put(q, [payload("b", 0), payload("c", 0)])
    await q.skip(["a", "b", "never issued"])
    await q.skip(["a", "b"])  # repeated
    assert await trained(q, 1, 1) == "c"
    assert (await q.recover()).in_flight == []
    assert (await q.stats())["fully_async/dropped/skipped"] == 2
    await journal.close()


async def test_a_closed_queue_stays_closed_over_a_restart_until_a_rollback():
    records = InMemoryRecords()
    q = queue(records=records)
    await q.publish(PolicyVersion(0, 0))
    await q.close("the prompts ended")
    restarted = queue(records=records)
    assert await begin(restarted, "a") == 0
    await restarted.rollback(0)
    await restarted.publish(PolicyVersion(1, 0))
    assert await begin(restarted, "a") == 1


async def test_the_first_reason_to_close_stays():
    q = queue()
    await q.close("the prompts ended")
    await q.close("the run was stopped")
    assert (await q.lease(1, 1))[0].closed == "the prompts ended"


# -- rollback to a checkpoint ------------------------------------------------------------------------------------------


async def test_a_rollback_returns_groups_in_order_and_nothing_starts_before_the_next_version():
    q = queue(per_version=2, threshold="2")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abcdef")
    await put(q, [payload(u, 0) for u in "fedcba"])
    assert await trained(q, 1, 2) == "ab"
    await q.publish(PolicyVersion(0, 1))
    assert await trained(q, 2, 2) == "cd"
    await q.lease(3, 1)
    assert await q.rollback(1) == PolicyVersion(0, 1)
    assert q.balance() == {"issued": 6, "trained": 2, "dropped": 0, "in_flight": 0, "queued": 4, "leased": 0}
    issue = await waits(begin(q, "ghi"))
    await q.publish(PolicyVersion(1, 0), 0)
    assert not issue.done()  # groups that started under 0.1 use up 1.0's budget
    assert await trained(q, 2, 4) == "cdef"
    await q.publish(PolicyVersion(1, 1))
    assert await issue == 3


async def test_a_rollback_to_steps_of_another_size_admits_the_groups_that_the_steps_left_need(tmp_path):
    journal = Journal(tmp_path)
    q = queue(per_version=4, threshold="1", total=2, records=journal)
    await q.publish(PolicyVersion(0, 0))
    assert await begin(q, "abc") == 2
    await q.rollback(0, 3)
    again = queue(per_version=4, threshold="1", total=2, records=journal)  # the queue's process died
    await again.publish(PolicyVersion(1, 0), 0)
    assert (await again.issue(tickets("abcd"), 4)).started == ["a", "b", "c"]
    await journal.close()


async def test_a_new_rollouter_learns_of_no_group_that_may_not_be_on_disk(tmp_path):
    """Else its next call would leave a gap if the queue died now."""
    journal = Journal(tmp_path)
    q = queue(per_version=8, records=journal, shards=2)
    await q.publish(PolicyVersion(0, 0))
    first, second = Holder(0, 1), Holder(1, 1)
    recovery = asyncio.create_task(q.recover(second))
    await asyncio.sleep(0)
    issued = asyncio.create_task(q.issue(tickets("ab"), 2, first))
    assert (await recovery).issued == 0
    assert (await issued).issued == 2
    await journal.close()


async def test_after_a_rollback_a_group_in_flight_waits_for_its_place():
    q = queue(per_version=2, threshold="0")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    await put(q, [payload(u, 0) for u in "ab"])
    await trained(q, 1, 2)
    await q.publish(PolicyVersion(0, 1))
    await started(q, "cd")
    await q.rollback(0)
    await q.publish(PolicyVersion(1, 0), 0)
    again = await waits(begin(q, "cd"))
    assert await trained(q, 1, 2) == "ab"
    assert not again.done()  # under 1.0 it would be one version too old
    await q.publish(PolicyVersion(1, 1))
    assert await again == 2


async def test_versions_only_increase():
    q = queue()
    await q.publish(PolicyVersion(0, 3))
    await q.rollback(0)
    with pytest.raises(QueueError, match=r"0\.3 was published after 0\.3"):
        await q.publish(PolicyVersion(0, 3))
    await q.publish(PolicyVersion(1, 1))


async def test_a_group_issued_while_a_rollback_is_written_waits_for_the_next_version(tmp_path):
    journal = Journal(tmp_path)
    q = queue(per_version=4, records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    back = asyncio.create_task(q.rollback(0))
    await asyncio.sleep(0)
    issue = asyncio.create_task(begin(q, "c"))
    await back
    await q.publish(PolicyVersion(1, 0))
    assert await issue == 1
    assert q.balance()["issued"] == journal.recover().issued == 3
    assert journal.recover().groups[-1].version == PolicyVersion(1, 0)
    await journal.close()


async def test_a_drop_written_together_with_a_rollback_counts_once(tmp_path):
    journal = Journal(tmp_path)
    q = queue(per_version=4, records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    await asyncio.gather(q.rollback(0), q.drop([Drop("a", "zero_variance")]))
    assert (q.balance()["dropped"], journal.recover().dropped) == (1, {"zero_variance": 1})
    await journal.close()


async def test_groups_that_a_smaller_batch_makes_too_late_are_dropped_on_resume():
    records = InMemoryRecords()
    q = queue(per_version=4, records=records)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abcd")
    await put(q, [payload(u, 0) for u in "abd"])
    q = queue(per_version=2, records=records)
    await q.rollback(0)
    await q.publish(PolicyVersion(1, 0))
    assert await q.overdue() == ["c"]
    assert (await q.stats())["fully_async/dropped/overdue"] == 2
    assert await trained(q, 1, 2) == "ab"


# -- finished groups first ---------------------------------------------------------------------------------------------


async def test_ready_first_takes_finished_groups_the_earliest_deadline_first():
    q = queue(per_version=2, threshold="2", order="ready_first")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abcde")
    await put(q, [payload(u, 0) for u in "ec"])
    assert await trained(q, 1, 2) == "ce"
    await q.publish(PolicyVersion(0, 1))
    await started(q, "fg")
    await put(q, [payload("f", 1), payload("d", 0)])
    assert await trained(q, 2, 2) == "df"  # d is of version 0


async def test_wait_holds_the_batch_back_for_a_group_that_would_miss_its_deadline():
    q = queue(per_version=2, threshold="1", order="ready_first", overdue="wait")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abcd")
    await put(q, [payload(u, 0) for u in "cd"])
    assert await trained(q, 1, 2) == "cd"
    await q.publish(PolicyVersion(0, 1))
    await started(q, "ef")
    await put(q, [payload(u, 1) for u in "ef"])
    lease = await waits(q.lease(2, 2))  # version 1 is the deadline of a and b
    await put(q, [payload("b", 0), payload("a", 0)])
    assert [g.uid for g in (await lease)[0].groups] == ["a", "b"]


async def test_a_group_that_is_issued_again_keeps_its_deadline():
    """It may continue from its earlier tokens."""
    q = queue(per_version=1, threshold="1", order="ready_first")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    await put(q, [payload("b", 0)])
    assert await trained(q, 1, 1) == "b"
    await q.publish(PolicyVersion(0, 1))
    await started(q, "ac")
    await put(q, [payload("c", 1)])
    lease = await waits(q.lease(2, 1))
    await put(q, [payload("a", 0, 1)])
    assert [g.uid for g in (await lease)[0].groups] == ["a"]


async def test_a_group_that_must_come_first_may_start_again():
    """Even if groups with later deadlines fill the budget of a smaller G: the batch waits for it."""
    records = InMemoryRecords()
    q = queue(per_version=4, threshold="1", order="ready_first", records=records)
    await q.publish(PolicyVersion(0, 2))
    await started(q, "abcd")
    await put(q, [payload(u, 2) for u in "abc"])
    await q.rollback(0)
    await q.publish(PolicyVersion(1, 0))
    await started(q, "d")
    q = queue(per_version=1, threshold="1", order="ready_first", records=records)
    await q.rollback(0)
    await q.publish(PolicyVersion(2, 0))
    assert await trained(q, 1, 1) == "a"
    await q.publish(PolicyVersion(2, 1))
    lease = await waits(q.lease(2, 1))
    await started(q, "d")
    await put(q, [payload("d", 2)])
    assert [g.uid for g in (await lease)[0].groups] == ["d"]


async def test_mask_returns_the_first_version_fresh_enough_to_train():
    q = queue(per_version=1, threshold="1", order="ready_first", overdue="mask")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    for step, uid in enumerate("bcd", start=1):
        await put(q, [payload(uid, step - 1)])
        assert await trained(q, step, 1) == uid
        await q.publish(PolicyVersion(0, step))
        await begin(q, "cde"[step - 1 :])
    await put(q, [payload("a", 0, 1, 2)])
    lease, _ = await q.lease(4, 1)
    assert ([g.uid for g in lease.groups], lease.mask_before) == (["a"], 2)


@pytest.mark.parametrize("finished_in_time", [True, False])
async def test_mask_drops_a_group_without_a_token_that_is_fresh_enough(finished_in_time):
    q = queue(per_version=1, threshold="0", order="ready_first", overdue="mask")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "a")
    if finished_in_time:
        await put(q, [payload("a", 0)])
    await q.publish(PolicyVersion(0, 1))
    if not finished_in_time:
        await put(q, [payload("a", 0)])
    assert (await q.stats())["fully_async/dropped/overdue"] == 1
    await started(q, "b")


async def test_drop_drops_groups_past_their_deadline_and_notifies_the_rollouter():
    q = queue(per_version=1, threshold="1", order="ready_first", overdue="drop")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    await put(q, [payload("b", 0)])
    await trained(q, 1, 1)
    overdue = await waits(q.overdue())
    await q.publish(PolicyVersion(0, 1))
    await started(q, "c")
    assert not overdue.done()
    await put(q, [payload("c", 1)])
    await trained(q, 2, 1)
    await q.publish(PolicyVersion(0, 2))
    assert await overdue == ["a"]
    await put(q, [payload("a", 0)])  # to finish or drop it now changes nothing
    await q.drop([Drop("a", "zero_variance")])
    assert (await q.stats())["fully_async/dropped/overdue"] == q.balance()["dropped"] == 1


async def test_a_group_dropped_as_overdue_before_a_crash_is_not_issued_as_a_new_one():
    records = InMemoryRecords()
    q = queue(per_version=1, threshold="1", order="ready_first", overdue="drop", records=records)
    await q.publish(PolicyVersion(0, 0))
    await begin(q, ["a", "b"])
    for step in (1, 2):
        uid = "bc"[step - 1]
        await put(q, [payload(uid, step - 1)])
        await q.lease(step, 1)
        await q.trained(step)
        await q.publish(PolicyVersion(0, step))
        if step == 1:
            await begin(q, ["c"])
    assert q.balance()["dropped"] == 1  # a; the rollouter does not know yet
    again = queue(per_version=1, threshold="1", order="ready_first", overdue="drop", records=records)
    assert await again.issue([*tickets("a"), *tickets("d", 3)], 2) == Admitted(["d"], ["a"], 4, 2)
    assert again.balance() == {"issued": 4, "trained": 2, "dropped": 1, "in_flight": 1, "queued": 0, "leased": 0}


async def test_queue_and_rollouter_may_drop_a_group_at_the_same_time(tmp_path):
    journal = Journal(tmp_path)
    q = queue(per_version=1, threshold="0", order="ready_first", overdue="drop", records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "a")
    await asyncio.gather(q.drop([Drop("a", "zero_variance")]), q.publish(PolicyVersion(0, 1)))
    await started(q, "b")
    await asyncio.gather(q.publish(PolicyVersion(0, 2)), q.drop([Drop("b", "zero_variance")]))
    assert (q.balance()["dropped"], journal.recover().dropped) == (2, {"zero_variance": 1, "overdue": 1})
    await journal.close()


# -- rolling updates ---------------------------------------------------------------------------------------------------


async def test_during_a_rolling_update_a_group_counts_from_the_oldest_version_that_a_replica_serves():
    q = queue(per_version=2, threshold="0")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    await put(q, [payload(u, 0) for u in "ab"])
    await trained(q, 1, 2)
    await q.publish(PolicyVersion(0, 1), rolling=True)
    issue = await waits(begin(q, "c"))  # it may start on a replica that still serves 0.0
    await q.retire_before(PolicyVersion(0, 1))
    assert await issue == 1


async def test_a_queue_restarted_during_a_rolling_update_still_counts_from_the_old_version():
    records = InMemoryRecords()
    q = queue(per_version=1, threshold="0", records=records)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "a")
    await put(q, [payload("a", 0)])
    await trained(q, 1, 1)
    await q.publish(PolicyVersion(0, 1), rolling=True)
    q = queue(per_version=1, threshold="0", records=records)
    issue = await waits(begin(q, "b"))
    await q.retire_before(PolicyVersion(0, 1))
    assert await issue == 1
    assert await begin(queue(per_version=1, threshold="0", records=records), "b") == 1


# -- acceptance --------------------------------------------------------------------------------------------------------


def damaged(uid: str, attempt: int = 0, **columns) -> bytes:
    group = Group.from_buffer(payload(uid, 0))
    return dataclasses.replace(group, attempt=attempt, **columns).to_bytes()


NAN = np.full(1, np.nan, np.float32)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"loss_mask": np.zeros(1, bool)}, "no_trained_token"),
        ({"logprobs": NAN}, "logprob_not_finite"),
        ({"logprobs": -np.inf * np.ones(1, np.float32)}, "logprob_not_finite"),
        ({"tokens": np.array([100], np.int32)}, "token_out_of_vocabulary"),
        ({"tokens": np.array([-1], np.int32)}, "token_out_of_vocabulary"),
        ({"prompt_tokens": np.array([2**30], np.int32)}, "token_out_of_vocabulary"),
        ({"span_number": np.array([1])}, "unknown_version"),
        ({"span_lineage": np.array([1])}, "unknown_version"),
    ],
)
async def test_a_group_with_impossible_tokens_is_refused(columns, reason):
    q = queue(vocab_size=100)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    assert await put(q, [damaged("a", **columns), payload("b", 0)]) == [Refusal("a", reason, 1)]
    assert q.balance() | {"queued": 1, "in_flight": 1} == q.balance()
    assert await put(q, [damaged("a", attempt=1)]) == []
    assert await trained(q, 1, 2) == "ab"  # it kept its place


async def test_logprobs_of_untrained_tokens_may_be_nan():
    q = queue(per_version=1)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "a")
    group = Group.from_buffer(payload("a", 0, 0))
    untrained = {"logprobs": np.array([-1, np.nan], np.float32), "loss_mask": np.array([True, False])}
    spans = {"span_number": np.zeros(2, np.int64)}
    assert await put(q, [dataclasses.replace(group, **untrained, **spans).to_bytes()]) == []
    assert await trained(q, 1, 1) == "a"


async def test_tokens_of_an_announced_version_are_accepted():
    q = queue(threshold="1")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    await q.announce(PolicyVersion(0, 1))
    await q.announce(PolicyVersion(0, 1))  # repeated
    assert await put(q, [payload("a", 1)]) == []
    assert await q.rollback(0) == PolicyVersion(0, 1)  # a version is never reused for other weights
    await q.publish(PolicyVersion(1, 0))


async def test_attempts_survive_a_restart_and_a_repeated_call_counts_once(tmp_path):
    journal = Journal(tmp_path)
    q = queue(records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    await q.snapshot([Snapshot("a", 0, 0, b"of the attempt that is refused")])
    assert await put(q, [damaged("a", logprobs=NAN)]) == [Refusal("a", "logprob_not_finite", 1)]
    await journal.close()
    q = queue(records=(journal := Journal(tmp_path)))  # died before the answer arrived
    assert await put(q, [damaged("a", logprobs=NAN)]) == [Refusal("a", "logprob_not_finite", 1)]
    a, b = tickets("ab")
    assert await q.recover() == Recovery(2, "b", [InFlight(a, [], 1), InFlight(b, [], 0)])
    assert await put(q, [damaged("a", 1, logprobs=NAN)]) == [Refusal("a", "logprob_not_finite", 2)]
    assert await put(q, [damaged("a", 2, logprobs=NAN)]) == [Refusal("a", "logprob_not_finite", None)]
    assert (await q.stats())["fully_async/dropped/poison"] == 1
    assert await put(q, [damaged("a", 2, logprobs=NAN)]) == []
    await put(q, [payload("b", 0)])
    assert await trained(q, 1, 1) == "b"
    await journal.close()
    with reading(tmp_path / FILE) as db:
        row = db.execute("SELECT state, reason, attempt, refusal FROM groups WHERE uid = 'a'").fetchone()
    assert row == ("dropped", "poison", 3, "logprob_not_finite")


async def test_a_refusal_that_is_written_together_with_a_rollback_counts_once(tmp_path):
    journal = Journal(tmp_path)
    q = queue(records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "a")
    refusals, _ = await asyncio.gather(put(q, [damaged("a", logprobs=NAN)]), q.rollback(0))
    assert refusals == [Refusal("a", "logprob_not_finite", 1)]
    assert [group.attempt for group in (await q.recover()).in_flight] == [1]
    await journal.close()


async def test_two_identical_puts_at_the_same_time_refuse_once(tmp_path):
    journal = Journal(tmp_path)
    q = queue(records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "a")
    call = [damaged("a", logprobs=NAN)]
    assert await asyncio.gather(put(q, call), put(q, call)) == [[Refusal("a", "logprob_not_finite", 1)]] * 2
    assert [group.attempt for group in journal.recover().groups] == [1]
    await journal.close()


async def test_a_poison_group_is_dropped_even_if_the_run_ends_at_that_moment(tmp_path):
    journal = Journal(tmp_path)
    q = queue(records=journal, max_attempts=1)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "a")
    refusals, _ = await asyncio.gather(put(q, [damaged("a", logprobs=NAN)]), q.finish())
    assert refusals == [Refusal("a", "logprob_not_finite", None)]
    assert journal.states(["a"]) == {"a": "dropped"}
    await journal.close()


async def test_a_new_rollouter_does_not_get_groups_that_the_previous_one_is_ending(tmp_path):
    journal = Journal(tmp_path)
    q = queue(records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    ending = [q.drop([Drop("a", "zero_variance")]), put(q, [payload("b", 0)])]
    pending = [asyncio.create_task(call) for call in ending]
    await asyncio.sleep(0)
    assert (await q.recover()).in_flight == []
    await asyncio.gather(*pending)
    await journal.close()
