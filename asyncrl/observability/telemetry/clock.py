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


@contextlib.contextmanager
def virtual(clock: Callable[[], float]) -> Iterator[None]:
    """Context in which both functions return ``clock()``."""
    global _virtual
    before, _virtual = _virtual, clock
    try:
        yield
    finally:
        _virtual = before
