"""Control groups, version 1 or 2: what binds the memory and the number of processes of a sandbox as a whole."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MIB = 1024 * 1024
_PREFIX = "asyncrl-"  # of names; the pid of the process that made it follows
_names = itertools.count()


@dataclass(frozen=True)
class Cgroup:
    """Folders of one group: that of version 2, or that of each controller of version 1."""

    folders: Mapping[str, str]

    @property
    def joined_by(self) -> Sequence[str]:
        """Files into which a process writes "0" to be in the group, with all that it will start."""
        return [os.path.join(folder, "cgroup.procs") for folder in dict.fromkeys(self.folders.values())]

    def killed_for_memory(self) -> int:
        """Processes of the group that the kernel has killed because it had used up its memory."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError), open(os.path.join(self.folders["memory"], name)) as file:
                found = dict(line.split() for line in file)
                return int(found.get("oom_kill", 0))
        return 0

    def remove(self) -> bool:
        """False if it still has processes."""
        for folder in set(self.folders.values()):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


class Cgroups:
    """Makes groups below that of this process, or beside it: ``version`` 1 or 2, or 0 where that is not allowed.

    ``roots`` and ``membership``: /proc/self/mounts and /proc/self/cgroup."""

    def __init__(self, mounts: str = "/proc/self/mounts", membership: str = "/proc/self/cgroup") -> None:
        self.version, self._parents = 0, {}
        for version, parents in _candidates(mounts, membership):
            self.version, self._parents = version, dict(parents)
            with contextlib.suppress(OSError):
                self.make(memory_mb=64, processes=8).remove()
                return
        self.version, self._parents = 0, {}

    def make(self, memory_mb: int, processes: int) -> Cgroup:
        """A group without processes. Raises OSError."""
        name = f"{_PREFIX}{os.getpid()}-{next(_names)}"
        cgroup = Cgroup({controller: os.path.join(parent, name) for controller, parent in self._parents.items()})
        memory, pids = cgroup.folders["memory"], cgroup.folders["pids"]
        try:
            for folder in dict.fromkeys(cgroup.folders.values()):
                os.mkdir(folder)
            if not all(map(os.path.exists, cgroup.joined_by)):
                raise OSError(f"expected a control group, found a folder: {memory}")
            if self.version == 2:
                _write(memory, "memory.max", memory_mb * _MIB)
                _write(memory, "memory.swap.max", 0, missing_ok=True)
            else:
                _write(memory, "memory.limit_in_bytes", memory_mb * _MIB)
                _write(memory, "memory.memsw.limit_in_bytes", memory_mb * _MIB, missing_ok=True)
            _write(pids, "pids.max", processes)
        except OSError:
            cgroup.remove()
            raise
        return cgroup


def remove_left_behind() -> None:
    """Remove the groups of processes that have been killed."""
    for _, parents in _candidates("/proc/self/mounts", "/proc/self/cgroup"):
        for parent in set(parents.values()):
            for name in os.listdir(parent):
                pid = name.removeprefix(_PREFIX).partition("-")[0]
                if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{pid}"):
                    with contextlib.suppress(OSError):
                        os.rmdir(os.path.join(parent, name))


def _write(folder: str, name: str, value: int, missing_ok: bool = False) -> None:
    path = os.path.join(folder, name)
    if missing_ok and not os.path.exists(path):
        return
    with open(path, "w") as file:
        file.write(str(value))


def _candidates(mounts: str, membership: str) -> list[tuple[int, dict[str, str]]]:
    """(version, controller → folder below which groups may be made)."""
    try:
        with open(mounts) as file:
            mounted = [line.split() for line in file]
        with open(membership) as file:
            own = {names: path for _, names, path in (line.rstrip("\n").split(":", 2) for line in file)}
    except OSError:
        return []
    paths = {name: path for names, path in own.items() for name in names.split(",")}
    found: list[tuple[int, dict[str, str]]] = []
    for _, at, kind, *_ in mounted:
        if kind == "cgroup2":
            here = os.path.normpath(f"{at}/{paths.get('', '/')}")
            places = [here] if here == os.path.normpath(at) else [here, os.path.dirname(here)]
            found += [(2, dict.fromkeys(("memory", "pids"), place)) for place in places]
    of_one: dict[str, str] = {
        controller: os.path.normpath(f"{at}/{paths[controller]}")
        for _, at, kind, options, *_ in mounted
        for controller in ("memory", "pids")
        if kind == "cgroup" and controller in options.split(",") and controller in paths
    }
    if len(of_one) == 2:
        found.append((1, of_one))
    return found
