"""Garbage collection of processes in which many small objects live long."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000  # between two collections of young ones; Python's 700 are a few requests
_COLLECTIONS = 20, 100  # of young ones between two of older ones, and of those between two of all


def collect_rarely() -> None:
    """Leave what exists now out of collections, and collect less often.

    A collection looks at all objects of its generation again. A rollouter with thousands of samples in flight, or a
    driver that calls a thousand replicas, has hundreds of thousands, which are freed without it: hardly one is part of
    a cycle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *_COLLECTIONS)
