"""Journal and ledger on real files: acknowledged writes survive any kill, and every group is accounted for."""

import asyncio
import errno
import os
import random
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.cli import ledger as command
from asyncrl.sample_queue.group_state import GroupTable, QueueError
from asyncrl.sample_queue.journal import Journal, found_copy, remove_older_copies
from asyncrl.sample_queue.ledger import SCHEMA_VERSION, LedgerError
from asyncrl.sample_queue.records import Changes, JournalError, Recovered
from asyncrl.sample_queue.spool import Disk, SpoolError
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from tests.support.durable import (
    DurableTable,
    Transition,
    cover,
    drop,
    finish,
    issue,
    lease,
    publish,
    refuse,
    release,
    roll_back,
    train,
)
from tests.support.trees import make_trees
from tests.test_spool import FaultyDisk, flip, in_child

V0 = PolicyVersion(0, 0)


def sample(index: int, length: int, spans=((0, 0),), mask=None, reward: float = 0.0) -> Sample:
    return Sample.single(
        index,
        np.arange(length, dtype=np.int32),
        np.zeros(length, np.float32),
        np.ones(length, bool) if mask is None else np.array(mask, bool),
        [VersionSpan(start, PolicyVersion(0, number)) for start, number in spans],
        FinishReason.STOP,
        reward,
    )


def payload(uid: str, spans=((0, 0),), length: int = 20, reward: float = 0.0, times=None) -> bytes:
    samples = [sample(i, length, spans, reward=reward) for i in range(2)]
    return Group.from_samples(uid, uid, 0, np.ones(3, np.int32), samples, times).to_bytes()


def issued(first: int, count: int, version: PolicyVersion = V0) -> list[Transition]:
    return [issue(str(seq), version, f"p{seq}") for seq in range(first, first + count)]


def states(found: Recovered) -> dict[str, str]:
    return {group.uid: group.state for group in found.groups}


def steps(found: Recovered) -> dict[int, list[str]]:
    """Uids of leased and provisionally trained groups, by step."""
    steps: dict[int, list[str]] = defaultdict(list)
    for group in found.groups:
        if group.step is not None:
            steps[group.step].append(group.uid)
    return steps


def assert_balanced(found: Recovered) -> None:
    by_state = Counter(group.state for group in found.groups)
    assert found.issued == by_state.total() + found.final + sum(found.dropped.values())


def assert_payloads(journal: Journal, found: Recovered) -> None:
    for group in found.groups:
        if group.state != "in_flight":
            assert Group.from_buffer(journal.read(group.uid)).uid == group.uid


# -- transitions -------------------------------------------------------------------------------------------------------


async def test_the_ledger_tracks_a_group_from_issue_to_final_training(tmp_path):
    now = iter(range(100, 200))
    table = DurableTable(tmp_path, {"run": "a"}, clock=lambda: next(now))
    await table.write(publish(PolicyVersion(0, 3), 7))
    await table.write(*issued(1, 1, PolicyVersion(0, 3)))
    times = {"issued_s": 1.0, "started_s": 1.25, "generated_s": 1.5, "finished_s": 2.0}
    await table.write(finish(payload("1", spans=((0, 2), (5, 3)), reward=0.5, times=times)))
    await table.write(lease(["1"], 4))
    await table.write(train(4))
    found = table.recover()
    (group,) = found.groups
    assert (group.seq, group.prompt_id, group.state, group.step, group.final) == (1, "p1", "trained", 4, 0)
    assert (group.version, group.oldest, group.newest_number) == (PolicyVersion(0, 3), PolicyVersion(0, 2), 3)
    assert (group.trained_number, group.samples, group.tokens, group.reward) == (3, 2, 40, 0.5)
    assert (group.issued_s, group.finished_s, group.leased_s, group.trained_s) == (101, 102, 103, 104)
    assert (group.started_s, group.generated_s, group.processing_s) == (102 - 0.75, 102 - 0.5, 1.0)
    assert group.dropped_s is None
    assert (found.version, found.served) == (PolicyVersion(0, 3), {PolicyVersion(0, 3): 7})
    await table.write(cover(4))
    found = table.recover()
    assert (found.groups, found.issued, found.final, found.covered_step) == ([], 1, 1, 4)
    await table.close()


async def test_a_group_of_several_sequences_is_counted_by_samples_sequences_and_tokens(tmp_path, capsys):
    table = DurableTable(tmp_path)
    group = Group.from_buffer(make_trees([2])[0])
    group.uid = "1"
    await table.write(*issued(1, 1), finish(group.to_bytes()), lease(["1"], 1), train(1))
    (found,) = table.recover().groups
    await table.close()
    tokens, trained = len(group.tokens), int(group.loss_mask.sum())
    assert (found.samples, found.sequences, found.tokens, found.trained_tokens) == (
        2,
        len(group.prefix),
        tokens,
        trained,
    )
    assert command.main([str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sequences", "per", "sample", "trained", "1", f"{len(group.prefix) / 2:.2f}"] in [row[:6] for row in rows]
    assert ["trained", "share", "of", "tokens", "trained", "1", f"{trained / tokens:.3f}"] in [row[:7] for row in rows]


async def test_a_rollback_queues_later_steps_and_all_leases_in_the_order_of_issue(tmp_path):
    table = DurableTable(tmp_path)
    await table.write(*issued(1, 6))
    for uid in ("4", "2", "1", "3", "5"):
        await table.write(finish(payload(uid)))
    await table.write(lease(["1"], 1), train(1), cover(1))
    await table.write(lease(["2"], 2), train(2), lease(["3"], 3), train(3), lease(["4"], 4))
    assert steps(table.recover()) == {2: ["2"], 3: ["3"], 4: ["4"]}
    await table.write(roll_back(2))
    assert [group.uid for group in table.groups.waiting()] == ["3", "4", "5", "6"]
    expected = {"2": "trained", "3": "queued", "4": "queued", "5": "queued", "6": "in_flight"}
    assert list(states(table.recover()).items()) == list(expected.items())
    assert_payloads(table.journal, table.recover())
    with pytest.raises(QueueError, match="cannot go back to step 0"):
        await table.write(roll_back(0))
    await table.close()


async def test_segments_are_deleted_once_they_hold_only_final_and_dropped_groups(tmp_path):
    table = DurableTable(tmp_path, segment_bytes=1)  # a segment per payload
    segments = lambda: sorted(int(path.stem) for path in (tmp_path / "spool").glob("*.seg"))
    await table.write(*issued(1, 4))
    for seq in range(1, 5):
        await table.write(finish(payload(str(seq))))
    await table.write(lease(["1", "2"], 1), train(1), drop("3", "overdue"))
    assert segments() == [1, 2, 3, 4]
    await table.write(cover(1))
    assert segments() == [4]
    await table.close()


async def test_a_segment_that_cannot_be_deleted_fails_the_next_write_not_the_one_on_disk(tmp_path, monkeypatch):
    table = DurableTable(tmp_path, segment_bytes=1)
    await table.write(*issued(1, 3), *(finish(payload(uid)) for uid in "123"), lease(["1"], 1), train(1))

    def refuse_to_delete(spool, segment):
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr("asyncrl.sample_queue.spool.Spool.release", refuse_to_delete)
    await table.write(cover(1))
    with pytest.raises(JournalError, match="not permitted"):
        await table.write(drop("2", "overdue"))
    assert table.recover().final == 1
    await table.close()


async def test_a_group_that_is_issued_again_counts_from_its_earliest_version(tmp_path):
    table = DurableTable(tmp_path)
    await table.write(issue("1", PolicyVersion(0, 3)))
    await table.write(issue("1", PolicyVersion(1, 2)))
    await table.write(issue("1", PolicyVersion(1, 5)))
    found = table.recover()
    assert (found.issued, found.groups[0].version) == (1, PolicyVersion(1, 2))
    await table.close()


@pytest.mark.parametrize(
    ("transition", "message"),
    [
        (issue("2", V0), "group 2 is queued, expected a new group or one in flight"),
        (issue("4", V0), "group 4 is trained, expected a new group or one in flight"),
        (finish(payload("2")), "group 2 is queued, expected in_flight"),
        (finish(payload("7")), "group 7 is unknown, expected in_flight"),
        (refuse("3", "unknown_version"), "group 3 is leased, expected in_flight"),
        (drop("3", "failed"), "group 3 is leased, expected in_flight or queued"),
        (drop("7", "failed"), "group 7 is unknown, expected in_flight or queued"),
        (lease(["2", "1"], 4), "group 1 is in_flight, expected queued"),
        (lease(["2", "5"], 4), "group 5 is unknown, expected queued"),  # it was dropped
        (lease(["2"], 0), "step 0 is covered"),
        (train(0), "step 0 is covered"),
        (publish(V0, 0), "version 0.0 was published after 0.0"),
        (roll_back(-1), "cannot go back to step -1"),
    ],
)
async def test_an_illegal_transition_is_refused_and_changes_nothing(tmp_path, transition, message):
    table = DurableTable(tmp_path)
    finished = [finish(payload(str(seq))) for seq in (2, 3, 4)]
    await table.write(publish(V0, 0), *issued(1, 5), *finished, lease(["4"], 1), train(1), lease(["3"], 3))
    await table.write(drop("5", "failed"))
    before = table.recover()
    with pytest.raises(QueueError, match=re.escape(message)):
        transition(table)
    assert not table.changes
    assert table.groups.balance() == {"issued": 5, "trained": 1, "dropped": 1, "in_flight": 1, "queued": 1, "leased": 1}
    await table.write()
    assert table.recover() == before
    await table.close()


async def test_an_acknowledged_write_and_all_before_it_are_on_disk(tmp_path):
    table = DurableTable(tmp_path)
    first = asyncio.ensure_future(table.write(*issued(1, 3)))
    await asyncio.sleep(0)
    await table.write()  # empty: waits for the earlier ones
    assert first.done()
    assert table.recover().issued == 3
    await table.close()


def test_a_buffer_that_is_not_a_group_cannot_be_finished():
    with pytest.raises(ValueError, match="not a group"):
        GroupTable(Recovered(), Changes()).finish(Group.from_buffer(b"junk" * 9), b"junk" * 9)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_oldest_and_newest_version_come_from_trained_tokens(data):
    samples = []
    for index in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(0, 8))
        starts = sorted({0, *data.draw(st.lists(st.integers(1, 8), max_size=3))} & set(range(max(length, 1))))
        spans = [(start, data.draw(st.integers(0, 3))) for start in starts if length]
        mask = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
        samples.append(sample(index, length, spans, mask))
    group = Group.from_samples("u", "p", 0, np.ones(1, np.int32), samples)
    numbers = [
        max(span for span in q.spans if span.start <= at).version
        for s in samples
        for q in s.sequences
        for at in range(len(q.tokens))
        if q.loss_mask[at]
    ]
    assert group.trained_versions() == ((min(numbers), max(numbers)) if numbers else None)


# -- the journal against a plain model ---------------------------------------------------------------------------------


class Model:
    """Plain model of the journal's state."""

    def __init__(self) -> None:
        self.groups: dict[str, list] = {}  # uid → [state, step], in the order of issue
        self.dropped: Counter[str] = Counter()
        self.covered = 0
        self.version = -1

    def some(self, state: str, seed: int) -> list[str]:
        uids = [uid for uid, (s, _) in self.groups.items() if s == state]
        return uids[: 1 + seed % 3] if seed % 2 else uids[-1 - seed % 3 :]

    def transitions(self, kind: int, seed: int) -> list[Transition]:
        """The next transitions of a kind, which are also applied to the model."""
        groups = self.groups
        if kind == 0:
            uids = [str(len(groups) + 1 + i) for i in range(1 + seed % 3)]
            groups |= {uid: ["in_flight", None] for uid in uids}
            return [issue(uid, V0) for uid in uids]
        if kind in (1, 2):
            uids = self.some("in_flight", seed)
            for uid in uids:
                groups[uid][0] = "queued"
            return [finish(payload(uid)) for uid in uids]
        if kind == 3:
            uids = self.some(("in_flight", "queued")[seed % 2], seed)[:1]
            for uid in uids:
                groups[uid] = ["dropped", None]
                self.dropped[f"r{seed % 2}"] += 1
            return [drop(uid, f"r{seed % 2}") for uid in uids]
        if kind == 4:
            step, uids = self.covered + 1 + seed % 4, self.some("queued", seed)
            groups |= {uid: ["leased", step] for uid in uids}
            return [lease(uids, step)]
        if kind == 5:
            uids = self.some("leased", seed)[:1]
            held = {step for uid in uids if (step := groups[uid][1]) > self.covered}
            for group in groups.values():
                if group[0] == "leased" and group[1] in held:
                    group[0] = "trained"
            return [train(step) for step in held]
        if kind == 6:
            held = {groups[uid][1] for uid in self.some("leased", seed)[:1]}
            for group in groups.values():
                if group[0] == "leased" and group[1] in held:
                    group[:] = ["queued", None]
            return [release(step) for step in held]
        if kind == 7:
            held = [step for state, step in groups.values() if state == "leased"]
            self.covered = max(self.covered, min([self.covered + seed % 3, *[step - 1 for step in held]]))
            for group in groups.values():
                if group[0] == "trained" and group[1] <= self.covered:
                    group[0] = "final"
            return [cover(self.covered)]
        if kind == 8:
            step = self.covered + seed % 3
            for group in groups.values():
                if group[0] == "leased" or (group[0] == "trained" and group[1] > step):
                    group[:] = ["queued", None]
            return [roll_back(step)]
        self.version += 1
        return [publish(PolicyVersion(0, self.version), 0)]

    def check(self, journal: Journal) -> None:
        found = journal.recover()
        alive = {uid: tuple(g) for uid, g in self.groups.items() if g[0] not in ("final", "dropped")}
        assert [(g.uid, (g.state, g.step)) for g in found.groups] == list(alive.items())
        assert found.issued == len(self.groups)
        assert found.final == sum(g[0] == "final" for g in self.groups.values())
        assert found.dropped == self.dropped
        assert found.version == (PolicyVersion(0, self.version) if self.version >= 0 else None)
        assert found.covered_step == self.covered
        assert_balanced(found)
        assert_payloads(journal, found)


class SlowDisk(FaultyDisk):
    """Syncs only once ``gate`` is open."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.gate = threading.Event()

    def sync(self, fd):
        self.gate.wait(60)
        super().sync(fd)


async def test_a_write_that_the_disk_does_not_complete_is_noticed(tmp_path):
    disk = SlowDisk()
    table = DurableTable(tmp_path, disk=disk)
    assert table.journal.stalled_s == 0
    await table.write(publish(V0, 0), *issued(1, 1))
    writing = asyncio.create_task(table.write(finish(payload("1"))))
    async with asyncio.timeout(30):
        while not table.journal.stalled_s:
            await asyncio.sleep(0.01)
    before = table.journal.stalled_s
    await asyncio.sleep(0.01)
    assert table.journal.stalled_s > before
    disk.gate.set()
    await writing
    assert table.journal.stalled_s == 0
    await table.close()


REOPEN, WAIT = 10, 11


@settings(max_examples=40, deadline=None)
@given(plan=st.lists(st.tuples(st.integers(0, WAIT), st.integers(0, 5)), min_size=10, max_size=60))
def test_the_journal_equals_a_plain_model_over_random_events_and_reopenings(tmp_path_factory, plan):
    folder = tmp_path_factory.mktemp("run")

    async def history() -> None:
        model, table = Model(), DurableTable(folder, segment_bytes=3000)
        calls: list = []
        for kind, seed in plan:
            if kind in (REOPEN, WAIT):  # until then calls accumulate and share commits
                await asyncio.gather(*calls)
                calls = []
                if kind == REOPEN:
                    await table.close()
                    table = DurableTable(folder, segment_bytes=3000)
                model.check(table.journal)
            else:
                calls.append(asyncio.ensure_future(table.write(*model.transitions(kind, seed))))
        await asyncio.gather(*calls)
        model.check(table.journal)
        await table.close()

    asyncio.run(history())


async def test_many_concurrent_writers_share_few_commits(tmp_path):
    table = DurableTable(tmp_path)
    await table.write(*issued(1, 200))
    before = table.journal.stats()
    await asyncio.gather(*(table.write(finish(payload(str(seq)))) for seq in range(1, 201)))
    after = table.journal.stats()
    assert after.commits - before.commits <= 20
    assert after.cpu_s > before.cpu_s
    await table.close()


async def test_another_client_reads_while_the_journal_writes(tmp_path):
    table = DurableTable(tmp_path)
    client = sqlite3.connect(tmp_path / "ledger.sqlite")
    for seq in range(1, 30):
        await table.write(*issued(seq, 1), finish(payload(str(seq))))
        assert client.execute("SELECT COUNT(*), SUM(tokens) FROM groups").fetchone() == (seq, seq * 40)
    client.close()
    await table.close()


# -- kills -------------------------------------------------------------------------------------------------------------


async def work(folder: Path, acknowledge, disk: Disk | None = None) -> None:
    """Resumes, then trains three groups per step; reports each acknowledged transition as (verb, step, uids)."""
    table = DurableTable(folder, segment_bytes=20_000, disk=disk)
    found = table.recover()
    await table.write(roll_back(found.covered_step))
    acknowledge("rollback", found.covered_step, [])
    for uid in [group.uid for group in found.groups if group.state == "in_flight"]:
        await table.write(drop(uid, "killed"))
    queued = [group.uid for group in table.recover().groups]
    number = found.version.number if found.version else -1
    last, step = found.issued, found.covered_step
    while True:
        uids = [str(last + i) for i in (1, 2, 3)]
        await table.write(*issued(last + 1, 3))
        acknowledge("issued", step, uids)
        last += 3

        async def finish_one(uid: str) -> None:
            await table.write(finish(payload(uid)))
            acknowledge("finished", 0, [uid])

        await asyncio.gather(*map(finish_one, uids))
        queued, step, number = queued + uids, step + 1, number + 1
        batch, queued = queued[:3], queued[3:]
        await table.write(lease(batch, step))
        acknowledge("leased", step, batch)
        await table.write(train(step), publish(PolicyVersion(0, number), 3 * step))
        acknowledge("trained", step, batch)
        if step % 3 == 0:
            await table.write(cover(step))
            acknowledge("covered", step, [])


RANK = {"in_flight": 0, "queued": 1, "leased": 2, "trained": 3}
REACHED = {"issued": 0, "finished": 1, "leased": 2, "trained": 3}


def check_after_kill(folder: Path, reported: list[tuple[str, int, list[str]]], before: Recovered | None) -> Recovered:
    """Check that acknowledged transitions are present, writes are atomic, groups balance, and payloads are readable."""

    async def inspect() -> Recovered:
        table = DurableTable(folder, segment_bytes=20_000)
        found = table.recover()
        assert_balanced(found)
        assert_payloads(table.journal, found)
        await table.close()
        return found

    found = asyncio.run(inspect())
    state = states(found)
    covered = max((step for verb, step, _ in reported if verb == "covered"), default=0)
    assert found.covered_step >= covered
    for verb, _, uids in reported:
        for uid in uids:
            if uid in state:
                assert RANK[state[uid]] >= REACHED[verb], (uid, verb, state[uid])
            else:  # here a group leaves the ledger's live states only once its training is covered
                assert int(uid) <= found.issued
    assert found.issued % 3 == 0
    for step, uids in steps(found).items():
        assert len(uids) == 3
        assert len({state[uid] for uid in uids}) == 1, f"step {step} is half trained"
    if before is not None:
        assert found.issued >= before.issued
        assert found.final >= before.final
        assert found.final == 3 * found.covered_step
    return found


def run_until_killed(folder: Path, kill_after: tuple[int, float] | None, disk: Disk | None = None) -> list:
    """Fork a writer on ``folder`` and return what it reported before SIGKILL, which comes after ``kill_after`` (lines,
    seconds), or from the writer itself if None."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            report = lambda verb, step, uids: os.write(writer, f"{verb} {step} {' '.join(uids)}\n".encode())
            asyncio.run(work(folder, report, disk))
        finally:
            os._exit(99)
    os.close(writer)
    with open(reader) as lines:
        reported = []
        if kill_after is not None:
            reported = [lines.readline() for _ in range(kill_after[0])]
            time.sleep(kill_after[1])
            os.kill(pid, signal.SIGKILL)
        reported += list(lines)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    return [(line.split()[0], int(line.split()[1]), line.split()[2:]) for line in reported if line.endswith("\n")]


def test_acknowledged_transitions_survive_kills_at_random_moments(tmp_path):
    rng, found = random.Random(0), None
    for _ in range(30):
        reported = run_until_killed(tmp_path, (rng.randint(1, 40), rng.uniform(0, 0.003)))
        found = check_after_kill(tmp_path, reported, found)
    assert found is not None
    assert found.final > 0


class DyingDisk(Disk):
    """Kills its own process when ``moment`` occurs for the ``count``-th time."""

    MOMENTS = ("before write", "half write", "after write", "after sync")

    def __init__(self, moment: str, count: int) -> None:
        self._moment, self._left = moment, count

    def _reach(self, moment: str) -> bool:
        self._left -= moment == self._moment
        return self._left == 0

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write(self, fd, buffers, offset):
        if self._reach("before write"):
            self._die()
        if self._reach("half write"):
            data = b"".join(buffers)
            os.pwrite(fd, data[: len(data) // 2], offset)
            self._die()
        written = super().write(fd, buffers, offset)
        if self._reach("after write"):
            self._die()
        return written

    def sync(self, fd):
        super().sync(fd)
        if self._reach("after sync"):
            self._die()


def test_a_kill_between_any_two_durable_transitions_loses_nothing(tmp_path):
    for moment in DyingDisk.MOMENTS:
        for count in range(1, 8):
            folder = tmp_path / f"{moment} {count}"
            reported = run_until_killed(folder, None, DyingDisk(moment, count))
            before = check_after_kill(folder, reported, None)
            check_after_kill(folder, run_until_killed(folder, None, DyingDisk("half write", 3)), before)


# -- failing disks and files -------------------------------------------------------------------------------------------


async def test_a_full_disk_fails_all_waiting_writes_and_no_earlier_one(tmp_path):
    disk = FaultyDisk(1_000_000)
    table = DurableTable(tmp_path, disk=disk)
    await table.write(*issued(1, 5), finish(payload("1")))
    disk.room_bytes = 100
    calls = [table.write(finish(payload(str(seq)))) for seq in range(2, 6)] + [table.write(lease(["1"], 1))]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(e, JournalError) and "No space left" in str(e) for e in errors[:4])
    assert isinstance(errors[0], JournalError)
    assert isinstance(errors[0].__cause__, OSError)
    assert errors[0].__cause__.errno == errno.ENOSPC
    disk.room_bytes = 1_000_000
    expected = dict.fromkeys("12345", "in_flight") | {"1": "queued"}
    if errors[4] is None:  # it was late enough for a separate commit, without a payload
        expected["1"] = "leased"
    assert states(table.recover()) == expected
    await table.write(finish(payload("2")))
    await table.close()
    table = DurableTable(tmp_path)
    assert states(table.recover()) == expected | {"2": "queued"}
    assert table.journal.torn is None
    assert_payloads(table.journal, table.recover())
    await table.close()


async def test_changes_that_build_on_a_failed_write_are_refused_until_the_state_on_disk_is_recovered(tmp_path):
    disk = FaultyDisk(1_000_000)
    table = DurableTable(tmp_path, disk=disk)
    await table.write(*issued(1, 1))
    disk.room_bytes = 100
    finish(payload("1"))(table)
    with pytest.raises(JournalError, match="No space left"):
        await table.journal.write(table.changes.take())
    disk.room_bytes = 1_000_000
    lease(["1"], 1)(table)
    with pytest.raises(JournalError, match="No space left"):
        await table.journal.write(table.changes.take())
    table.load()
    assert table.groups.state("1") == "in_flight"
    await table.write(finish(payload("1")), lease(["1"], 1))
    assert states(table.recover()) == {"1": "leased"}
    await table.close()


async def test_a_payload_is_flushed_before_the_ledger_refers_to_it(tmp_path):
    class Witness(Disk):
        seen: tuple[str, ...] = ()

        def sync(self, fd):
            with sqlite3.connect(tmp_path / "ledger.sqlite") as client:
                self.seen += tuple(state for (state,) in client.execute("SELECT state FROM groups"))
            client.close()
            super().sync(fd)

    disk = Witness()
    table = DurableTable(tmp_path, disk=disk)
    await table.write(*issued(1, 1))
    await table.write(finish(payload("1")))
    assert disk.seen == ("in_flight",)
    await table.close()


async def test_a_failed_flush_is_not_acknowledged_and_blocks_payloads_until_the_journal_is_reopened(tmp_path):
    disk = FaultyDisk(1_000_000)
    table = DurableTable(tmp_path, disk=disk)
    await table.write(*issued(1, 1))
    disk.sync_fails = True
    with pytest.raises(JournalError, match="Input/output error"):
        await table.write(finish(payload("1")))
    disk.sync_fails = False
    with pytest.raises(JournalError, match="an earlier flush failed"):
        await table.write(finish(payload("1")))
    await table.close()
    table = DurableTable(tmp_path)
    assert states(table.recover()) == {"1": "in_flight"}
    await table.write(finish(payload("1")))
    assert_payloads(table.journal, table.recover())
    await table.close()


async def test_a_segment_whose_name_was_not_synced_takes_no_payloads(tmp_path, monkeypatch):
    def fails(folder):
        raise OSError(errno.EIO, "Input/output error")

    table = DurableTable(tmp_path, segment_bytes=1)
    await table.write(*issued(1, 2), finish(payload("1")))
    monkeypatch.setattr("asyncrl.sample_queue.spool.sync", fails)
    with pytest.raises(JournalError, match="Input/output error"):
        await table.write(finish(payload("2")))
    monkeypatch.undo()
    with pytest.raises(JournalError, match="an earlier flush failed"):
        await table.write(finish(payload("2")))
    await table.close()


async def test_a_segment_begun_by_a_failed_write_does_not_keep_the_run_from_resuming(tmp_path, monkeypatch):
    table = DurableTable(tmp_path, segment_bytes=1)
    await table.write(*issued(1, 2), finish(payload("1")), lease(["1"], 1), train(1))
    with monkeypatch.context() as patch:
        patch.setattr("asyncrl.sample_queue.ledger.Ledger.commit", lambda *a: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(JournalError, match="full"):
            await table.write(finish(payload("2")))
    await table.write(cover(1))  # deletes the first segment
    await table.close()
    table = DurableTable(tmp_path)
    assert states(table.recover()) == {"2": "in_flight"}
    await table.close()


def test_a_file_size_limit_fails_the_writer_and_keeps_all_acknowledged_groups(tmp_path):
    async def until_full() -> int:
        table = DurableTable(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        seq = 0
        try:
            while True:
                await table.write(*issued(seq + 1, 1), finish(payload(str(seq + 1), length=2000)))
                seq += 1
        except JournalError:
            return seq

    acknowledged = in_child(lambda: asyncio.run(until_full()))
    assert 2 <= acknowledged <= 20
    found = check_groups(tmp_path)
    assert found.issued == acknowledged
    assert set(states(found).values()) == {"queued"}


def check_groups(folder: Path) -> Recovered:
    async def inspect() -> Recovered:
        table = DurableTable(folder)
        found = table.recover()
        assert_balanced(found)
        assert_payloads(table.journal, found)
        await table.close()
        return found

    return asyncio.run(inspect())


def test_a_read_only_folder_is_refused_for_writing(tmp_path):
    def body() -> int:
        os.chmod(tmp_path, 0o555)
        if os.getuid() == 0:
            os.chdir(tmp_path)  # the user nobody cannot open the path to here
            os.setuid(65534)
        try:
            Journal(Path("."))
        except PermissionError:
            return 0
        return 1

    assert in_child(body) == 0
    assert list(tmp_path.iterdir()) == []


async def make_run(folder: Path, groups: int = 200) -> None:
    table = DurableTable(folder, {"run": "demo", "groups_per_version": 4})
    version = -1
    for step, first in enumerate(range(1, groups + 1, 4), start=1):
        version += 1
        uids = [str(seq) for seq in range(first, first + 4)]
        start: list[Transition] = [
            publish(PolicyVersion(0, version), first - 1),
            *issued(first, 4, PolicyVersion(0, version)),
        ]
        number = max(0, version - step % 3)
        finished = [finish(payload(uid, ((0, number),), 10 + step, float(int(uid) % 2))) for uid in uids]
        await table.write(*start, *finished, drop(uids[3], "overdue"), lease(uids[:3], step), train(step))
    await table.write(cover(groups // 8), *issued(groups + 1, 2), finish(payload(str(groups + 1))))
    await table.close()


@pytest.mark.parametrize("how", ["damaged page", "damaged header", "not SQLite", "other program", "newer schema"])
async def test_a_damaged_or_foreign_ledger_is_refused_and_not_changed(tmp_path, capsys, how):
    await make_run(tmp_path)
    path = tmp_path / "ledger.sqlite"
    if how == "damaged page":
        path.write_bytes(path.read_bytes()[:8192] + os.urandom(4096) + path.read_bytes()[12288:])
    elif how == "damaged header":
        flip(path, 2)
    elif how == "not SQLite":
        path.write_text("notes of mine\n" * 100)
    else:
        pragma = "application_id = 7" if how == "other program" else f"user_version = {SCHEMA_VERSION + 1}"
        with sqlite3.connect(path) as db:
            db.execute(f"PRAGMA {pragma}")
        db.close()
    before = path.read_bytes()
    schemas = f"schema {SCHEMA_VERSION + 1}, expected {SCHEMA_VERSION}"
    expected = {"other program": "of another program", "newer schema": schemas}.get(how, "was not changed")
    with pytest.raises(LedgerError, match=expected) as refusal:
        Journal(tmp_path)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == before
    assert command.main([str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("command", [["asyncrl.ledger"], ["asyncrl.cli.main", "ledger"]], ids=" ".join)
async def test_a_pipe_that_nobody_reads_any_more_ends_the_audit_without_a_word(tmp_path, command):
    await make_run(tmp_path, 8)
    gone, pipe = os.pipe()
    os.close(gone)  # as `head` does
    audit = [sys.executable, "-m", *command, str(tmp_path)]
    ended = await asyncio.to_thread(subprocess.run, audit, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(pipe)
    assert (ended.stderr, ended.returncode) == ("", 128 + signal.SIGPIPE)


async def test_a_ledger_whose_spool_is_gone_or_damaged_is_refused(tmp_path):
    await make_run(tmp_path, 8)
    segment = tmp_path / "spool" / "000001.seg"
    flip(segment, 100)
    with pytest.raises(SpoolError, match="damaged at offset 0"):
        Journal(tmp_path)
    segment.unlink()
    with pytest.raises(SpoolError, match="is missing"):
        Journal(tmp_path)


async def test_two_runs_on_one_folder_are_refused(tmp_path):
    table = DurableTable(tmp_path)
    with pytest.raises(JournalError, match="in use by another process"):
        Journal(tmp_path)
    await table.close()
    await Journal(tmp_path).close()


async def test_a_closed_journal_takes_no_writes_and_finishes_pending_ones(tmp_path):
    table = DurableTable(tmp_path)
    call = asyncio.ensure_future(table.write(*issued(1, 1)))
    await asyncio.sleep(0)
    await table.close()
    await call
    await table.close()
    with pytest.raises(JournalError, match="is closed"):
        await table.write(*issued(2, 1))


# -- the command -------------------------------------------------------------------------------------------------------


async def test_the_command_prints_balance_staleness_distributions_drops_and_versions(tmp_path, capsys):
    await make_run(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.glob("ledger.sqlite")}
    assert command.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["in", "flight", "1"] in lines
    assert ["queued", "1"] in lines
    assert ["issued", "202"] in lines
    assert ["trained", "150", "75", "final,", "75", "not", "yet", "covered", "by", "a", "checkpoint"] in lines
    assert "balanced: issued = trained" in out
    staleness = {row[0]: int(row[1]) for row in lines if len(row) == 4 and "█" in row[3]}
    assert staleness == {"0": 51, "1": 51, "2": 48}
    assert ["overdue", "50"] in lines
    assert ["tokens", "per", "sample", "trained", "150", "35.5"] in [row[:6] for row in lines]
    assert ["reward", "generated", "201"] in [row[:3] for row in lines]
    assert ["0.49", "147"] in [row[:2] for row in lines] or ["0.49", "196"] in [row[:2] for row in lines]
    assert files == {path.name: path.read_bytes() for path in tmp_path.glob("ledger.sqlite")}


async def test_the_command_reads_a_running_run(tmp_path, capsys):
    table = DurableTable(tmp_path)
    await table.write(*issued(1, 3))
    assert command.main([str(tmp_path)]) == 0
    assert "balanced" in capsys.readouterr().out
    await table.write(*issued(4, 1))
    await table.close()


@pytest.mark.parametrize("lost", ["1", "3", "5"], ids=["final", "dropped", "newest"])
async def test_rows_that_something_else_deletes_end_the_run_at_the_next_checkpoint(tmp_path, lost):
    table = DurableTable(tmp_path)
    await table.write(*issued(1, 5), *(drop(uid, "poison") for uid in "35"), *(finish(payload(uid)) for uid in "12"))
    await table.write(lease(["1"], 1), train(1))
    await table.write(cover(1))
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other, other:
        other.execute("DELETE FROM groups WHERE uid = ?", [lost])
    await table.write(lease(["2"], 2), train(2))
    with pytest.raises(JournalError, match=r"ledger\.sqlite has lost rows: expected 5 groups, found 4"):
        await table.write(cover(2))


async def test_the_command_reports_a_lost_group(tmp_path, capsys):
    await make_run(tmp_path, 8)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("DELETE FROM groups WHERE seq = 3")
    db.close()
    assert command.main([str(tmp_path)]) == 1
    assert "NOT BALANCED: expected 10 issued groups, found 9" in capsys.readouterr().out


def test_the_command_reports_a_missing_ledger_in_one_line(tmp_path, capsys):
    assert command.main([str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: no ledger at")
    assert captured.err.count("\n") == 1


async def test_a_copy_on_another_disk_is_consistent_and_resumable(tmp_path):
    table = DurableTable(tmp_path / "local", segment_bytes=2000)
    await table.write(publish(V0, 0), *issued(1, 3))
    await table.write(finish(payload("1")))
    await table.journal.copy_to(tmp_path / "remote")
    await table.write(finish(payload("2")), drop("3", "late"))
    copy = DurableTable(tmp_path / "remote")
    assert copy.journal.torn is None
    found = copy.recover()
    assert states(found) == {"1": "queued", "2": "in_flight", "3": "in_flight"}
    assert Group.from_buffer(copy.journal.read("1")).uid == "1"
    await copy.close()
    await table.journal.copy_to(tmp_path / "remote")  # replaces the first
    again = DurableTable(found_copy(tmp_path / "remote"))
    assert states(again.recover()) == {"1": "queued", "2": "queued"}
    await again.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["local", "remote"]
    assert not (tmp_path / "local/copying").exists()
    await table.close()


async def test_a_copy_replaces_those_of_earlier_drivers(tmp_path):
    table, copies = DurableTable(tmp_path / "local"), tmp_path / "journal"
    for earlier in ("000001", "000002.before", "000003.partial", "000005", "notes"):
        (copies / earlier).mkdir(parents=True)
    await table.journal.copy_to(copies / "000004")
    remove_older_copies(copies / "000004")
    assert {path.name for path in copies.iterdir()} == {"000004", "000005", "notes"}
    await table.close()


async def test_a_copy_that_cannot_be_written_is_an_error_and_keeps_the_previous_one(tmp_path):
    table = DurableTable(tmp_path / "local")
    await table.write(publish(V0, 0), *issued(1, 1))
    await table.journal.copy_to(tmp_path / "remote")
    (tmp_path / "remote").rename(tmp_path / "remote.before")  # as after a crash between the two renames
    assert found_copy(tmp_path / "remote") == tmp_path / "remote.before"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="File exists"):
        await table.journal.copy_to(tmp_path / "file/remote")
    await table.write(finish(payload("1")))  # the journal still works
    await table.close()
