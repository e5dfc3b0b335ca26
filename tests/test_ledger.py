"""Journal and ledger on real files: what was acknowledged is there after any kill, and every group is accounted for."""

import asyncio
import errno
import os
import random
import resource
import signal
import sqlite3
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl import ledger as command
from asyncrl.sample import FinishReason, Group, PolicyVersion, Sample, VersionSpan
from asyncrl.sample_queue.journal import Journal, found_copy
from asyncrl.sample_queue.ledger import SCHEMA_VERSION, LedgerError, Recovered
from asyncrl.sample_queue.life import (
    Covered,
    Dropped,
    Event,
    Finished,
    Issued,
    JournalError,
    Leased,
    Partial,
    Published,
    Released,
    RolledBack,
    Trained,
    trained_versions,
)
from asyncrl.sample_queue.spool import Disk, SpoolError
from tests.test_spool import FaultyDisk, flip, in_child

V0 = PolicyVersion(0, 0)


def sample(index: int, length: int, spans=((0, 0),), mask=None, reward: float = 0.0) -> Sample:
    return Sample(
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


def issued(first: int, count: int, version: PolicyVersion = V0) -> list[Issued]:
    return [Issued(str(seq), f"p{seq}", 0, seq, version) for seq in range(first, first + count)]


def states(found: Recovered) -> dict[str, str]:
    return {group.uid: group.state for group in found.groups}


def steps(found: Recovered) -> dict[int, list[str]]:
    """The uids of leased and provisionally trained groups by step."""
    steps: dict[int, list[str]] = defaultdict(list)
    for group in found.groups:
        if group.step is not None:
            steps[group.step].append(group.uid)
    return steps


def assert_balanced(found: Recovered) -> None:
    under_way = Counter(group.state for group in found.groups)
    assert found.issued == under_way.total() + found.final + sum(found.dropped.values())
    assert under_way["trained"] == found.trained - found.final


def assert_payloads(journal: Journal, found: Recovered) -> None:
    for group in found.groups:
        if group.state == "in_flight":
            assert group.place is None
        else:
            assert group.place is not None
            assert Group.from_buffer(journal.read(group.place)).uid == group.uid


# -- the life of groups ------------------------------------------------------------------------------------------------


async def test_a_group_is_followed_from_issue_to_final_training(tmp_path):
    now = iter(range(100, 200))
    journal = Journal(tmp_path, {"run": "a"}, clock=lambda: next(now))
    await journal.write([Published(PolicyVersion(0, 3), 7)])
    await journal.write(issued(1, 1, PolicyVersion(0, 3)))
    times = {"issued_s": 1.0, "started_s": 1.25, "generated_s": 1.5, "finished_s": 2.0}
    await journal.write([Finished(payload("1", spans=((0, 2), (5, 3)), reward=0.5, times=times))])
    await journal.write([Leased(["1"], 4)])
    await journal.write([Trained(["1"], 4)])
    found = journal.recover()
    (group,) = found.groups
    assert (group.seq, group.prompt_id, group.state, group.step, group.final) == (1, "p1", "trained", 4, 0)
    assert (group.version, group.oldest, group.newest_number) == (PolicyVersion(0, 3), PolicyVersion(0, 2), 3)
    assert (group.trained_number, group.samples, group.tokens, group.reward) == (3, 2, 40, 0.5)
    assert (group.issued_s, group.finished_s, group.leased_s, group.trained_s) == (101, 102, 103, 104)
    assert (group.started_s, group.generated_s, group.dropped_s) == (102 - 0.75, 102 - 0.5, None)
    assert (found.version, found.served) == (PolicyVersion(0, 3), {PolicyVersion(0, 3): 7})
    await journal.write([Covered(4)])
    found = journal.recover()
    assert (found.groups, found.issued, found.trained, found.final, found.covered_step) == ([], 1, 1, 1, 4)
    await journal.close()


async def test_a_rollback_queues_what_was_trained_later_and_all_leases_in_the_order_of_issue(tmp_path):
    journal = Journal(tmp_path)
    await journal.write(issued(1, 6))
    for uid in ("4", "2", "1", "3", "5"):
        await journal.write([Finished(payload(uid))])
    await journal.write([Leased(["1"], 1), Trained(["1"], 1), Covered(1)])
    await journal.write([Leased(["2"], 2), Trained(["2"], 2), Leased(["3"], 3), Trained(["3"], 3), Leased(["4"], 4)])
    assert steps(journal.recover()) == {2: ["2"], 3: ["3"], 4: ["4"]}
    await journal.rollback(2)
    expected = {"2": "trained", "3": "queued", "4": "queued", "5": "queued", "6": "in_flight"}
    assert list(states(journal.recover()).items()) == list(expected.items())
    assert_payloads(journal, journal.recover())
    with pytest.raises(JournalError, match="cannot go back to step 0"):
        await journal.rollback(0)
    await journal.close()


async def test_segments_are_deleted_once_they_hold_only_final_and_dropped_groups(tmp_path):
    journal = Journal(tmp_path, segment_bytes=1)  # a segment per payload
    segments = lambda: sorted(int(path.stem) for path in (tmp_path / "spool").glob("*.seg"))
    await journal.write(issued(1, 4))
    for seq in range(1, 5):
        await journal.write([Finished(payload(str(seq)))])
    await journal.write([Leased(["1", "2"], 1), Trained(["1", "2"], 1), Dropped("3", "overdue")])
    assert segments() == [1, 2, 3, 4]
    await journal.write([Covered(1)])
    assert segments() == [4]
    await journal.close()


async def test_the_newest_snapshot_of_a_group_in_flight_survives_and_ends_with_its_flight(tmp_path):
    journal = Journal(tmp_path)
    await journal.write(issued(1, 2))
    await journal.write([Partial("1", b"old"), Partial("2", b"two")])
    await journal.write([Partial("1", b"new")])
    await journal.close()
    journal = Journal(tmp_path)
    partials = journal.recover().partials
    assert {uid: journal.read(place) for uid, place in partials.items()} == {"1": b"new", "2": b"two"}
    await journal.write([Finished(payload("1"))])
    await journal.write([Partial("1", b"late"), Dropped("2", "failed")])
    assert journal.recover().partials == {}
    await journal.close()


async def test_a_group_in_flight_may_start_anew_under_another_version(tmp_path):
    journal = Journal(tmp_path)
    await journal.write(issued(1, 1, V0))
    await journal.write(issued(1, 1, PolicyVersion(1, 5)))
    found = journal.recover()
    assert (found.issued, found.groups[0].version) == (1, PolicyVersion(1, 5))
    await journal.close()


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Issued("9", "p", 0, 9, V0), "group 9 has seq 9, expected 5"),
        (Issued("2", "p", 0, 5, V0), "group 2 was issued before, as number 2, and is queued"),
        (Finished(payload("2")), "group 2 is queued, expected in_flight"),
        (Dropped("7", "failed"), "group 7 is not under way, expected in_flight or queued or leased"),
        (Leased(["1"], 3), "group 1 is dropped, expected queued"),
        (Leased(["2"], 0), "step 0 is covered"),
        (Trained(["3"], 4), "group 3 is leased to step 3, not to step 4"),
        (Released(["4"]), "group 4 is trained, expected leased"),
        (Published(V0, 0), "version 0.0 comes after 0.0"),
    ],
)
async def test_an_event_that_does_not_fit_fails_its_own_call_as_a_whole_and_no_other(tmp_path, event, message):
    journal = Journal(tmp_path)
    setup = [Finished(payload(str(seq))) for seq in (2, 3, 4)]
    await journal.write([Published(V0, 0), *issued(1, 4), *setup, Leased(["3", "4"], 3), Trained(["4"], 3)])
    before = states(journal.recover())
    calls = journal.write([Dropped("1", "failed"), event]), journal.write([Leased(["2"], 3)])
    bad, good = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(bad, JournalError)
    assert message in str(bad)
    assert good is None
    assert states(journal.recover()) == before | {"2": "leased"}
    await journal.close()


def test_what_is_not_a_group_cannot_be_finished():
    with pytest.raises(ValueError, match="not a group"):
        Finished(b"junk" * 9)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_oldest_and_newest_version_are_those_of_trained_tokens(data):
    samples = []
    for index in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(0, 8))
        starts = sorted({0, *data.draw(st.lists(st.integers(1, 8), max_size=3))} & set(range(max(length, 1))))
        spans = [(start, data.draw(st.integers(0, 3))) for start in starts if length]
        mask = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
        samples.append(sample(index, length, spans, mask))
    group = Group.from_samples("u", "p", 0, np.ones(1, np.int32), samples)
    numbers = [
        max(span for span in s.spans if span.start <= at).version
        for s in samples
        for at in range(len(s.tokens))
        if s.loss_mask[at]
    ]
    assert trained_versions(group) == ((min(numbers), max(numbers)) if numbers else None)


# -- the journal against a plain model ---------------------------------------------------------------------------------


class Model:
    """What the journal should know, as plain values."""

    def __init__(self) -> None:
        self.groups: dict[str, list] = {}  # uid → [state, step], in the order of issue
        self.dropped: Counter[str] = Counter()
        self.partials: dict[str, bytes] = {}
        self.covered = 0
        self.version = -1

    def some(self, state: str, seed: int) -> list[str]:
        uids = [uid for uid, (s, _) in self.groups.items() if s == state]
        return uids[: 1 + seed % 3] if seed % 2 else uids[-1 - seed % 3 :]

    def event(self, kind: int, seed: int) -> list:
        """The next events of a kind, applied to the model too."""
        groups = self.groups
        if kind == 0:
            events = issued(len(groups) + 1, 1 + seed % 3)
            groups |= {event.uid: ["in_flight", None] for event in events}
            return events
        if kind in (1, 2):
            uids = self.some("in_flight", seed)
            for uid in uids:
                groups[uid][0] = "queued"
                self.partials.pop(uid, None)
            return [Finished(payload(uid)) for uid in uids]
        if kind == 3:
            uids = self.some(("in_flight", "queued", "leased")[seed % 3], seed)[:1]
            for uid in uids:
                groups[uid] = ["dropped", None]
                self.dropped[f"r{seed % 2}"] += 1
                self.partials.pop(uid, None)
            return [Dropped(uid, f"r{seed % 2}") for uid in uids]
        if kind == 4:
            step, uids = self.covered + 1 + seed % 4, self.some("queued", seed)
            groups |= {uid: ["leased", step] for uid in uids}
            return [Leased(uids, step)]
        if kind == 5:
            uids = self.some("leased", seed)[:1]
            for uid in uids:
                groups[uid][0] = "trained"
            return [Trained([uid], groups[uid][1]) for uid in uids if groups[uid][1] > self.covered]
        if kind == 6:
            uids = self.some("leased", seed)
            groups |= {uid: ["queued", None] for uid in uids}
            return [Released(uids)]
        if kind == 7:
            held = [step for state, step in groups.values() if state == "leased"]
            self.covered = max(self.covered, min([self.covered + seed % 3, *[step - 1 for step in held]]))
            for group in groups.values():
                if group[0] == "trained" and group[1] <= self.covered:
                    group[0] = "final"
            return [Covered(self.covered)]
        if kind == 8:
            step = self.covered + seed % 3
            for group in groups.values():
                if group[0] == "leased" or (group[0] == "trained" and group[1] > step):
                    group[:] = ["queued", None]
            return [RolledBack(step)]
        if kind == 9:
            self.version += 1
            return [Published(PolicyVersion(0, self.version), 0)]
        uids = self.some("in_flight", seed)
        self.partials |= {uid: b"%d" % seed for uid in uids}
        return [Partial(uid, b"%d" % seed) for uid in uids]

    def check(self, journal: Journal) -> None:
        found = journal.recover()
        alive = {uid: tuple(g) for uid, g in self.groups.items() if g[0] not in ("final", "dropped")}
        assert [(g.uid, (g.state, g.step)) for g in found.groups] == list(alive.items())
        assert found.issued == len(self.groups)
        assert found.final == sum(g[0] == "final" for g in self.groups.values())
        assert found.dropped == self.dropped
        assert {uid: journal.read(place) for uid, place in found.partials.items()} == self.partials
        assert found.version == (PolicyVersion(0, self.version) if self.version >= 0 else None)
        assert found.covered_step == self.covered
        assert_balanced(found)
        assert_payloads(journal, found)


REOPEN, WAIT = 11, 12


@settings(max_examples=40, deadline=None)
@given(plan=st.lists(st.tuples(st.integers(0, WAIT), st.integers(0, 5)), min_size=10, max_size=60))
def test_the_journal_equals_a_plain_model_over_random_events_and_reopenings(tmp_path_factory, plan):
    folder = tmp_path_factory.mktemp("run")

    async def history() -> None:
        model, journal = Model(), Journal(folder, segment_bytes=3000)
        calls: list = []
        for kind, seed in plan:
            if kind in (REOPEN, WAIT):  # until then calls pile up and share commits
                await asyncio.gather(*calls)
                calls = []
                if kind == REOPEN:
                    await journal.close()
                    journal = Journal(folder, segment_bytes=3000)
                model.check(journal)
            else:
                calls.append(asyncio.ensure_future(journal.write(model.event(kind, seed))))
        await asyncio.gather(*calls)
        model.check(journal)
        await journal.close()

    asyncio.run(history())


async def test_many_concurrent_writers_share_few_commits(tmp_path):
    journal = Journal(tmp_path)
    await journal.write(issued(1, 200))
    before = journal.stats()
    await asyncio.gather(*(journal.write([Finished(payload(str(seq)))]) for seq in range(1, 201)))
    after = journal.stats()
    assert after.writes - before.writes == 200
    assert after.commits - before.commits <= 20
    assert after.payload_bytes == 200 * len(payload("100"))  # header padding makes all of them equally long
    assert after.cpu_s > before.cpu_s
    await journal.close()


async def test_another_client_reads_while_the_journal_writes(tmp_path):
    journal = Journal(tmp_path)
    client = sqlite3.connect(tmp_path / "ledger.sqlite")
    for seq in range(1, 30):
        await journal.write([*issued(seq, 1), Finished(payload(str(seq)))])
        assert client.execute("SELECT COUNT(*), SUM(tokens) FROM groups").fetchone() == (seq, seq * 40)
    client.close()
    await journal.close()


# -- kills -------------------------------------------------------------------------------------------------------------


async def work(folder: Path, acknowledge, disk: Disk | None = None) -> None:
    """Resume, then train step after step in threes; tell every acknowledged transition as (verb, step, uids)."""
    journal = Journal(folder, segment_bytes=20_000, disk=disk)
    found = journal.recover()
    await journal.rollback(found.covered_step)
    acknowledge("rollback", found.covered_step, [])
    for uid in [group.uid for group in found.groups if group.state == "in_flight"]:
        await journal.write([Dropped(uid, "killed")])
    queued = [group.uid for group in journal.recover().groups]
    number = found.version.number if found.version else -1
    issue, step = found.issued, found.covered_step
    while True:
        uids = [str(issue + i) for i in (1, 2, 3)]
        await journal.write(issued(issue + 1, 3))
        acknowledge("issued", step, uids)
        issue += 3

        async def finish(uid: str) -> None:
            await journal.write([Finished(payload(uid))])
            acknowledge("finished", 0, [uid])

        await asyncio.gather(*map(finish, uids))
        queued, step, number = queued + uids, step + 1, number + 1
        lease, queued = queued[:3], queued[3:]
        await journal.write([Leased(lease, step)])
        acknowledge("leased", step, lease)
        await journal.write([Trained(lease, step), Published(PolicyVersion(0, number), 3 * step)])
        acknowledge("trained", step, lease)
        if step % 3 == 0:
            await journal.write([Covered(step)])
            acknowledge("covered", step, [])


RANK = {"in_flight": 0, "queued": 1, "leased": 2, "trained": 3}
REACHED = {"issued": 0, "finished": 1, "leased": 2, "trained": 3}


def check_after_kill(folder: Path, told: list[tuple[str, int, list[str]]], before: Recovered | None) -> Recovered:
    """All that was told is there, writes are whole, the balance closes, every payload can be read."""

    async def inspect() -> Recovered:
        journal = Journal(folder, segment_bytes=20_000)
        found = journal.recover()
        assert_balanced(found)
        assert_payloads(journal, found)
        await journal.close()
        return found

    found = asyncio.run(inspect())
    state = states(found)
    covered = max((step for verb, step, _ in told if verb == "covered"), default=0)
    assert found.covered_step >= covered
    for verb, _, uids in told:
        for uid in uids:
            if uid in state:
                assert RANK[state[uid]] >= REACHED[verb], (uid, verb, state[uid])
            else:  # only a covered training ends a life here
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
    """A forked writer on ``folder``; returns what it told before its end by SIGKILL: so many lines and seconds later,
    or its own doing if None."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            tell = lambda verb, step, uids: os.write(writer, f"{verb} {step} {' '.join(uids)}\n".encode())
            asyncio.run(work(folder, tell, disk))
        finally:
            os._exit(99)
    os.close(writer)
    with open(reader) as lines:
        told = []
        if kill_after is not None:
            told = [lines.readline() for _ in range(kill_after[0])]
            time.sleep(kill_after[1])
            os.kill(pid, signal.SIGKILL)
        told += list(lines)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    return [(line.split()[0], int(line.split()[1]), line.split()[2:]) for line in told if line.endswith("\n")]


def test_after_kills_at_random_moments_all_that_was_acknowledged_is_there(tmp_path):
    rng, found = random.Random(0), None
    for _ in range(30):
        told = run_until_killed(tmp_path, (rng.randint(1, 40), rng.uniform(0, 0.003)))
        found = check_after_kill(tmp_path, told, found)
    assert found is not None
    assert found.final > 0


class DyingDisk(Disk):
    """Kills its own process when it comes to one of these moments for the ``count``-th time."""

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
            told = run_until_killed(folder, None, DyingDisk(moment, count))
            before = check_after_kill(folder, told, None)
            check_after_kill(folder, run_until_killed(folder, None, DyingDisk("half write", 3)), before)


# -- disks and files that fail -----------------------------------------------------------------------------------------


async def test_a_full_disk_fails_everyone_who_waits_and_harms_nothing_before(tmp_path):
    disk = FaultyDisk(1_000_000)
    journal = Journal(tmp_path, disk=disk)
    await journal.write([*issued(1, 5), Finished(payload("1"))])
    disk.room_bytes = 100
    calls = [journal.write([Finished(payload(str(seq)))]) for seq in range(2, 6)] + [journal.write([Leased(["1"], 1)])]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(e, JournalError) and "No space left" in str(e) for e in errors[:4])
    assert isinstance(errors[0], JournalError)
    assert isinstance(errors[0].__cause__, OSError)
    assert errors[0].__cause__.errno == errno.ENOSPC
    disk.room_bytes = 1_000_000
    expected = dict.fromkeys("12345", "in_flight") | {"1": "queued"}
    if errors[4] is None:  # it came late enough for a commit of its own, without a payload
        expected["1"] = "leased"
    assert states(journal.recover()) == expected
    await journal.write([Finished(payload("2"))])
    await journal.close()
    journal = Journal(tmp_path)
    assert states(journal.recover()) == expected | {"2": "queued"}
    assert journal.torn is None
    assert_payloads(journal, journal.recover())
    await journal.close()


async def test_a_payload_is_flushed_before_the_ledger_tells_of_it(tmp_path):
    class Witness(Disk):
        seen: tuple[str, ...] = ()

        def sync(self, fd):
            with sqlite3.connect(tmp_path / "ledger.sqlite") as client:
                self.seen += tuple(state for (state,) in client.execute("SELECT state FROM groups"))
            client.close()
            super().sync(fd)

    disk = Witness()
    journal = Journal(tmp_path, disk=disk)
    await journal.write(issued(1, 1))
    await journal.write([Finished(payload("1"))])
    assert disk.seen == ("in_flight",)
    await journal.close()


async def test_a_failed_flush_is_not_acknowledged_and_ends_the_journal_until_it_is_opened_anew(tmp_path):
    disk = FaultyDisk(1_000_000)
    journal = Journal(tmp_path, disk=disk)
    await journal.write(issued(1, 1))
    disk.sync_fails = True
    with pytest.raises(JournalError, match="Input/output error"):
        await journal.write([Finished(payload("1"))])
    disk.sync_fails = False
    with pytest.raises(JournalError, match="an earlier flush failed"):
        await journal.write([Finished(payload("1"))])
    await journal.close()
    journal = Journal(tmp_path)
    assert states(journal.recover()) == {"1": "in_flight"}
    await journal.write([Finished(payload("1"))])
    assert_payloads(journal, journal.recover())
    await journal.close()


def test_a_limit_set_by_the_kernel_is_an_error_to_the_writer_and_all_acknowledged_groups_are_there(tmp_path):
    async def until_full() -> int:
        journal = Journal(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        seq = 0
        try:
            while True:
                await journal.write([*issued(seq + 1, 1), Finished(payload(str(seq + 1), length=2000))])
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
        journal = Journal(folder)
        found = journal.recover()
        assert_balanced(found)
        assert_payloads(journal, found)
        await journal.close()
        return found

    return asyncio.run(inspect())


def test_a_read_only_folder_is_refused_for_writing(tmp_path):
    def body() -> int:
        os.chmod(tmp_path, 0o555)
        if os.getuid() == 0:
            os.chdir(tmp_path)  # as nobody the way here is closed
            os.setuid(65534)
        try:
            Journal(Path("."))
        except PermissionError:
            return 0
        return 1

    assert in_child(body) == 0
    assert list(tmp_path.iterdir()) == []


async def make_run(folder: Path, groups: int = 200) -> None:
    journal = Journal(folder, {"run": "demo", "groups_per_version": 4})
    version = -1
    for step, first in enumerate(range(1, groups + 1, 4), start=1):
        version += 1
        uids = [str(seq) for seq in range(first, first + 4)]
        start: list[Event] = [
            Published(PolicyVersion(0, version), first - 1),
            *issued(first, 4, PolicyVersion(0, version)),
        ]
        number = max(0, version - step % 3)
        finish = [Finished(payload(uid, ((0, number),), 10 + step, float(int(uid) % 2))) for uid in uids]
        await journal.write(
            [*start, *finish, Dropped(uids[3], "overdue"), Leased(uids[:3], step), Trained(uids[:3], step)]
        )
    await journal.write([Covered(groups // 8), *issued(groups + 1, 2), Finished(payload(str(groups + 1)))])
    await journal.close()


@pytest.mark.parametrize("how", ["damaged page", "damaged header", "not SQLite", "other program", "newer schema"])
async def test_a_damaged_or_foreign_ledger_is_refused_and_left_as_it_is(tmp_path, capsys, how):
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
    expected = {"other program": "something else", "newer schema": schemas}.get(how, "left as it is")
    with pytest.raises(LedgerError, match=expected) as refusal:
        Journal(tmp_path)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == before
    assert command.main([str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


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
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match="in use by another process"):
        Journal(tmp_path)
    await journal.close()
    await Journal(tmp_path).close()


async def test_a_closed_journal_takes_no_events_and_finishes_those_it_has(tmp_path):
    journal = Journal(tmp_path)
    call = asyncio.ensure_future(journal.write(issued(1, 1)))
    await asyncio.sleep(0)
    await journal.close()
    await call
    await journal.close()
    with pytest.raises(JournalError, match="is closed"):
        await journal.write(issued(2, 1))


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
    assert ["trained", "150", "75", "for", "good,", "75", "until", "a", "checkpoint", "covers", "them"] in lines
    assert "balanced: issued = trained" in out
    staleness = {row[0]: int(row[1]) for row in lines if len(row) == 4 and "█" in row[3]}
    assert staleness == {"0": 51, "1": 51, "2": 48}
    assert ["overdue", "50"] in lines
    assert ["tokens", "per", "sample", "trained", "150", "35.5"] in [row[:6] for row in lines]
    assert ["reward", "generated", "201"] in [row[:3] for row in lines]
    assert ["0.49", "147"] in [row[:2] for row in lines] or ["0.49", "196"] in [row[:2] for row in lines]
    assert files == {path.name: path.read_bytes() for path in tmp_path.glob("ledger.sqlite")}


async def test_the_command_reads_a_run_that_goes_on(tmp_path, capsys):
    journal = Journal(tmp_path)
    await journal.write(issued(1, 3))
    assert command.main([str(tmp_path)]) == 0
    assert "balanced" in capsys.readouterr().out
    await journal.write(issued(4, 1))
    await journal.close()


async def test_the_command_says_so_if_a_group_vanished(tmp_path, capsys):
    await make_run(tmp_path, 8)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("DELETE FROM groups WHERE seq = 3")
    db.close()
    assert command.main([str(tmp_path)]) == 1
    assert "NOT BALANCED: 10 groups were issued, 9 are accounted for" in capsys.readouterr().out


def test_the_command_names_a_missing_ledger_in_one_line(tmp_path, capsys):
    assert command.main([str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: no ledger at")
    assert captured.err.count("\n") == 1


async def test_a_copy_on_another_disk_is_of_one_moment_and_can_be_gone_on_from(tmp_path):
    journal = Journal(tmp_path / "local", segment_bytes=2000)
    await journal.write([Published(V0, 0), *issued(1, 3)])
    await journal.write([Finished(payload("1"))])
    await journal.copy_to(tmp_path / "remote")
    await journal.write([Finished(payload("2")), Dropped("3", "late")])
    copy = Journal(tmp_path / "remote")
    assert copy.torn is None
    found = copy.recover()
    assert states(found) == {"1": "queued", "2": "in_flight", "3": "in_flight"}
    assert Group.from_buffer(copy.read(found.groups[0].place)).uid == "1"
    await copy.close()
    await journal.copy_to(tmp_path / "remote")  # in the place of the first
    again = Journal(found_copy(tmp_path / "remote"))
    assert states(again.recover()) == {"1": "queued", "2": "queued"}
    await again.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["local", "remote"]
    assert not (tmp_path / "local/copying").exists()
    await journal.close()


async def test_a_copy_that_cannot_be_written_is_an_error_and_leaves_the_one_before(tmp_path):
    journal = Journal(tmp_path / "local")
    await journal.write([Published(V0, 0), *issued(1, 1)])
    await journal.copy_to(tmp_path / "remote")
    (tmp_path / "remote").rename(tmp_path / "remote.before")  # as a crash between the two renames would
    assert found_copy(tmp_path / "remote") == tmp_path / "remote.before"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        await journal.copy_to(tmp_path / "file/remote")
    await journal.write([Finished(payload("1"))])  # and the journal goes on
    await journal.close()
