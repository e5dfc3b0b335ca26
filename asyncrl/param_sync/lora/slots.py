"""Adapter slots under pause mode ``keep``: running requests finish on their adapter while new ones use the latest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from asyncrl.types.versions import PolicyVersion


class AdapterSlots:
    """Tracks the adapter of each request, and when an old one may be freed. One slot per published version::

        v1 ── requests end ──► empty, freeable    requests keep adapter, KV cache and version to their end
        v2 ──►                                    new requests begin here

    Every sample thus has one version and nothing is recomputed; at most ``capacity`` adapters stay loaded. Slot ids
    start at 1 and are never reused, so caches may be keyed by them. Requests are any hashable ids.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 2:
            raise ValueError(
                f"expected room for at least 2 adapters, since a new one is loaded beside the old; found {capacity}"
            )
        self._capacity = capacity
        self._versions: dict[int, PolicyVersion] = {}  # by slot, the newest last
        self._slot_of: dict[Hashable, int] = {}  # by request
        self._newest = 0

    @property
    def newest(self) -> int:
        """The slot of the latest version, 0 before the first."""
        return self._newest

    def publish(self, version: PolicyVersion) -> int:
        """Assign a slot to a version; later requests begin on it. Frees idle slots if none is left. Raises ValueError
        for an older version and RuntimeError if requests hold all slots."""
        if self._newest and version < self._versions[self._newest]:
            raise ValueError(f"version {version} is older than {self._versions[self._newest]}, published before it")
        if len(self._versions) == self._capacity:
            self.free_idle()
        if len(self._versions) == self._capacity:
            held = ", ".join(f"{self._versions[slot]} ({n} requests)" for slot, n in self.counts().items())
            raise RuntimeError(f"no adapter slot for version {version}: {held} hold all {self._capacity}")
        self._newest += 1
        self._versions[self._newest] = version
        return self._newest

    def begin(self, request: Hashable) -> int:
        """Start a request on the newest version. Returns its slot."""
        if not self._newest:
            raise ValueError(f"request {request} began before a first version was published; publish one")
        if request in self._slot_of:
            raise ValueError(f"request {request} began a second time, it still runs on slot {self._slot_of[request]}")
        self._slot_of[request] = self._newest
        return self._newest

    def end(self, request: Hashable) -> None:
        """Raises KeyError for a request that is not running."""
        del self._slot_of[request]

    def counts(self) -> dict[int, int]:
        """Running requests by slot, the newest slot last."""
        running = Counter(self._slot_of.values())
        return {slot: running[slot] for slot in self._versions}

    def free_idle(self) -> list[int]:
        """Free the slots without requests, except the newest; the engine may unload their adapters. Returns the slots
        that stay."""
        for slot, count in self.counts().items():
            if not count and slot != self._newest:
                del self._versions[slot]
        return list(self._versions)
