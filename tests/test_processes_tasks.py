"""Calls that may block for ever do not keep a process from ending."""

import subprocess
import sys

import pytest

from asyncrl.processes.tasks import in_daemon_thread


async def test_a_result_and_an_exception_reach_the_caller():
    assert await in_daemon_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 // 0)


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
