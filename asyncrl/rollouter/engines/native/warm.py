"""Warm prefixes: the KV of finished turns in memory of its own, where a sample's next turn finds it.

A next turn continues the tokens of an earlier one, so it prefills only what came after them. The slot itself is taken
by another request meanwhile, while a tool runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncrl.rollouter.engines.native.kv import SlotKV


@dataclass(eq=False)
class WarmPrefix:
    """KV of ``tokens`` (int32 [L]) of a finished request of ``group``; ``kv`` holds all of them, and the draft's of the
    first ``drafted``. ``mixed_kv``: computed under an older version than the current one."""

    group: str
    tokens: np.ndarray
    kv: SlotKV
    drafted: int = 0
    mixed_kv: bool = False


class Match(NamedTuple):
    prefix: WarmPrefix
    tokens: int  # that it shares with a request


class WarmPrefixes:
    """At most ``limit`` bytes of them; the least recently used ones are dropped first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.nbytes = limit, 0
        self._groups: dict[str, list[WarmPrefix]] = {}
        self._by_use: dict[WarmPrefix, None] = {}  # least recently used first

    def keep(self, prefix: WarmPrefix) -> None:
        """Add a prefix, in place of those that it continues, with a copy of its KV. One larger than the limit is not
        kept."""
        if prefix.kv.nbytes > self.limit:
            return
        for other in list(self._groups.get(prefix.group, ())):
            if _common(other.tokens, prefix.tokens) == len(other.tokens):
                self._drop(other)
        while self.nbytes + prefix.kv.nbytes > self.limit:
            self._drop(next(iter(self._by_use)))
        prefix.kv = prefix.kv.copy()
        self.nbytes += prefix.kv.nbytes
        self._groups.setdefault(prefix.group, []).append(prefix)
        self._by_use[prefix] = None

    def longest(self, group: str, tokens: np.ndarray) -> Match | None:
        """The group's prefix that shares most of ``tokens``; None without a token shared."""
        matches = (Match(prefix, _common(prefix.tokens, tokens)) for prefix in self._groups.get(group, ()))
        best = max(matches, key=lambda match: match.tokens, default=None)
        return best if best is not None and best.tokens else None

    def used(self, prefix: WarmPrefix) -> None:
        del self._by_use[prefix]
        self._by_use[prefix] = None

    def mix(self) -> None:
        """The version has changed, and KV is kept."""
        for prefix in self._by_use:
            prefix.mixed_kv = True

    def clear(self) -> int:
        """Drop all; returns their bytes."""
        freed, self.nbytes = self.nbytes, 0
        self._groups.clear()
        self._by_use.clear()
        return freed

    def _drop(self, prefix: WarmPrefix) -> None:
        del self._by_use[prefix]
        self.nbytes -= prefix.kv.nbytes
        group = self._groups[prefix.group]
        group.remove(prefix)
        if not group:
            del self._groups[prefix.group]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading elements that are equal."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
