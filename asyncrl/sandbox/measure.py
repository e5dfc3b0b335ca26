"""Limits of a sandbox that the kernel does not bind, measured from outside. Each returns which one is exceeded, as a
sentence, or nothing."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

from asyncrl.processes.memory import MIB, memory_above
from asyncrl.sandbox.base import WORKDIR, Limits

_MAX_FILES = 20_000
_BLOCK_BYTES = 512


def memory(pids: Sequence[int], limits: Limits, files_bytes: int = 0) -> str:
    """Of all processes together, and of files that are in memory."""
    return too_much_memory(limits) if memory_above(limits.memory_mb * MIB - files_bytes, pids) else ""


def memory_with_files(pids: Sequence[int], limits: Limits) -> str:
    """Of all processes together and of the file system, in memory, that they have at `WORKDIR`; and how many files that
    has."""
    count, used = 0, 0
    for pid in pids:  # the first is the runner, which lives as long as the sandbox
        with contextlib.suppress(OSError):  # it has ended
            found = os.statvfs(f"/proc/{pid}/root{WORKDIR}")
            count = found.f_files - found.f_ffree
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            break
    return memory(pids, limits, used) or (_too_many_files() if count > _MAX_FILES else "")


def too_much_memory(limits: Limits) -> str:
    return f"the sandbox used more than its {limits.memory_mb} MiB of memory"


def threads(pids: Sequence[int], limits: Limits) -> str:
    """Of all processes together, which have one or more each."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            found += len(os.listdir(f"/proc/{pid}/task"))
    return f"the sandbox had more than its {limits.processes} processes and threads" if found > limits.processes else ""


def folder(path: str, pids: Sequence[int], limits: Limits) -> str:
    """What is below the folder, and files that the processes still have open after their removal."""
    count, removed = 0, sum(_removed_bytes(os.stat(path).st_dev, pids))
    sizes: dict[tuple[int, int], int] = {}  # by inode, which may have several names
    folders = [path]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if count > _MAX_FILES:
                        return _too_many_files()
        except (FileNotFoundError, NotADirectoryError):  # removed, or replaced
            continue
        except OSError as e:
            return f"the sandbox had a folder that could not be measured ({e.strerror})"
    used = removed + sum(sizes.values())
    return f"the sandbox had more than its {limits.disk_mb} MiB of files" if used > limits.disk_mb * MIB else ""


def _removed_bytes(device: int, pids: Sequence[int]) -> list[int]:
    sizes: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or hides them
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(found.st_mode) and not found.st_nlink and found.st_dev == device:
                        sizes[found.st_ino] = found.st_blocks * _BLOCK_BYTES
    return list(sizes.values())


def _too_many_files() -> str:
    return f"the sandbox had more than {_MAX_FILES} files"
