"""The clock of this process, in one place, so that a simulation can put a virtual one in its stead."""

from __future__ import annotations

import contextlib
import math
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
    """Seconds to add to another process's `now_s` for this process's. Each call that reads that clock bounds them: the
    reading lies between the call's sending and its answer here. 0 while that fits: processes of one machine share the
    clock, those of others count from their own start."""

    def __init__(self) -> None:
        self._least_s, self._most_s = -math.inf, math.inf

    def observe(self, sent_s: float, read_s: float, answered_s: float) -> float:
        """The offset, given one more call. Bounds that contradict the earlier ones replace them: the process was
        restarted on another machine, or the clocks have drifted apart."""
        least_s, most_s = max(self._least_s, sent_s - read_s), min(self._most_s, answered_s - read_s)
        if least_s > most_s:
            least_s, most_s = sent_s - read_s, answered_s - read_s
        self._least_s, self._most_s = least_s, most_s
        return 0.0 if least_s <= 0.0 <= most_s else (least_s + most_s) / 2


@contextlib.contextmanager
def virtual(clock: Callable[[], float]) -> Iterator[None]:
    """Context in which both functions return ``clock()``."""
    global _virtual
    before, _virtual = _virtual, clock
    try:
        yield
    finally:
        _virtual = before
