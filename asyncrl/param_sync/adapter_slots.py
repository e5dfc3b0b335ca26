"""Requests in flight when a new adapter comes under pause mode ``keep``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Literal

from asyncrl.sample import PolicyVersion

InFlight = Literal["finish", "reprefill"]


class AdapterSlots:
    """Which adapter each request runs on, and when an old one may be freed. One slot per published version::

        finish      v1 ── requests end ──► empty, freeable    requests keep adapter, KV cache and version to their end
                    v2 ──►                                    new requests begin here
        reprefill   v1 ──► empty, freeable                    all requests move as v2 is published: the engine computes
                    v2 ──►                                    their KV anew under v2, and a new version span begins

    Both keep every token's behaviour logprob that of one version, which new weights over old KV would not. ``finish``
    recomputes nothing, but its requests grow stale and their adapters stay loaded: at most ``capacity`` of them.
    Slot ids start at 1 and are never used again, so caches may be keyed by them. Requests are any hashable ids.
    """

    def __init__(self, policy: InFlight, capacity: int) -> None:
        if policy not in ("finish", "reprefill") or capacity < 2:
            raise ValueError(
                f"adapter_in_flight is finish or reprefill, with room for 2 adapters: the new one is loaded beside the "
                f"old; found {policy!r} and {capacity}"
            )
        self._policy, self._capacity = policy, capacity
        self._versions: dict[int, PolicyVersion] = {}  # by slot, the newest last
        self._slot_of: dict[Hashable, int] = {}  # by request
        self._newest = 0

    def publish(self, version: PolicyVersion) -> tuple[int, list[Hashable]]:
        """Give a version its slot, on which requests begin from now on. Returns it, and the requests that have moved
        to it. Raises ValueError for an older version and RuntimeError if all slots are taken."""
        if self._newest and version < self._versions[self._newest]:
            raise ValueError(f"version {version} is older than {self._versions[self._newest]}, published before it")
        if len(self._versions) == self._capacity:
            held = ", ".join(f"{self._versions[slot]} ({n} requests)" for slot, n in self.counts().items())
            raise RuntimeError(
                f"no adapter slot for version {version}: {held} hold all {self._capacity}; free one first"
            )
        self._newest += 1
        self._versions[self._newest] = version
        moved = list(self._slot_of) if self._policy == "reprefill" else []
        self._slot_of |= dict.fromkeys(moved, self._newest)
        return self._newest, moved

    def begin(self, request: Hashable) -> int:
        """A request starts on the newest version. Returns its slot."""
        if not self._newest:
            raise ValueError(f"request {request} began before a first version was published; publish one")
        if request in self._slot_of:
            raise ValueError(f"request {request} began a second time, it runs on slot {self._slot_of[request]}; end it")
        self._slot_of[request] = self._newest
        return self._newest

    def end(self, request: Hashable) -> None:
        """Raises KeyError for a request that is not running."""
        del self._slot_of[request]

    def running(self, request: Hashable) -> tuple[int, PolicyVersion]:
        """Slot and version that the request runs on. Raises KeyError for one that is not running."""
        slot = self._slot_of[request]
        return slot, self._versions[slot]

    def counts(self) -> dict[int, int]:
        """Running requests by slot, the newest slot last."""
        running = Counter(self._slot_of.values())
        return {slot: running[slot] for slot in self._versions}

    def freeable(self) -> list[int]:
        """Slots without requests, apart from the newest: the engine may unload their adapters, then `free` them."""
        return [slot for slot, count in self.counts().items() if not count and slot != self._newest]

    def free(self, slot: int) -> None:
        """Raises ValueError for a slot that is not `freeable`."""
        if slot not in self.freeable():
            raise ValueError(f"slot {slot} is not one to free, {self.freeable()} are: it is the newest, in use or gone")
        del self._versions[slot]
