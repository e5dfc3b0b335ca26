"""CPU scheduling of a run's processes on shared cores: trainer ranks first.

Needs Linux. Elsewhere, and in a sandbox that forbids these calls, it has no effect; nothing depends on it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_NICENESS = 10  # added for a low-priority thread: it gets about a tenth of a contended core


def never_interrupt() -> None:
    """Keep this process's threads from preempting running threads when they wake up (SCHED_BATCH). A woken thread takes
    a core that is free or runs only ``idle`` threads; otherwise it waits some milliseconds for its turn. Threads and
    processes that it starts inherit this."""
    if sys.platform != "linux":
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(int(thread)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def give_way(priority: str) -> None:
    """Lower this thread's priority, and that of threads it starts. ``normal`` changes nothing; ``low`` leaves it about
    a tenth of a contended core; ``idle`` leaves it next to nothing, and Linux treats a core with only such threads as
    free. Leaving ``idle`` again takes a privilege."""
    if priority == "normal" or sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        if priority == "idle":
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
