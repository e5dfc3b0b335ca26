"""Records of a queue in memory: a group is not durable, but everything else is as with a journal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from asyncrl.sample_queue.messages import Issued, Snapshot
from asyncrl.sample_queue.records import (
    DROPPED,
    IN_FLIGHT,
    Changes,
    GroupRecord,
    Recovered,
    VersionRecord,
    holders,
)
from asyncrl.types.versions import PolicyVersion


class InMemoryRecords:
    """Implements `asyncrl.sample_queue.core.Records`. A queue built over the same records finds what a restarted
    process would find. ``flush_s``: how long a write takes."""

    failed = False

    def __init__(self, flush_s: float = 0.0) -> None:
        self._flush_s = flush_s
        self.groups: dict[str, GroupRecord] = {}  # all ever issued
        self.payloads: dict[str, bytes] = {}
        self._parts: dict[str, tuple[int, list[bytes]]] = {}  # attempt and data of a group's snapshot, by uid
        self.versions: dict[PolicyVersion, VersionRecord] = {}
        self.meta: dict[str, Any] = {}

    async def snapshot(self, parts: Sequence[Snapshot]) -> None:
        for uid, attempt, part, data in parts:
            before = self._parts[uid][1][:part] if part else []
            assert len(before) == part
            self._parts[uid] = attempt, [*before, data]

    def snapshots(self, in_flight: Mapping[str, int] | None = None) -> dict[str, list[bytes]]:
        """Of these groups (uid → attempt), or of all in flight."""
        if in_flight is None:
            in_flight = {uid: group.attempt for uid, group in self.groups.items() if group.state == IN_FLIGHT}
        found = {uid: self._parts[uid] for uid in in_flight if uid in self._parts}
        return {uid: parts for uid, (attempt, parts) in found.items() if attempt == in_flight[uid]}

    def write(self, changes: Changes) -> Awaitable[None]:
        for uid, group in changes.groups.items():
            if (before := self.groups.get(uid)) is not None:
                assert before.seq == group.seq, f"group {uid} was issued before, as number {before.seq}"
                assert before.state != DROPPED, f"group {uid} was dropped"
                assert not before.final, f"group {uid} is final"
            self.groups[uid] = group
            if group.state != IN_FLIGHT:
                self._parts.pop(uid, None)
        for uid, record in changes.payloads.items():
            if record is None:
                self.payloads.pop(uid, None)
            else:
                self.payloads[uid] = bytes(record.payload)
        self.versions |= changes.versions
        self.meta |= changes.meta
        return asyncio.sleep(self._flush_s)

    def recover(self) -> Recovered:
        groups = sorted(self.groups.values(), key=lambda group: group.seq)
        published = {v: row.trained for v, row in sorted(self.versions.items()) if row.published_s is not None}
        oldest = self.meta.get("served_from")
        served_from = PolicyVersion(*map(int, oldest.split("."))) if oldest else None
        return Recovered(
            groups=[group for group in groups if group.state != DROPPED and not group.final],
            issued=len(groups),
            final=sum(group.final for group in groups),
            dropped=Counter(str(group.reason) for group in groups if group.state == DROPPED),
            version=max(published, default=None),
            versions=sorted(self.versions),
            served={v: trained for v, trained in published.items() if served_from and v >= served_from},
            covered_step=self.meta.get("covered_step", 0),
            last_uid=groups[-1].uid if groups else None,
            closed=self.meta.get("closed") or None,
            holders=holders(self.meta),
        )

    def read(self, uid: str) -> bytes | None:
        return self.payloads.get(uid)

    def history(self) -> list[Issued]:
        groups = sorted(self.groups.values(), key=lambda group: group.seq)
        success = lambda group: group.success or 0.0 if group.state == DROPPED else group.success
        return [Issued(group.uid, group.number, success(group)) for group in groups]

    def states(self, uids: Sequence[str]) -> dict[str, str]:
        return {uid: self.groups[uid].state for uid in uids if uid in self.groups}
