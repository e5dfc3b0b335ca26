"""SIGTERM in a process whose main thread runs no Python code."""

import subprocess
import sys

#: its event loop is in another thread, as in an actor; the main one waits in C
PROGRAM = """
import asyncio, ctypes, os, signal, sys, threading
from asyncrl.processes.sigterm import sigterm

async def wait():
    arrived = sigterm()
    child = os.fork()
    if not child:
        signal.pause()
    await asyncio.sleep(0.3)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    await asyncio.sleep(0.3)
    print(os.WTERMSIG(status), arrived.is_set(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(arrived.wait(), 20)
    print("arrived", flush=True)
    os._exit(0)

threading.Thread(target=lambda: asyncio.run(wait())).start()
ctypes.CDLL(None).sleep(60)
"""


def test_it_reaches_the_event_loop_and_ends_children_as_before():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["15", "False", "arrived"], done.stderr
