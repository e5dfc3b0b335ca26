"""Waits end with the first of several; calls that may block for ever do not keep a process from ending."""

import asyncio
import subprocess
import sys

import pytest

from asyncrl.processes.tasks import end_of_first, in_daemon_thread


async def test_a_result_and_an_exception_reach_the_caller():
    assert await in_daemon_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 // 0)


async def test_the_end_of_the_first_wait_cancels_the_others_and_raises_its_exception():
    cancelled = []

    async def endless():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("endless")
            raise

    async def fails():
        await asyncio.sleep(0)
        raise ZeroDivisionError

    await end_of_first(endless(), asyncio.sleep(0))
    with pytest.raises(ZeroDivisionError):
        await end_of_first(fails(), endless())
    assert cancelled == ["endless", "endless"]


def test_a_process_ends_while_a_call_blocks():
    code = """
import asyncio, contextlib, threading
from asyncrl.processes.tasks import in_daemon_thread, within, Late
async def main():
    with contextlib.suppress(Late):
        await within(0.1, in_daemon_thread(threading.Event().wait), "a call")
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
