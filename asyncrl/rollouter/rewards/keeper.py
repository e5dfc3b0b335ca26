"""Keeper of a reward worker: starts it, measures it, passes on what it prints, and kills it with all that it started.

::

    pool ── keeper ── stand-in ── worker ── whatever the reward function starts

Keeper and stand-in adopt orphans, so neither double forks nor new sessions lead out of the tree below them. They kill
all of it when the worker ends or exceeds a limit, and when the pool closes its pipe or dies. If one of them is killed,
the other one does it. Since Linux 6.12 the worker cannot signal them (`asyncrl.processes.isolation`); before, code that
kills both at once can leave a process behind.

Frames pass between pool and worker directly. On the keeper's standard input the pool writes the time limit of each call
as it begins, and a zero as it ends; on its standard output the keeper writes why the worker has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator

from asyncrl.processes.isolation import isolate
from asyncrl.processes.parent import adopt_orphans, end_with_parent
from asyncrl.processes.tree import kill_descendants
from asyncrl.rollouter.rewards.limits import Limits, Meter, bound_process

CALL = struct.Struct("<d")  # seconds
MAX_OUTPUT_BYTES = 64 * 1024  # per call
_MEASURE_EVERY_S = 0.5
_MEASURING_SHARE = 5  # pauses are at least this many times as long as a measurement
_STAND_IN_ENDS_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)  # blocked in keeper and stand-in, which wait for them
_POOL, _WHY, _STDERR = 0, 1, 2


def main() -> None:
    """``python -m asyncrl.rollouter.rewards.keeper SOCKET FOLDER LIMITS``: the descriptor of the worker's end, its
    folder, and `Limits` as JSON."""
    connection, folder, limits = int(sys.argv[1]), sys.argv[2], Limits(**json.loads(sys.argv[3]))
    os.set_inheritable(connection, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    adopt_orphans()
    keeper = os.getpid()
    output, printed = os.pipe()
    if stand_in := os.fork():
        os.close(connection)
        os.close(printed)
        _keep(stand_in, output, folder, Meter(limits, stand_in, folder))
        return
    end_with_parent(keeper, by=signal.SIGTERM)
    adopt_orphans()
    os.close(output)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    stand_in = os.getpid()
    if worker := os.fork():
        os.close(connection)
        sys.exit(_stand_in(worker, folder))
    end_with_parent(stand_in)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.setsid()  # killing one's own process group is common
    bound_process(limits)
    isolate()
    from asyncrl.rollouter.rewards.worker import serve

    serve(socket.socket(fileno=connection))


def _keep(stand_in: int, output: int, folder: str, meter: Meter) -> None:
    relay, why, measure_at = _Relay(), "", 0.0
    events = select.poll()
    events.register(_POOL, 0)  # only its end: a call should not wake the keeper
    events.register(output, select.POLLIN)
    os.set_blocking(_POOL, False)
    while not (why or os.waitid(os.P_PID, stand_in, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
        ready = [descriptor for descriptor, _ in events.poll(1000 * max(0.0, measure_at - time.monotonic()))]
        for limit_s in _calls():
            meter.call(limit_s)
            if limit_s:
                relay.begin_call()
        if _POOL in ready:
            break
        if output in ready:
            if chunk := os.read(output, 64 * 1024):
                relay.write(chunk)
            else:
                events.unregister(output)
        if (began := time.monotonic()) >= measure_at:
            why = meter.exceeded()
            ended = time.monotonic()
            measure_at = ended + max(_MEASURE_EVERY_S, _MEASURING_SHARE * (ended - began))
    os.kill(stand_in, signal.SIGTERM)
    signal.sigtimedwait([signal.SIGCHLD], _STAND_IN_ENDS_S)
    status = kill_descendants()[stand_in]
    os.set_blocking(output, False)
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(output, 64 * 1024):
            relay.write(chunk)
    _remove(folder)
    with contextlib.suppress(BrokenPipeError):
        os.write(_WHY, (why or f"ended its process with exit code {os.waitstatus_to_exitcode(status)}").encode())


def _stand_in(worker: int, folder: str) -> int:
    """Exit code of the worker; 128 + n after signal n, as in a shell."""
    statuses: dict[int, int] = {}
    while worker not in statuses and signal.sigwait(_SIGNALS) == signal.SIGCHLD:
        statuses = dict(_ended_children())
    statuses |= kill_descendants()
    _remove(folder)
    code = os.waitstatus_to_exitcode(statuses[worker])
    return code if code >= 0 else 128 - code


def _ended_children() -> Iterator[tuple[int, int]]:
    """(pid, wait status) of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _calls() -> list[float]:
    """What the pool has written since the last call of this function."""
    written = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(_POOL, 1024 * CALL.size):
            written += chunk
    return [limit_s for (limit_s,) in CALL.iter_unpack(written)]


def _remove(folder: str) -> None:
    """Remove a folder that may hold anything: nested to any depth, closed to its owner."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return
    except OSError:
        os.spawnlp(os.P_WAIT, "chmod", "chmod", "-Rf", "u+rwx", folder)
        os.spawnlp(os.P_WAIT, "rm", "rm", "-rf", folder)


class _Relay:
    """Passes what the worker prints on to our standard error, up to a limit per call. The rest is discarded."""

    def __init__(self) -> None:
        self.begin_call()

    def begin_call(self) -> None:
        self._left: int = MAX_OUTPUT_BYTES

    def write(self, chunk: bytes) -> None:
        if self._left < 0:
            return
        passed, self._left = chunk[: self._left], self._left - len(chunk)
        if self._left < 0:
            passed += f"\n[the rest of this call's output, beyond {MAX_OUTPUT_BYTES} bytes, is discarded]\n".encode()
        with contextlib.suppress(OSError):
            for start in range(0, len(passed), select.PIPE_BUF):
                if not select.select([], [_STDERR], [], 0.1)[1]:  # nobody reads it, and the worker must not wait
                    return
                os.write(_STDERR, passed[start : start + select.PIPE_BUF])


if __name__ == "__main__":
    main()
