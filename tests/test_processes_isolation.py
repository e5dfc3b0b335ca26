"""An isolated process has no access to the memory and environment of others; everything else goes on as before."""

import subprocess
import sys

import pytest

from asyncrl.processes.isolation import landlock_version

SCRIPT = """
import os, signal, subprocess, sys, tempfile
from asyncrl.processes import isolation

parent, version = os.getppid(), int(sys.argv[1])
read = lambda pid: open(f"/proc/{pid}/environ", "rb").read()
def refused(call):
    try:
        call()
    except PermissionError:
        return True
    return False

read(parent)  # no error
isolation.landlock_version = lambda: version
isolation.isolate()
with tempfile.TemporaryDirectory() as folder:
    os.mkdir(f"{folder}/a")
    open(f"{folder}/a/file", "w").close()
    os.rename(f"{folder}/a/file", f"{folder}/file")
child = subprocess.Popen(["sleep", "600"])
own = read(child.pid)
child.kill()
below = subprocess.run([sys.executable, "-c", f"open('/proc/{parent}/environ').read()"], stderr=subprocess.DEVNULL)
print(refused(lambda: read(parent)), below.returncode, refused(lambda: os.kill(parent, 0)))
"""


@pytest.mark.parametrize("version", [2, 6])
def test_the_parent_is_out_of_reach_and_own_children_are_not(version):
    if landlock_version() < version:
        pytest.skip("this kernel has no such version of Landlock")
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(version)], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"True 1 {version == 6}\n", done.stderr


def test_root_and_its_children_lose_the_privileges_that_would_undo_it():
    script = (
        "import subprocess; from asyncrl.processes.isolation import isolate\n"
        "for isolated in (False, True):\n"
        "    isolated and isolate()\n"
        "    print(subprocess.check_output(['grep', 'CapEff', '/proc/self/status'], text=True).split()[1])\n"
    )
    lines = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    before, after = (int(line, 16) for line in lines)
    dropped = 1 << 19 | 1 << 21 | 1 << 24 | 1 << 38
    if not before & dropped:
        pytest.skip("not root, or the root of a container that does not have them")
    assert after == before & ~dropped
