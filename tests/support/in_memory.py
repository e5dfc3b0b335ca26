"""In-memory records of a queue, for tests that are not about durability, and small groups to put into it.

A queue built over the same records finds what a restarted process would find."""

import asyncio
from collections import Counter

import numpy as np

from asyncrl.sample_queue.messages import Issued
from asyncrl.sample_queue.records import DROPPED, IN_FLIGHT, Changes, GroupRecord, Recovered, VersionRecord
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan


class InMemoryRecords:
    """Stands in for `asyncrl.sample_queue.journal.Journal`; writes are durable at once."""

    failed = False

    def __init__(self) -> None:
        self.groups: dict[str, GroupRecord] = {}  # all ever issued
        self.payloads: dict[str, bytes] = {}
        self._parts: dict[str, tuple[int, list[bytes]]] = {}  # attempt and data of a group's snapshot, by uid
        self.versions: dict[PolicyVersion, VersionRecord] = {}
        self.meta: dict = {}

    async def snapshot(self, parts) -> None:
        for uid, attempt, part, data in parts:
            before = self._parts[uid][1][:part] if part else []
            assert len(before) == part
            self._parts[uid] = attempt, [*before, data]

    def snapshots(self, in_flight=None) -> dict[str, list[bytes]]:
        """Of these groups (uid → attempt), or of all in flight."""
        if in_flight is None:
            in_flight = {uid: group.attempt for uid, group in self.groups.items() if group.state == IN_FLIGHT}
        found = {uid: self._parts[uid] for uid in in_flight if uid in self._parts}
        return {uid: parts for uid, (attempt, parts) in found.items() if attempt == in_flight[uid]}

    def write(self, changes: Changes):
        for uid, group in changes.groups.items():
            if (before := self.groups.get(uid)) is not None:
                assert before.seq == group.seq, f"group {uid} was issued before, as number {before.seq}"
                assert before.state != DROPPED, f"group {uid} was dropped"
                assert not before.final, f"group {uid} is final"
            self.groups[uid] = group
        for uid, record in changes.payloads.items():
            if record is None:
                self.payloads.pop(uid, None)
            else:
                self.payloads[uid] = bytes(record.payload)
        self.versions |= changes.versions
        self.meta |= changes.meta
        return asyncio.sleep(0)

    def recover(self) -> Recovered:
        groups = sorted(self.groups.values(), key=lambda group: group.seq)
        published = {v: row.trained for v, row in sorted(self.versions.items()) if row.published_s is not None}
        oldest = self.meta.get("served_from")
        served_from = PolicyVersion(*map(int, oldest.split("."))) if oldest else None
        return Recovered(
            groups=[group for group in groups if group.state != DROPPED and not group.final],
            issued=len(groups),
            final=sum(group.final for group in groups),
            dropped=Counter(group.reason for group in groups if group.state == DROPPED),
            version=max(published, default=None),
            versions=sorted(self.versions),
            served={v: trained for v, trained in published.items() if served_from and v >= served_from},
            covered_step=self.meta.get("covered_step", 0),
            last_uid=groups[-1].uid if groups else None,
            closed=self.meta.get("closed") or None,
            holder=self.meta.get("holder", 0),
        )

    def read(self, uid: str) -> bytes | None:
        return self.payloads.get(uid)

    def history(self) -> list[Issued]:
        groups = sorted(self.groups.values(), key=lambda group: group.seq)
        return [Issued(group.uid, group.number, group.success) for group in groups]

    def states(self, uids) -> dict[str, str]:
        return {uid: self.groups[uid].state for uid in uids if uid in self.groups}


def payload(uid: str, *versions: int) -> bytes:
    """A group of one sample, with one token per version."""
    count = len(versions)
    s = Sample.single(
        0,
        np.ones(count, np.int32),
        np.zeros(count, np.float32),
        np.ones(count, bool),
        [VersionSpan(i, PolicyVersion(0, version)) for i, version in enumerate(versions)],
        FinishReason.STOP,
        reward=0.0,
    )
    return Group.from_samples(uid, uid, 0, np.ones(1, np.int32), [s]).to_bytes()
