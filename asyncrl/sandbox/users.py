"""Users as whom sandboxes run: as root one of its own for each, else this process's."""

from __future__ import annotations

import os

_FIRST, _FALLBACK_FIRST = 1_000_000_000, 64_000  # of users that nobody else has
_COUNT = 256  # of a process, which has its own


class Users:
    """User ids that are given back can be taken again; their processes have ended."""

    def __init__(self) -> None:
        self.own = os.geteuid() == 0
        first = _FIRST + os.getpid() * _COUNT
        first = first if _mapped(first + _COUNT) else _FALLBACK_FIRST
        self._free = list(range(first + _COUNT - 1, first - 1, -1)) if self.own else []

    def take(self) -> int | None:
        return self._free.pop() if self.own else None

    def give_back(self, uid: int | None) -> None:
        if uid is not None:
            self._free.append(uid)


def _mapped(uid: int) -> bool:
    """True if this process may become the user; a container may have few."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= uid < first + count for first, _, count in ranges)
