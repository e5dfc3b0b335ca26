"""Admission and queue: the staleness bound and the balance hold whatever the order of events."""

import asyncio
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.sample import FinishReason, Group, PolicyVersion, Sample, VersionSpan
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import QueueError, SampleQueue, Ticket
from asyncrl.sample_queue.journal import Journal
from tests.support.in_memory import InMemoryRecords


def payload(uid: str, version: int) -> bytes:
    s = Sample(
        0,
        np.ones(2, np.int32),
        np.zeros(2, np.float32),
        np.ones(2, bool),
        [VersionSpan(0, PolicyVersion(0, version))],
        FinishReason.STOP,
    )
    return Group.from_samples(uid, uid, 0, np.ones(1, np.int32), [s]).to_bytes()


def queue(per_version=2, threshold="0", total=100, records=None) -> SampleQueue:
    return SampleQueue(Admission(per_version, Fraction(threshold), total), records or InMemoryRecords())


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
    with pytest.raises(QueueError, match="0.0 was published after 0.1"):
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


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),  # groups per batch
    st.integers(1, 3),  # batches per version
    st.sampled_from(["0", "0.1", "0.5", "1", "1.5", "3"]),
    st.lists(st.integers(0, 2**30), min_size=50, max_size=200),
)
def test_no_trained_group_is_staler_than_the_bound(batch, trigger, threshold, choices):
    """Random arrivals, stragglers, drops and syncs; every lease is within ceil(threshold), every balance closes."""

    async def history() -> None:
        per_version = batch * trigger
        bound = -(-Fraction(threshold) // 1)
        q = queue(per_version, threshold, total=10_000)
        admission = q._admission
        version, step, started = 0, 0, 0
        flying: dict[str, int] = {}
        await q.publish(PolicyVersion(0, 0))
        for choice in choices:
            action, pick = choice % 4, choice // 4
            if action == 0 and admission.available():
                uids = [f"g{started + i}" for i in range(1 + pick % 3)]
                count = await q.issue(tickets(uids))
                flying |= dict.fromkeys(uids[:count], version)
                started += count
            elif action == 1 and flying:
                uid = sorted(flying)[pick % len(flying)]
                await q.put([payload(uid, flying.pop(uid))], 0.0)
            elif action == 2 and flying and pick % 3 == 0:
                uid = sorted(flying)[pick % len(flying)]
                del flying[uid]
                await q.drop([(uid, "reason")])
            elif action == 3 and q._next(batch) is not None:
                step += 1
                for g in (await q.lease(step, batch, 0.0))[0].groups:
                    assert version - g.oldest.number <= bound
                await q.trained(step)
                if step % trigger == 0:
                    version += 1
                    await q.publish(PolicyVersion(0, version))
            q.balance()

    asyncio.run(history())
