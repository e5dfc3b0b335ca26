"""The queue's core: what each side is given, and when; and that no death, restart or race loses or doubles a group."""

import asyncio
from fractions import Fraction

import numpy as np
import pytest

from asyncrl.sample import FinishReason, Group, PolicyVersion, Sample, VersionSpan
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import QueueError, SampleQueue
from asyncrl.sample_queue.journal import Journal
from asyncrl.sample_queue.messages import InFlight, Recovery, Ticket
from tests.support.in_memory import InMemoryRecords


def payload(uid: str, *versions: int) -> bytes:
    """A group of one sample, with a token of each of these versions."""
    count = len(versions)
    s = Sample(
        0,
        np.ones(count, np.int32),
        np.zeros(count, np.float32),
        np.ones(count, bool),
        [VersionSpan(i, PolicyVersion(0, version)) for i, version in enumerate(versions)],
        FinishReason.STOP,
    )
    return Group.from_samples(uid, uid, 0, np.ones(1, np.int32), [s]).to_bytes()


def queue(per_version=2, threshold="0", total=100, records=None, order="fifo", overdue="wait") -> SampleQueue:
    admission = Admission(per_version, Fraction(threshold), total)
    return SampleQueue(admission, records or InMemoryRecords(), order, overdue)


async def started(q: SampleQueue, uids: str, version=None) -> None:
    assert await q.issue(tickets(uids), version) == len(uids)


async def trained(q: SampleQueue, step: int, count: int) -> str:
    """Train a step; returns the groups in it."""
    lease, _ = await q.lease(step, count, 0.0)
    await q.trained(step)
    return "".join(g.uid for g in lease.groups)


def tickets(uids) -> list[Ticket]:
    return [Ticket(uid, uid, 0) for uid in uids]


async def waits(coroutine) -> asyncio.Task:
    """Run until it waits; it must not be done then."""
    task = asyncio.create_task(coroutine)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_nothing_starts_before_the_first_version():
    q = queue()
    task = await waits(q.issue(tickets(["a"])))
    await q.publish(PolicyVersion(0, 0))
    assert await task == 1


async def test_threshold_zero_admits_one_version_of_groups():
    q = queue(per_version=2)
    await q.publish(PolicyVersion(0, 0))
    assert await q.issue(tickets(["a", "b", "c"])) == 2
    more = await waits(q.issue(tickets(["c"])))
    await q.put([payload("b", 0), payload("a", 0)], 0.0)
    leased, buffers = await q.lease(1, 2, 1.0)
    assert [g.uid for g in leased.groups] == ["a", "b"]  # the order of issue, not of arrival
    assert [Group.from_buffer(b).uid for b in buffers] == ["a", "b"]
    await q.trained(1)
    assert not more.done()  # trained is not enough: the groups must start under the new version
    await q.publish(PolicyVersion(0, 1))
    assert await more == 1


async def test_a_dropped_group_frees_its_place_at_once():
    q = queue(per_version=1)
    await q.publish(PolicyVersion(0, 0))
    await q.issue(tickets(["a"]))
    refill = await waits(q.issue(tickets(["b"])))
    await q.drop([("a", "zero_variance")])
    assert await refill == 1
    assert (await q.stats())["fully_async/dropped/zero_variance"] == 1


async def test_a_straggler_holds_back_those_behind_it():
    q = queue(per_version=3, threshold="1")
    await q.publish(PolicyVersion(0, 0))
    await q.issue(tickets(["slow", "b", "c"]))
    await q.put([payload("b", 0), payload("c", 0)], 0.0)
    lease = await waits(q.lease(1, 2, 0.0))
    await q.put([payload("slow", 0)], 0.0)
    assert [g.uid for g in (await lease)[0].groups] == ["slow", "b"]


async def test_a_released_lease_returns_in_order():
    q = queue(per_version=3, threshold="1")
    await q.publish(PolicyVersion(0, 0))
    await q.issue(tickets(["a", "b", "c"]))
    await q.put([payload(u, 0) for u in "abc"], 0.0)
    await q.lease(1, 2, 0.0)
    await q.release(1)
    assert [g.uid for g in (await q.lease(1, 3, 0.0))[0].groups] == ["a", "b", "c"]


async def test_when_the_run_is_over_what_is_left_stays_for_a_run_that_resumes_it():
    q = queue(per_version=3, threshold="1")
    await q.publish(PolicyVersion(0, 0))
    await q.issue(tickets(["a", "b", "c", "d"]))
    await q.put([payload(u, 0) for u in "abc"], 0.0)
    await q.lease(1, 1, 0.0)
    await q.trained(1)
    stats = await q.finish()
    assert (stats["fully_async/count/queued"], stats["fully_async/count/trained"]) == (2, 1)
    await q.put([payload("d", 0)], 0.0)  # too late, and no error: it is in flight for the next run
    assert q.balance() == {"issued": 4, "trained": 1, "dropped": 0, "in_flight": 1, "queued": 2, "leased": 0}


async def test_the_run_issues_no_more_than_it_trains():
    q = queue(per_version=4, threshold="9", total=5)
    await q.publish(PolicyVersion(0, 0))
    assert await q.issue(tickets(map(str, range(9)))) == 5


async def test_closing_wakes_everyone():
    q = queue()
    issue = await waits(q.issue(tickets(["a"])))
    lease = await waits(q.lease(1, 1, 0.0))
    await q.close("the end")
    assert await issue == 0
    assert (await lease)[0].closed == "the end"
    broken = queue()
    issue = await waits(broken.issue(tickets(["a"])))
    await broken.close("rank 1 died", failed=True)
    with pytest.raises(QueueError, match="rank 1 died"):
        await issue


async def test_breaking_the_life_cycle_is_refused_by_name():
    q = queue()
    await q.publish(PolicyVersion(0, 0))
    await q.issue(tickets(["a"]))
    with pytest.raises(QueueError, match="group b is unknown, expected in_flight"):
        await q.put([payload("b", 0)], 0.0)
    await q.put([payload("a", 0)], 0.0)
    with pytest.raises(QueueError, match="group a is queued"):
        await q.drop([("a", "late")])
    with pytest.raises(QueueError, match="issued before and is queued"):
        await q.issue(tickets(["a"]))
    with pytest.raises(QueueError, match="step 7 has no lease"):
        await q.trained(7)
    await q.publish(PolicyVersion(0, 1))
    with pytest.raises(QueueError, match=r"0\.0 was published after 0\.1"):
        await q.publish(PolicyVersion(0, 0))


async def test_what_a_caller_was_told_is_in_the_ledger(tmp_path):
    journal = Journal(tmp_path)
    q = queue(per_version=2, records=journal)
    await q.publish(PolicyVersion(0, 0))
    await q.issue(tickets(["a", "b"]))
    await q.put([payload("a", 0)], 0.0)
    await q.drop([("b", "zero_variance")])
    await q.issue(tickets(["c"]))
    found = journal.recover()
    assert [(g.uid, g.state) for g in found.groups] == [("a", "queued"), ("c", "in_flight")]
    assert (found.issued, found.dropped, found.version) == (3, {"zero_variance": 1}, (0, 0))
    await q.put([payload("c", 0)], 0.0)
    await q.lease(1, 2, 0.0)
    await q.trained(1)
    assert (journal.recover().trained, journal.recover().final) == (2, 0)
    await q.covered(1)
    assert journal.recover().final == 2
    await q.finish()
    await journal.close()
    assert Journal(tmp_path).recover().issued == 3


# -- a queue that was restarted ----------------------------------------------------------------------------------------


async def test_a_restarted_queue_is_where_it_was_and_every_call_may_be_repeated(tmp_path):
    """After each call the process dies before it answers: the next one, over the same records, is asked again."""
    journal = Journal(tmp_path)

    async def twice(method: str, *args):
        await getattr(queue(per_version=3, threshold="1", records=journal), method)(*args)
        restarted = queue(per_version=3, threshold="1", records=journal)
        before = restarted.balance()
        answer = await getattr(restarted, method)(*args)
        assert restarted.balance() == before
        return answer

    await twice("publish", PolicyVersion(0, 0))
    assert await twice("issue", tickets("abcdefgh")) == 6
    await twice("put", [payload(u, 0) for u in "bcd"], 0.0)
    await twice("drop", [("a", "zero_variance")])
    lease, payloads = await twice("lease", 1, 3, 0.0)
    assert [g.uid for g in lease.groups] == ["b", "c", "d"]
    assert payloads == [payload(u, 0) for u in "bcd"]
    await twice("release", 1)
    await queue(records=journal).lease(1, 3, 0.0)
    await twice("trained", 1)
    await twice("covered", 1)
    await twice("trained", 1)  # for good meanwhile
    balance = await twice("publish", PolicyVersion(0, 1))
    assert balance == {"issued": 6, "trained": 3, "dropped": 1, "in_flight": 2, "queued": 0, "leased": 0}
    await journal.close()


async def test_a_rollouter_that_was_restarted_is_told_what_was_in_flight_and_where_the_prompts_go_on():
    q = queue(per_version=4)
    assert await q.recover() == Recovery(None, [])
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abcd")
    await q.snapshot([("c", b"old"), ("b", b"half of b")])
    await q.snapshot([("c", b"half of c")])
    await q.put([payload("b", 0)], 0.0)
    await q.drop([("d", "zero_variance")])
    await q.snapshot([("b", b"too late")])
    found = await q.recover()
    assert found == Recovery("d", [InFlight("a", "a", 0, None), InFlight("c", "c", 0, b"half of c")])


async def test_closing_lasts_over_a_restart_until_a_rollback():
    records = InMemoryRecords()
    q = queue(records=records)
    await q.publish(PolicyVersion(0, 0))
    await q.close("the prompts ended")
    restarted = queue(records=records)
    assert await restarted.issue(tickets("a")) == 0
    await restarted.rollback(0)
    await restarted.publish(PolicyVersion(1, 0))
    assert await restarted.issue(tickets("a")) == 1


async def test_the_first_reason_to_close_stays_and_a_failure_is_never_taken_back():
    q = queue()
    await q.close("the prompts ended")
    await q.close("the run was stopped")
    assert (await q.lease(1, 1, 0.0))[0].closed == "the prompts ended"
    await q.close("rank 1 died", failed=True)
    await q.close("the prompts ended")
    with pytest.raises(QueueError, match="rank 1 died"):
        await q.lease(1, 1, 0.0)


# -- back to a checkpoint ----------------------------------------------------------------------------------------------


async def test_a_rollback_returns_groups_in_order_and_nothing_starts_before_the_next_version():
    q = queue(per_version=2, threshold="2")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abcdef")
    await q.put([payload(u, 0) for u in "fedcba"], 0.0)
    assert await trained(q, 1, 2) == "ab"
    await q.publish(PolicyVersion(0, 1))
    assert await trained(q, 2, 2) == "cd"
    await q.lease(3, 1, 0.0)
    assert await q.rollback(1) == PolicyVersion(0, 1)
    assert q.balance() == {"issued": 6, "trained": 2, "dropped": 0, "in_flight": 0, "queued": 4, "leased": 0}
    issue = await waits(q.issue(tickets("ghi")))
    await q.publish(PolicyVersion(1, 0), 0)
    assert not issue.done()  # what started under 0.1 has taken the places that 1.0 has
    assert await trained(q, 2, 4) == "cdef"
    await q.publish(PolicyVersion(1, 1))
    assert await issue == 3


async def test_a_group_in_flight_waits_for_the_place_it_has_after_a_rollback():
    q = queue(per_version=2, threshold="0")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    await q.put([payload(u, 0) for u in "ab"], 0.0)
    await trained(q, 1, 2)
    await q.publish(PolicyVersion(0, 1))
    await started(q, "cd")
    await q.rollback(0)
    await q.publish(PolicyVersion(1, 0), 0)
    again = await waits(q.issue(tickets("cd")))
    assert await trained(q, 1, 2) == "ab"
    assert not again.done()  # under 1.0 it would be one version too old
    await q.publish(PolicyVersion(1, 1))
    assert await again == 2


async def test_versions_never_go_back():
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
    issue = asyncio.create_task(q.issue(tickets("c")))
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
    await asyncio.gather(q.rollback(0), q.drop([("a", "zero_variance")]))
    assert (q.balance()["dropped"], journal.recover().dropped) == (1, {"zero_variance": 1})
    await journal.close()


async def test_groups_that_a_smaller_batch_makes_too_late_are_dropped_on_resume():
    records = InMemoryRecords()
    q = queue(per_version=4, records=records)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abcd")
    await q.put([payload(u, 0) for u in "abd"], 0.0)
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
    await q.put([payload(u, 0) for u in "ec"], 0.0)
    assert await trained(q, 1, 2) == "ce"
    await q.publish(PolicyVersion(0, 1))
    await started(q, "fg")
    await q.put([payload("f", 1), payload("d", 0)], 0.0)
    assert await trained(q, 2, 2) == "df"  # d is of version 0


async def test_wait_holds_the_batch_back_for_a_group_that_could_not_be_trained_in_time_later():
    q = queue(per_version=2, threshold="1", order="ready_first", overdue="wait")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "abcd")
    await q.put([payload(u, 0) for u in "cd"], 0.0)
    assert await trained(q, 1, 2) == "cd"
    await q.publish(PolicyVersion(0, 1))
    await started(q, "ef")
    await q.put([payload(u, 1) for u in "ef"], 0.0)
    lease = await waits(q.lease(2, 2, 0.0))  # a and b have version 1 for their last
    await q.put([payload("b", 0), payload("a", 0)], 0.0)
    assert [g.uid for g in (await lease)[0].groups] == ["a", "b"]


async def test_a_group_that_is_issued_again_keeps_its_deadline():
    """It may go on with the tokens that it had."""
    q = queue(per_version=1, threshold="1", order="ready_first")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    await q.put([payload("b", 0)], 0.0)
    assert await trained(q, 1, 1) == "b"
    await q.publish(PolicyVersion(0, 1))
    await started(q, "ac")
    await q.put([payload("c", 1)], 0.0)
    lease = await waits(q.lease(2, 1, 0.0))
    await q.put([payload("a", 0, 1)], 0.0)
    assert [g.uid for g in (await lease)[0].groups] == ["a"]


async def test_a_group_that_must_come_first_may_start_again():
    """Even if others, with later deadlines, have the places that a smaller G leaves: the batch waits for it."""
    records = InMemoryRecords()
    q = queue(per_version=4, threshold="1", order="ready_first", records=records)
    await q.publish(PolicyVersion(0, 2))
    await started(q, "abcd")
    await q.put([payload(u, 2) for u in "abc"], 0.0)
    await q.rollback(0)
    await q.publish(PolicyVersion(1, 0))
    await started(q, "d")
    q = queue(per_version=1, threshold="1", order="ready_first", records=records)
    await q.rollback(0)
    await q.publish(PolicyVersion(2, 0))
    assert await trained(q, 1, 1) == "a"
    await q.publish(PolicyVersion(2, 1))
    lease = await waits(q.lease(2, 1, 0.0))
    await started(q, "d")
    await q.put([payload("d", 1)], 0.0)
    assert [g.uid for g in (await lease)[0].groups] == ["d"]


async def test_mask_says_which_tokens_are_too_old():
    q = queue(per_version=1, threshold="1", order="ready_first", overdue="mask")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    for step, uid in enumerate("bcd", start=1):
        await q.put([payload(uid, step - 1)], 0.0)
        assert await trained(q, step, 1) == uid
        await q.publish(PolicyVersion(0, step))
        await q.issue(tickets("cde"[step - 1 :]))
    await q.put([payload("a", 0, 1, 2)], 0.0)
    lease, _ = await q.lease(4, 1, 0.0)
    assert ([g.uid for g in lease.groups], lease.mask_before) == (["a"], 2)


@pytest.mark.parametrize("finished_in_time", [True, False])
async def test_mask_drops_a_group_without_a_token_that_is_young_enough(finished_in_time):
    q = queue(per_version=1, threshold="0", order="ready_first", overdue="mask")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "a")
    if finished_in_time:
        await q.put([payload("a", 0)], 0.0)
    await q.publish(PolicyVersion(0, 1))
    if not finished_in_time:
        await q.put([payload("a", 0)], 0.0)
    assert (await q.stats())["fully_async/dropped/overdue"] == 1
    await started(q, "b")


async def test_drop_gives_up_groups_past_their_deadline_and_tells_the_rollouter():
    q = queue(per_version=1, threshold="1", order="ready_first", overdue="drop")
    await q.publish(PolicyVersion(0, 0))
    await started(q, "ab")
    await q.put([payload("b", 0)], 0.0)
    await trained(q, 1, 1)
    overdue = await waits(q.overdue())
    await q.publish(PolicyVersion(0, 1))
    await started(q, "c")
    assert not overdue.done()
    await q.put([payload("c", 1)], 0.0)
    await trained(q, 2, 1)
    await q.publish(PolicyVersion(0, 2))
    assert await overdue == ["a"]
    await q.put([payload("a", 0)], 0.0)  # what it had finished meanwhile, or gives up, changes nothing
    await q.drop([("a", "zero_variance")])
    assert (await q.stats())["fully_async/dropped/overdue"] == q.balance()["dropped"] == 1


async def test_a_group_that_was_overdue_when_the_queue_died_is_not_issued_as_a_new_one():
    records = InMemoryRecords()
    q = queue(per_version=1, threshold="1", order="ready_first", overdue="drop", records=records)
    await q.publish(PolicyVersion(0, 0))
    await q.issue(tickets(["a", "b"]))
    for step in (1, 2):
        uid = "bc"[step - 1]
        await q.put([payload(uid, step - 1)], 0.0)
        await q.lease(step, 1, 0.0)
        await q.trained(step)
        await q.publish(PolicyVersion(0, step))
        if step == 1:
            await q.issue(tickets(["c"]))
    assert q.balance()["dropped"] == 1  # a, which the rollouter has not heard of
    again = queue(per_version=1, threshold="1", order="ready_first", overdue="drop", records=records)
    assert await again.issue(tickets(["a", "d"])) == 2
    assert again.balance() == {"issued": 4, "trained": 2, "dropped": 1, "in_flight": 1, "queued": 0, "leased": 0}


async def test_a_group_may_be_given_up_by_both_sides_at_once(tmp_path):
    journal = Journal(tmp_path)
    q = queue(per_version=1, threshold="0", order="ready_first", overdue="drop", records=journal)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "a")
    await asyncio.gather(q.drop([("a", "zero_variance")]), q.publish(PolicyVersion(0, 1)))
    await started(q, "b")
    await asyncio.gather(q.publish(PolicyVersion(0, 2)), q.drop([("b", "zero_variance")]))
    assert (q.balance()["dropped"], journal.recover().dropped) == (2, {"zero_variance": 1, "overdue": 1})
    await journal.close()


# -- rolling updates ---------------------------------------------------------------------------------------------------


async def test_while_an_update_rolls_each_group_counts_from_the_version_of_its_replica():
    q = queue(per_version=2, threshold="0")
    old, new = PolicyVersion(0, 0), PolicyVersion(0, 1)
    await q.publish(old)
    await started(q, "ab")
    await q.put([payload(u, 0) for u in "ab"], 0.0)
    await trained(q, 1, 2)
    await q.publish(new, rolling=True)
    on_old, on_any = await waits(q.issue(tickets("c"), old)), await waits(q.issue(tickets("d")))
    await started(q, "c", new)
    await q.retire_before(new)
    assert await on_any == 1
    assert await on_old == 1  # its replica serves the new version by now


async def test_a_queue_that_restarts_while_an_update_rolls_still_counts_from_the_old_version():
    records = InMemoryRecords()
    q = queue(per_version=1, threshold="0", records=records)
    await q.publish(PolicyVersion(0, 0))
    await started(q, "a")
    await q.put([payload("a", 0)], 0.0)
    await trained(q, 1, 1)
    await q.publish(PolicyVersion(0, 1), rolling=True)
    q = queue(per_version=1, threshold="0", records=records)
    issue = await waits(q.issue(tickets("b")))
    await q.retire_before(PolicyVersion(0, 1))
    assert await issue == 1
    assert await queue(per_version=1, threshold="0", records=records).issue(tickets("b")) == 1
