"""Records of a queue for tests that are not about durability: the real lives of groups, kept in memory.

A queue built anew over the same records has what a restarted process would find."""

import asyncio
from collections import Counter

from asyncrl.sample_queue.ledger import Recovered
from asyncrl.sample_queue.life import DROPPED, TRAINED, Changes, Lives, RolledBack
from asyncrl.sample_queue.spool import Place


class InMemoryRecords:
    """In place of `asyncrl.sample_queue.journal.Journal`: what is written is durable at once."""

    def __init__(self) -> None:
        self.lives = Lives()
        self.ended: dict[str, tuple[str, str | None]] = {}  # dropped or trained for good: (state, reason)
        self.trained_at_publish = 0
        self.last_uid: str | None = None
        self.meta: dict = {}
        self._payloads: dict[Place, bytes] = {}

    async def write(self, events) -> None:
        self._apply(events)
        await asyncio.sleep(0)

    async def rollback(self, step: int) -> None:
        self._apply([RolledBack(step)])

    def recover(self) -> Recovered:
        groups = sorted(self.lives.groups.values())
        trained = sum(g.state == TRAINED for g in groups)
        final = sum(state == TRAINED for state, _ in self.ended.values())
        return Recovered(
            groups=groups,
            issued=self.lives.issued,
            trained=trained + final,
            final=final,
            dropped=dict(Counter(reason for state, reason in self.ended.values() if state == DROPPED)),
            version=self.lives.version,
            trained_at_publish=self.trained_at_publish,
            covered_step=self.lives.covered_step,
            partials={uid: place for uid, place in self.lives.partials.items() if place is not None},
            last_uid=self.last_uid,
            served=bool(self.meta.get("served", 1)),
            closed=self.meta.get("closed") or None,
        )

    def read(self, place: Place) -> bytes:
        return self._payloads[place]

    def states(self, uids) -> dict[str, str]:
        live = {uid: self.lives.groups[uid].state for uid in uids if uid in self.lives.groups}
        return live | {uid: self.ended[uid][0] for uid in uids if uid in self.ended}

    def _apply(self, events) -> None:
        changes: Changes = self.lives.stage(events, 0.0)
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
            if group.state == DROPPED or group.final:
                self.ended[uid] = (group.state, group.reason)
        if changes.versions:
            self.trained_at_publish = changes.versions[-1].trained
        self.meta |= changes.meta

    def _keep(self, record) -> Place:
        place = Place(1, len(self._payloads), len(record.payload))
        self._payloads[place] = bytes(record.payload)
        return place

