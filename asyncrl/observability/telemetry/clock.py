"""The clock of this process, in one place, so that a simulation can put a virtual one in its stead."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_virtual: Callable[[], float] | None = None


def now_s() -> float:
    """Seconds of the node's monotonic clock, which all its processes share."""
    return time.monotonic() if _virtual is None else _virtual()


def unix_s() -> float:
    """Seconds since 1970, for people and for other machines."""
    return time.time() if _virtual is None else _virtual()


class ClockOffset:
    """Seconds to add to another process's `now_s` for this process's. A call that reads that clock bounds them: the
    reading lies between the call's sending and its answer here. They stay as they are while they fit: 0 for processes
    of this machine, which share the clock; those of others count from their own start."""

    def __init__(self) -> None:
        self._offset_s = 0.0

    def observe(self, sent_s: float, read_s: float, answered_s: float) -> float:
        """The offset, given one more call; as exact as the fastest one was fast, until the clocks drift apart."""
        self._offset_s = min(max(self._offset_s, sent_s - read_s), answered_s - read_s)
        return self._offset_s


@contextlib.contextmanager
def virtual(clock: Callable[[], float]) -> Iterator[None]:
    """Context in which both functions return ``clock()``."""
    global _virtual
    before, _virtual = _virtual, clock
    try:
        yield
    finally:
        _virtual = before
