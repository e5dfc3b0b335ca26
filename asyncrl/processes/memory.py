"""Memory of processes, read from /proc. Linux only."""

from __future__ import annotations

from collections.abc import Sequence

MIB = 1024 * 1024


def memory_above(most: int, pids: Sequence[int]) -> int:
    """Bytes that the processes use together, if they are more than ``most``; else 0."""
    if sum(map(_memory_bytes, pids)) <= most:
        return 0
    # pages that forks share counted several times; a process's share of them is slow to read
    used = sum(map(_share_bytes, pids))
    return used if used > most else 0


def _memory_bytes(pid: int) -> int:
    """Memory of a process that cannot be dropped, unlike pages of its program and of files that it mapped."""
    return _sum_kb(f"/proc/{pid}/status", b"RssAnon:", b"RssShmem:", b"VmSwap:") * 1024


def _share_bytes(pid: int) -> int:
    """The same, with each page divided by the number of processes that map it. Needs Linux 5.9; else the same."""
    share = _sum_kb(f"/proc/{pid}/smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:") * 1024
    return share or _memory_bytes(pid)


def _sum_kb(path: str, *names: bytes) -> int:
    try:
        with open(path, "rb") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(names))
    except OSError:  # it has ended, or hides its memory
        return 0
