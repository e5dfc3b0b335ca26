"""A child process ends with its parent, even if the parent is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")

CHILD = """
import sys, time
from asyncrl.processes.parent import end_with_parent
end_with_parent(int(sys.argv[1]))
print("watching", flush=True)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_child_is_killed_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_whose_parent_has_already_ended_exits_at_once():
    other_than_the_parent = str(os.getppid())
    ended = subprocess.run([sys.executable, "-c", CHILD, other_than_the_parent], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, b"")
