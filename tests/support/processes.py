"""Waiting for processes to end."""

import asyncio
import time
from collections.abc import Iterable

import psutil


def is_alive(process: psutil.Process) -> bool:
    """False for zombies too: an orphan that has ended waits until its new parent asks."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def gone(processes: Iterable[psutil.Process], within_s: float = 30.0) -> None:
    """Fails unless all end within ``within_s``; kills those that do not."""
    deadline = time.monotonic() + within_s
    while (alive := [p for p in processes if is_alive(p)]) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    for process in alive:
        process.kill()
    assert not alive
