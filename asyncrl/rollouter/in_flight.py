"""Groups in flight: their progress, its snapshots in the queue, and their recovery by the next rollouter."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.observability.telemetry.recorder import Recorder, now_s
from asyncrl.rollouter.partial import PartialSample, pack, unpack
from asyncrl.sample_queue.messages import InFlight


@dataclass(eq=False)
class InFlightGroup:
    """A group that was issued and is not finished. ``generating`` counts its samples that have not ended;
    ``snapshotted`` holds their revisions in the newest snapshot."""

    samples: list[PartialSample]
    snapshotted: list[tuple[int, int]]
    generating: int = 0
    task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, samples: list[PartialSample]) -> InFlightGroup:
        """A group whose samples are as the queue last stored them."""
        return cls(samples, [s.revision for s in samples])


class SnapshotStore(Protocol):
    async def snapshot(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Replace the snapshots of these (uid, snapshot) groups; those of groups not in flight are ignored."""


class Snapshotter:
    """Stores snapshots of changed groups every ``interval_s``; ``groups`` is the live table, by uid."""

    def __init__(self, groups: Mapping[str, InFlightGroup], store: SnapshotStore, interval_s: float) -> None:
        self._groups, self._store, self._interval_s = groups, store, interval_s
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Store snapshots until cancelled, or until `finish`."""
        self._running = asyncio.current_task()
        while True:
            started_s = now_s()
            await self.store_changed()
            await asyncio.sleep(max(0.0, started_s + self._interval_s - now_s()))

    async def finish(self) -> None:
        """Stop ``run`` and store the final snapshots. Samples may be cancelled after this: without the stop, a later
        snapshot would record their cancelled state."""
        if self._running is not None:
            self._running.cancel()
        await self.store_changed()

    async def store_changed(self) -> None:
        items: list[tuple[str, bytes]] = []
        stored: list[tuple[InFlightGroup, list[tuple[int, int]]]] = []
        for uid, group in list(self._groups.items()):
            revisions = [s.revision for s in group.samples]
            if revisions != group.snapshotted:
                items.append((uid, pack(uid, group.samples)))
                stored.append((group, revisions))
                await asyncio.sleep(0)  # packing many groups must not delay tasks that wait for tokens
        if items:
            await self._store.snapshot(items)
            for group, revisions in stored:
                group.snapshotted = revisions


def recovered_samples(item: InFlight, n: int, deterministic: bool, recorder: Recorder) -> list[PartialSample]:
    """The ``n`` samples of a group that an earlier rollouter had in flight.

    Restores the snapshot if it matches ``n`` and the attempt. Deterministic mode always restarts, since prefill and
    decode differ bitwise."""
    fresh = [PartialSample(attempt=item.attempt) for _ in range(n)]
    samples = fresh if item.snapshot is None else unpack(item.snapshot)
    matches = len(samples) == n and all(s.attempt == item.attempt for s in samples)
    if deterministic or not matches:
        recorder.count("rollout/restarted_samples", sum(s.started for s in samples))
        samples = fresh
    recorder.count("rollout/recovered_groups")
    recorder.count("rollout/recovered_tokens", sum(s.token_count for s in samples))
    return samples
