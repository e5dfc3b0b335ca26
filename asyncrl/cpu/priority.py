"""CPU scheduling of a run's processes on shared cores: training ranks first.

Only Linux knows these priorities; elsewhere, and in a sandbox that forbids them, nothing changes, as nothing depends on
them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_NICENESS = 10  # of a thread at low priority, above its process's: about a tenth of a core that is contended


def never_interrupt() -> None:
    """No thread of this process takes a core from one that computes the moment it wakes up: it goes to a core that is
    free, or has nothing but ``idle`` threads, and else waits for its turn, some milliseconds. So do threads and
    processes that these start."""
    if sys.platform != "linux":
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(int(thread)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def give_way(priority: str) -> None:
    """Give this thread, and those that it starts, a ``priority`` below the process's own: at ``low`` it has a tenth
    of a core that others want too, at ``idle`` next to nothing of it, and to Linux a core with nothing but such threads
    is a free one. A thread that became ``idle`` stays so: to come back takes a privilege."""
    if priority == "normal" or sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        if priority == "idle":
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
