"""Interval arithmetic over spans: idle shares within a window::

    activity = Activity()
    activity.add(batch)                                        # every drained batch, in order
    idle = 1 - activity.share(["trainer/step"], since_s, until_s)

An interval is ``(start_s, end_s)``. The functions return, and `intersect`, `clip` and `length` expect, sorted disjoint
intervals, none of them empty.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from asyncrl.observability.telemetry.recorder import Batch, Span

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Joins intervals that overlap or touch; they may come in any order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Intersection of two lists of intervals, in linear time."""
    both: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def clip(intervals: Sequence[Interval], since_s: float, until_s: float) -> list[Interval]:
    """The parts inside the window."""
    first = bisect_left(intervals, since_s, key=_end)
    last = bisect_left(intervals, until_s, key=_start)
    return [
        (max(start, since_s), min(end, until_s))
        for start, end in intervals[first:last]
        if max(start, since_s) < min(end, until_s)
    ]


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered."""
    return math.fsum(end - start for start, end in intervals)


def share(intervals: Sequence[Interval], since_s: float, until_s: float) -> float:
    """Covered fraction of the window, 0 to 1; NaN for an empty window."""
    if until_s <= since_s:
        return math.nan
    return min(1.0, length(clip(intervals, since_s, until_s)) / (until_s - since_s))


class Activity:
    """Intervals of each actor's spans by name, accumulated from drained batches.

    A finished span joins the intervals of its (name, actor). An open span counts up to the drain, until the actor's
    next batch replaces it; so query right after a drain, with ``until_s`` not after its time. The spans of all actors
    must be on one clock.

    `forget` drops what no query needs any more. Memory is bounded without it: at ``max_intervals`` of one (name, actor)
    the older half is dropped. Queries cover the time from ``complete_since_s`` on, before which intervals are missing.
    """

    def __init__(self, max_intervals: int = 20_000) -> None:
        if max_intervals < 2:
            raise ValueError(f"max_intervals must be at least 2, found {max_intervals}")
        self.complete_since_s = -math.inf
        self._max_intervals = max_intervals
        self._closed: dict[str, dict[str, list[Interval]]] = {}  # name → actor → intervals
        self._open: dict[str, list[Span]] = {}  # actor → its open spans at the last drain

    def add(self, batch: Batch) -> None:
        self._open[batch.actor] = batch.open_spans
        arrived: dict[tuple[str, str], list[Interval]] = {}
        for span in batch.spans:
            arrived.setdefault((span.name, span.actor), []).append((span.start_s, span.end_s))
        for (name, actor), new in arrived.items():
            known = self._closed.setdefault(name, {}).setdefault(actor, [])
            # Spans arrive in the order of their ends, so only the tail can overlap new ones.
            tail = bisect_left(known, min(new)[0], key=_end)
            known[tail:] = union(known[tail:] + new)
            if len(known) > self._max_intervals:
                half = len(known) // 2
                self.complete_since_s = max(self.complete_since_s, known[half - 1][1])
                del known[:half]

    def forget(self, before_s: float) -> None:
        """Drops intervals that end before; queries cover the time from there on."""
        for actors in self._closed.values():
            for known in actors.values():
                del known[: bisect_left(known, before_s, key=_end)]
        self.complete_since_s = max(self.complete_since_s, before_s)

    def intervals(
        self, names: Iterable[str], since_s: float, until_s: float, actor: str | None = None
    ) -> list[Interval]:
        """Intervals within the window with at least one active span of these names, on any actor or on ``actor``."""
        wanted = set(names)
        found: list[Interval] = []
        for name in wanted:
            closed = self._closed.get(name, {})
            for known in closed.values() if actor is None else [closed.get(actor, [])]:
                found += clip(known, since_s, until_s)
        opened = self._open.values() if actor is None else [self._open.get(actor, [])]
        still_open = [(span.start_s, span.end_s) for spans in opened for span in spans if span.name in wanted]
        return clip(union(found + still_open), since_s, until_s)

    def share(self, names: Iterable[str], since_s: float, until_s: float, actors: Sequence[str] | None = None) -> float:
        """Fraction of the window that spans of these names cover, 0 to 1; NaN for an empty window.

        Without ``actors``: the time in which at least one actor was active. With them: the mean over these actors,
        with 0 for one that recorded nothing, as for the idle share of a pool.
        """
        names, since_s = list(names), max(since_s, self.complete_since_s)
        if actors is None:
            return share(self.intervals(names, since_s, until_s), since_s, until_s)
        if not actors:
            return math.nan
        shares = [share(self.intervals(names, since_s, until_s, actor), since_s, until_s) for actor in actors]
        return math.fsum(shares) / len(shares)


def _start(interval: Interval) -> float:
    return interval[0]


def _end(interval: Interval) -> float:
    return interval[1]
