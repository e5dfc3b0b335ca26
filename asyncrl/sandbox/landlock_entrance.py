"""The first program of a sandbox without namespaces: guards the process that enters Landlock and becomes the runner.

It runs with an interpreter that need not have asyncrl, from copies of the modules that it imports::

    host ── guard ── runner (Landlock, seccomp, limits) ── programs

The guard is outside of the sandbox. It kills all that is below it when the host closes its end of standard input or
dies, on SIGTERM, and when the runner ends or is stopped; and all but the runner when that asks for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import marshal
import os
import select
import signal
import sys

from asyncrl.processes.isolation import ALL_CAPABILITIES, drop_capabilities, gain_no_privileges
from asyncrl.processes.landlock import restrict
from asyncrl.processes.parent import adopt_orphans, end_with_parent
from asyncrl.processes.tree import freeze, kill_descendants
from asyncrl.sandbox import runner

_HOST = 0  # descriptor
_CHUNK = 65536
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_INSTRUCTION_BYTES = 8


class _Filter(ctypes.Structure):
    _fields_ = [("instructions", ctypes.c_ushort), ("program", ctypes.c_char_p)]


def main() -> None:
    """Arguments: a file with the `marshal` of rights, rules and scopes for `restrict`, of the rights in the sandbox's
    folder, and of a seccomp filter; the folder; limits for the runner."""
    settings, folder, *limits = sys.argv[1:]
    with open(settings, "rb") as file:
        handled, rules, scopes, rights, program = marshal.load(file)
    adopt_orphans()
    guard = os.getpid()
    asked, ask = os.pipe()
    done, say_done = os.pipe()
    if pid := os.fork():
        os.close(ask)
        _guard(pid, asked, say_done)
        freeze(guard)
        kill_descendants()
        os._exit(0)
    end_with_parent(guard)
    adopt_orphans()
    os.chdir(folder)
    gain_no_privileges()
    drop_capabilities(ALL_CAPABILITIES)
    restrict(handled, [*rules, (folder, rights)], scopes)
    _filter(program)
    os.close(say_done)

    def kill_others() -> None:
        os.write(ask, b".")
        os.read(done, 1)  # else it would kill what is started next

    runner.serve(kill_others, limits)


def _guard(pid: int, asked: int, done: int) -> None:
    """Returns when the sandbox should end."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    for sent in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(sent, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    events = select.poll()
    events.register(_HOST, 0)  # only its end
    for descriptor in (asked, woken):
        events.register(descriptor, select.POLLIN)
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT):
        ready = [descriptor for descriptor, _ in events.poll()]
        if _HOST in ready or (woken in ready and signal.SIGTERM in os.read(woken, _CHUNK)):
            return
        if asked in ready and os.read(asked, 1):
            for below in freeze(pid):
                with contextlib.suppress(OSError):
                    os.kill(below, signal.SIGKILL)
            os.write(done, b".")


def _filter(program: bytes) -> None:
    given = _Filter(len(program) // _INSTRUCTION_BYTES, program)
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(given), nothing, nothing):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
