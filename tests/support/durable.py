"""A group table and its journal, as the queue uses them, with transitions as values."""

import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.sample_queue.group_state import GroupTable
from asyncrl.sample_queue.journal import Journal
from asyncrl.sample_queue.records import Changes, JournalError, Recovered
from asyncrl.sample_queue.versions import VersionTable
from asyncrl.types.groups import Group
from asyncrl.types.versions import PolicyVersion

Transition = Callable[["DurableTable"], None]


class DurableTable:
    """Group table over a journal on disk. ``clock`` is read once per `write`."""

    def __init__(self, folder: Path, meta=None, clock=time.time, **options) -> None:
        self.journal, self._clock, self._now_s = Journal(folder, meta, **options), clock, 0.0
        self.load()

    def load(self) -> None:
        found = self.journal.recover()
        self.changes = Changes()
        self.groups = GroupTable(found, self.changes, lambda: self._now_s)
        self.versions = VersionTable(found, self.changes, lambda: self._now_s)

    async def write(self, *transitions: Transition) -> None:
        """Apply the transitions with one timestamp and wait until they are on disk."""
        self._now_s = self._clock()
        for apply in transitions:
            apply(self)
        try:
            await self.journal.write(self.changes.take())
        except JournalError:
            if self.journal.failed:
                self.load()
            raise

    def recover(self) -> Recovered:
        return self.journal.recover()

    async def close(self) -> None:
        await self.journal.close()


def issue(uid: str, version: PolicyVersion, prompt_id: str = "p") -> Transition:
    return lambda table: table.groups.issue(uid, prompt_id, 0, version)


def finish(payload: bytes) -> Transition:
    return lambda table: table.groups.finish(Group.from_buffer(payload), payload)


def refuse(uid: str, reason: str) -> Transition:
    return lambda table: table.groups.refuse(uid, reason)


def drop(uid: str, reason: str) -> Transition:
    return lambda table: table.groups.drop(uid, reason)


def lease(uids: list[str], step: int) -> Transition:
    return lambda table: table.groups.lease(uids, step)


def train(step: int) -> Transition:
    return lambda table: table.groups.train(step, table.versions.latest)


def release(step: int) -> Transition:
    return lambda table: table.groups.release(step)


def cover(step: int) -> Transition:
    return lambda table: table.groups.cover(step)


def roll_back(step: int) -> Transition:
    return lambda table: table.groups.roll_back(step)


def publish(version: PolicyVersion, trained: int) -> Transition:
    return lambda table: table.versions.publish(version, trained)
