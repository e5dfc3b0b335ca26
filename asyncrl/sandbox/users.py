"""Users as whom sandboxes run: as root one of its own for each, else this process's."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from asyncrl.processes.identity import Process

_FIRST, _FALLBACK_FIRST = 1_900_000_000, 64_000  # of users that nobody else has
_COUNT = 1000


class Users:
    """User ids that are given back can be taken again; their processes have ended."""

    def __init__(self) -> None:
        self.own = os.geteuid() == 0
        first = _FIRST if _mapped(_FIRST + _COUNT) else _FALLBACK_FIRST
        self._free = list(range(first + _COUNT - 1, first - 1, -1)) if self.own else []
        self._taken: dict[int, socket.socket] = {}

    def take(self) -> int | None:
        """One that no process of this machine has taken. Raises OSError."""
        while self.own:
            if not self._free:
                raise OSError("no user is left for another sandbox")
            taken = socket.socket(socket.AF_UNIX)  # first: it may fail
            uid = self._free.pop()
            with contextlib.suppress(OSError):  # others have it
                taken.bind(f"\0asyncrl-user-{uid}")
                self._taken[uid] = taken
                return uid
            taken.close()
        return None

    def give_back(self, uid: int | None) -> None:
        if uid is not None:
            self._taken.pop(uid).close()
            self._free.append(uid)

    def end_processes(self, uid: int, within_s: float) -> bool:
        """Kill all processes of a user that was taken; False if some are still there after that time."""
        assert uid in self._taken, uid
        until = time.monotonic() + within_s
        while found := [process for name in os.listdir("/proc") if (process := _process_of(name, uid))]:
            for process in found:
                process.kill()
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True


def _process_of(name: str, uid: int) -> Process | None:
    """A process of the user, of an entry of /proc; None if it has ended."""
    with contextlib.suppress(OSError):
        if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
            process = Process.of(int(name))
            return process if os.stat(f"/proc/{name}").st_uid == uid else None
    return None


def _mapped(uid: int) -> bool:
    """True if this process may become the user; a container may have few."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= uid < first + count for first, _, count in ranges)
