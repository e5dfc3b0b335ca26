"""Groups in flight: their progress, its snapshots in the queue, and their recovery by the next rollouter."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.limiter import GroupPlaces
from asyncrl.rollouter.partial import PartialSample, Position, pack, unpack
from asyncrl.sample_queue.messages import InFlight, Snapshot

_WASTE = 2  # a snapshot whose parts have this many times the bytes of a whole one is replaced by a whole one
_SMALL_BYTES = 16 * 1024  # unless they are this small
_PACK_S = 300e-6  # to look at a group, and store what is new
_SHARE = 0.05  # of this process, for that


@dataclass(eq=False)
class StoredSnapshot:
    """What the queue has of a group: ``parts``, with ``size`` bytes, up to these positions of its samples."""

    positions: Sequence[Position]
    parts: int = 0
    size: int = 0

    def added(self, part: Snapshot, positions: Sequence[Position]) -> None:
        self.positions, self.parts = positions, part.part + 1
        self.size = len(part.data) + (self.size if part.part else 0)


@dataclass(eq=False)
class InFlightGroup:
    """A group that was issued and is not finished. Samples that were just recovered are ``stored`` already, but the
    next snapshot is whole."""

    samples: list[PartialSample]
    places: GroupPlaces
    task: asyncio.Task[None] | None = None
    stored: StoredSnapshot = field(init=False)

    def __post_init__(self) -> None:
        self.stored = StoredSnapshot(self.positions)

    @property
    def positions(self) -> list[Position]:
        return [s.position for s in self.samples]

    def restart(self, attempt: int) -> None:
        """Discard all progress; the next snapshot is whole."""
        for sample in self.samples:
            sample.restart(attempt)
        self.stored = StoredSnapshot(self.stored.positions)

    def next_part(self, uid: str) -> Snapshot:
        """What the queue does not have yet, or the whole snapshot if that saves space."""
        stored = self.stored
        if stored.size > max(_SMALL_BYTES, _WASTE * sum(s.size for s in self.samples)):
            stored.parts = 0
        data = pack(uid, self.samples, stored.positions if stored.parts else None)
        return Snapshot(uid, self.samples[0].attempt, stored.parts, data)


class SnapshotStore(Protocol):
    async def snapshot(self, parts: Sequence[Snapshot]) -> None:
        """Store parts of snapshots; those of groups not in flight are ignored."""


class Snapshotter:
    """Stores snapshots of changed groups every ``interval_s``, and less often if there are so many that this would take
    more than a small share of the time; ``groups`` is the live table, by uid."""

    def __init__(self, groups: Mapping[str, InFlightGroup], store: SnapshotStore, interval_s: float) -> None:
        self._groups, self._store, self._interval_s = groups, store, interval_s
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Store snapshots until cancelled, or until `finish`."""
        self._running = asyncio.current_task()
        while True:
            interval_s, began_s = max(self._interval_s, len(self._groups) * _PACK_S / _SHARE), now_s()
            await self.store_changed()
            await asyncio.sleep(max(0.0, began_s + interval_s - now_s()))

    async def finish(self) -> None:
        """Stop ``run`` and store the final snapshots."""
        if self._running is not None:
            self._running.cancel()
        await self.store_changed()

    async def store_changed(self) -> None:
        """A part that was sent without an answer is sent again, with what is new since: it replaces the first. Groups
        that are being cancelled are left out: their samples discard what the next rollouter goes on with."""
        sent: list[tuple[StoredSnapshot, Snapshot, list[Position]]] = []
        for uid, group in list(self._groups.items()):
            if group.task is not None and group.task.cancelling():
                continue
            if (positions := group.positions) != group.stored.positions:
                sent.append((group.stored, group.next_part(uid), positions))
                await asyncio.sleep(0)  # packing many groups must not delay tasks that wait for tokens
        if sent:
            await self._store.snapshot([part for _, part, _ in sent])
            for stored, part, positions in sent:
                stored.added(part, positions)


def recovered_samples(item: InFlight, n: int, deterministic: bool, recorder: Recorder) -> list[PartialSample]:
    """The ``n`` samples of a group that an earlier rollouter had in flight.

    Restores the snapshot if it matches ``n`` and the attempt. Deterministic mode always restarts, since prefill and
    decode differ bitwise."""
    fresh = [PartialSample(attempt=item.attempt) for _ in range(n)]
    samples = unpack(item.snapshot) if item.snapshot else fresh
    matches = len(samples) == n and all(s.attempt == item.attempt for s in samples)
    if deterministic or not matches:
        recorder.count("rollout/restarted_samples", sum(s.started for s in samples))
        samples = fresh
    recorder.count("rollout/recovered_groups")
    recorder.count("rollout/recovered_tokens", sum(s.token_count for s in samples))
    return samples
