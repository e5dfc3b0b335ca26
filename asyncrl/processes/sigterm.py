"""SIGTERM in a Ray actor."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal


def sigterm() -> asyncio.Event:
    """Set when this process gets SIGTERM, which no longer ends it; processes that it forks end as before. Called in the
    event loop, in any thread.

    Python's own handlers would run in the main thread, which in an actor runs no Python code while Ray waits for calls.
    faulthandler's are C functions that run at once: a line in a pipe wakes the loop."""
    arrived = asyncio.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def read() -> None:
        os.read(reader, 65536)
        arrived.set()

    faulthandler.register(signal.SIGTERM, writer, all_threads=False)
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))
    asyncio.get_running_loop().add_reader(reader, read)
    return arrived
