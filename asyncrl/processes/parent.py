"""How the lives of parents and children are tied: children end with their parent, orphans get a new one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal ``by`` when its parent ends, however that happens. With ``parent``,
    the pid that started it, exit at once if that process has already ended. No effect outside Linux."""
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, by)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none leaves the tree below this process,
    whatever sessions and double forks it makes. Linux only."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
