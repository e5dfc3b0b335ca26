"""Records of a queue for tests that are not about durability: the real lives of groups, kept in memory.

A queue built anew over the same records has what a restarted process would find."""

import asyncio
from collections import Counter

from asyncrl.sample import PolicyVersion
from asyncrl.sample_queue.ledger import Recovered
from asyncrl.sample_queue.life import DROPPED, TRAINED, Changes, Lives, RolledBack
from asyncrl.sample_queue.spool import Place


class InMemoryRecords:
    """In place of `asyncrl.sample_queue.journal.Journal`: what is written is durable at once."""

    def __init__(self) -> None:
        self.lives = Lives()
        self.ended: dict[str, str] = {}  # states of the groups that were dropped or trained for good
        self.dropped: Counter[str] = Counter()  # by reason
        self.final = 0
        self.versions: dict[PolicyVersion, int] = {}  # and how many groups were trained at its publish
        self.last_uid: str | None = None
        self.meta: dict = {}
        self._payloads: dict[Place, bytes] = {}

    async def write(self, events) -> None:
        self._apply(events)
        await asyncio.sleep(0)

    async def rollback(self, step: int) -> None:
        await self.write([RolledBack(step)])

    def recover(self) -> Recovered:
        groups = sorted(self.lives.groups.values(), key=lambda group: group.seq)
        oldest = self.meta.get("served_from")
        served_from = PolicyVersion(*map(int, oldest.split("."))) if oldest else None
        return Recovered(
            groups=groups,
            issued=self.lives.issued,
            trained=sum(group.state == TRAINED for group in groups) + self.final,
            final=self.final,
            dropped=dict(self.dropped),
            version=self.lives.version,
            served={v: trained for v, trained in self.versions.items() if served_from and v >= served_from},
            covered_step=self.lives.covered_step,
            partials={uid: place for uid, place in self.lives.partials.items() if place is not None},
            last_uid=self.last_uid,
            closed=self.meta.get("closed") or None,
        )

    def read(self, place: Place) -> bytes:
        return self._payloads[place]

    def states(self, uids) -> dict[str, str]:
        live = {uid: self.lives.groups[uid].state for uid in uids if uid in self.lives.groups}
        return live | {uid: self.ended[uid] for uid in uids if uid in self.ended}

    def _apply(self, events) -> None:
        changes: Changes = self.lives.stage(events, 0.0)
        for uid in changes.groups:
            assert uid not in self.ended, f"group {uid} was {self.ended[uid]}: the ledger has one row for it"
        self.lives.adopt(changes)
        for uid, record in changes.payloads.items():
            placed = changes.groups[uid]._replace(**self._keep(record)._asdict())
            if uid in self.lives.groups:
                self.lives.groups[uid] = placed
        for uid, record in changes.partials.items():
            if record is not None and uid in self.lives.partials:
                self.lives.partials[uid] = self._keep(record)
        for uid, group in changes.groups.items():
            if group.seq == self.lives.issued:
                self.last_uid = uid
            if group.state == DROPPED:
                self.dropped[group.reason or ""] += 1
            self.final += group.final
            if group.state == DROPPED or group.final:
                self.ended[uid] = group.state
        self.versions |= {PolicyVersion(v.lineage, v.number): v.trained for v in changes.versions}
        self.meta |= changes.meta

    def _keep(self, record) -> Place:
        place = Place(1, len(self._payloads), len(record.payload))
        self._payloads[place] = bytes(record.payload)
        return place
