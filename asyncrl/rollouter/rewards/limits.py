"""Limits of a reward worker: what the kernel bounds in each process, and what is measured of all of them together."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrl.processes.memory import MIB, memory_above
from asyncrl.processes.tree import Process, descendants

MAX_PROCESSES = 256  # the worker and all that it started
MAX_ENTRIES = 10_000  # files and folders in the worker's folder
MAX_OPEN_FILES = 1024  # per process


@dataclass(frozen=True)
class Limits:
    """See `asyncrl.config.schema.RewardConfig`."""

    memory_mb: int
    file_mb: int


def bound_process(limits: Limits) -> None:
    """Bound this process and each that it will start: its private memory, a file's size, open files, no core dumps."""
    for kind, most in (
        (resource.RLIMIT_DATA, limits.memory_mb * MIB),
        (resource.RLIMIT_FSIZE, limits.file_mb * MIB),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bound, bound))


class Meter:
    """Measures the processes below this one, and their ``folder``. ``root``: the one below which the worker is.

    CPU time: a call with a limit of t seconds may use t on every core, and until the next call whatever it left behind
    may use t in all. RLIMIT_CPU could not bound that: it is per process and for its whole life."""

    def __init__(self, limits: Limits, root: int, folder: str) -> None:
        self._limits, self._root, self._folder = limits, root, folder
        self._cores = len(os.sched_getaffinity(0))
        self._calls: list[float] = []  # since the last measurement
        self._call_s = 0.0
        self._cpu_allowed_s = math.inf

    def call(self, limit_s: float) -> None:
        """A call with this limit has begun; 0: it has ended."""
        self._calls.append(limit_s)

    def exceeded(self) -> str:
        """The limit that is exceeded, as the end of a sentence about the worker; empty if none is."""
        found = descendants(os.getpid())
        return (
            self._too_many(found) or self._too_much_memory(found) or self._too_much_cpu(found) or self._too_much_disk()
        )

    def _too_many(self, found: Sequence[Process]) -> str:
        return f"had more than {MAX_PROCESSES} processes" if len(found) - 1 > MAX_PROCESSES else ""

    def _too_much_memory(self, found: Sequence[Process]) -> str:
        most = self._limits.memory_mb * MIB
        used = memory_above(most, [process.pid for process in found if process.pid != self._root])
        if not used:
            return ""
        return (
            f"used {used // MIB} MiB of memory with all that it started, more than reward.memory_mb = "
            f"{self._limits.memory_mb}"
        )

    def _too_much_cpu(self, found: Sequence[Process]) -> str:
        used_s = sum(process.cpu_s for process in found)  # ended orphans count as children of the root
        for limit_s in self._calls:
            if limit_s:
                self._call_s, self._cpu_allowed_s = limit_s, used_s + limit_s * self._cores
            else:
                self._cpu_allowed_s = min(self._cpu_allowed_s, used_s + self._call_s)
        self._calls.clear()
        if used_s <= self._cpu_allowed_s:
            return ""
        return (
            "used more CPU time with all that it started than reward.timeout_s allows: that long on each core during a "
            "call, and that long in all between two calls"
        )

    def _too_much_disk(self) -> str:
        try:
            used = entries = 0
            for size in _sizes(self._folder):
                used, entries = used + size, entries + 1
                if entries > MAX_ENTRIES:
                    return f"had more than {MAX_ENTRIES} files in its folder"
        except OSError as e:  # closed to its owner, or nested too deeply
            return f"had a folder that cannot be measured ({e.strerror})"
        if used <= self._limits.file_mb * MIB:
            return ""
        return f"had {used // MIB} MiB of files in its folder, more than reward.file_mb = {self._limits.file_mb}"


def _sizes(folder: str) -> Iterator[int]:
    """Bytes on disk of each file and folder below ``folder``. Raises OSError for a folder that cannot be listed."""
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:  # removed meanwhile
            continue
