"""Identity of a process: its number is reused after its end, but not with the same start time."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process of this machine. ``started``: clock ticks from boot to its start; 0 outside Linux."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this number now. Raises ProcessLookupError."""
        return cls(pid, _started(pid))

    @property
    def alive(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return _started(self.pid) == self.started
        return False

    def kill(self) -> bool:
        """Sends SIGKILL; False if the process has ended. Never hits another process that got its number."""
        try:
            fd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        except ProcessLookupError:
            return False
        try:
            if not self.alive:
                return False
            if fd is None:  # outside Linux
                os.kill(self.pid, signal.SIGKILL)
            else:  # of the process whose start time was just compared
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            if fd is not None:
                os.close(fd)
        return True


@cache
def machine() -> str:
    """Differs between machines, between two boots of one, and between its containers, which number processes on their
    own."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return os.uname().nodename


def _started(pid: int) -> int:
    """Raises ProcessLookupError for a process that has ended, also for one that only awaits its parent."""
    if not Path("/proc/self/stat").exists():
        os.kill(pid, 0)
        return 0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"process {pid} has ended") from None
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[19])
