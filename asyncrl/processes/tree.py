"""The processes below this one, read from /proc. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_KEEN_S = 1.0  # after that, what still lives waits for a device and needs no hurry
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):  # not a dataclass, whose module would take most of a keeper's start
    """``cpu_s``: CPU time of the process, and of its children that have ended."""

    pid: int
    parent: int
    cpu_s: float


def descendants(pid: int) -> list[Process]:
    """The processes below ``pid``, without itself; those that have ended and whose parent does not know yet count."""
    return list(_below(pid, _processes()))


def pids_below(pid: int) -> list[int]:
    """The pids below ``pid``, without itself. The cost grows with that tree, not with all that the machine runs, but a
    process may be missed while its siblings start or end."""
    if not os.path.exists("/proc/thread-self/children"):  # the kernel has it only if configured so
        return [process.pid for process in descendants(pid)]
    found = [pid]
    for parent in found:  # which grows meanwhile
        found += _children(parent)
    return found[1:]


def kill_descendants() -> dict[int, int]:
    """Kill all processes below this one, which must have called `asyncrl.processes.parent.adopt_orphans`; returns when
    none is left. Returns pid → wait status of those that ended as children of this one."""
    me, statuses = os.getpid(), {}
    keen_until = time.monotonic() + _KEEN_S
    while True:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[ended[0]] = ended[1]
        except ChildProcessError:  # no child, and every orphan becomes one: nothing is left
            return statuses
        found = []
        for process in _processes():
            if process.parent == me:
                _kill(process)  # at once: one that forks and ends, again and again, is gone after the loop
            found.append(process)
        for process in _below(me, found):
            _kill(process)
        time.sleep(0.001 if time.monotonic() < keen_until else 0.1)


def _processes() -> Iterator[Process]:
    """All processes of the machine, the newest first."""
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read(4096).rpartition(b")")[2].split()  # the name, in parentheses, may contain anything
            yield Process(pid, int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_S)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                found += map(int, file.readall().split())
    return found


def _below(pid: int, found: Iterable[Process]) -> Iterator[Process]:
    children: dict[int, list[Process]] = {}
    for process in found:
        children.setdefault(process.parent, []).append(process)
    parents = [pid]
    while parents:
        for child in children.pop(parents.pop(), ()):
            parents.append(child.pid)
            yield child


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def freeze(pid: int) -> list[int]:
    """Stop all processes below ``pid``, without itself, and those that they start meanwhile; returns their pids. What
    is stopped starts no others but still counts, so that with a limit on their number even a fork bomb comes to rest.
    Gives up after a second."""
    stopped: list[int] = []
    until = time.monotonic() + _KEEN_S
    while time.monotonic() < until:
        found = [process.pid for process in descendants(pid) if process.pid not in stopped]
        if not found:
            break
        for new in found:
            with contextlib.suppress(OSError):
                os.kill(new, signal.SIGSTOP)
        stopped += found
    return stopped
