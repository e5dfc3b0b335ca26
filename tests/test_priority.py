"""CPU scheduling on shared cores: the policies that Linux reports for threads."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs per-thread priorities")

ASKED = """
import os, subprocess, sys, threading
from asyncrl.cpu.priority import give_way, never_interrupt

policy = lambda thread=0: {os.SCHED_OTHER: "other", os.SCHED_BATCH: "batch", os.SCHED_IDLE: "idle"}[
    os.sched_getscheduler(thread)
]

def ask(found, prepare=lambda: None):
    prepare()
    found.append(policy(threading.get_native_id()))

started, go, before, after, generation = threading.Event(), threading.Event(), [], [], []
def earlier():
    started.set()
    go.wait()
    ask(before)
first = threading.Thread(target=earlier)
first.start()
started.wait()
never_interrupt()
go.set()
later = threading.Thread(target=ask, args=(after,))
idle = threading.Thread(target=ask, args=(generation, lambda: give_way("idle")))
for thread in (later, idle):
    thread.start()
for thread in (first, later, idle):
    thread.join()
child = subprocess.run([sys.executable, "-c", "import os; print(os.sched_getscheduler(0) == os.SCHED_BATCH)"],
                       capture_output=True, text=True).stdout.strip()
print(policy(), *before, *after, *generation, child)
"""


def test_a_process_that_never_interrupts_has_no_thread_that_does():
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["batch", "batch", "batch", "idle", "True"], done.stderr
