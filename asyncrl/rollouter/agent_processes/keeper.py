"""Keeper of an agent process: `asyncrl.processes.keeper` for a program that is given as words.

On standard input the parent writes a byte as a sample begins; on standard output the keeper writes `Report` as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import NamedTuple

from asyncrl.processes.keeper import Relay, keep
from asyncrl.processes.memory import MIB, memory_above
from asyncrl.processes.tree import pids_below

MAX_OUTPUT_BYTES = 64 * 1024  # passed on per sample
MAX_RESULT_BYTES = 64 * 1024
_TAIL_BYTES = 4096
_PARENT, _REPORT, _STDOUT, _STDERR = 0, 1, 1, 2


class Job(NamedTuple):
    """``words``: the program and its arguments. ``memory_mb``: limit of it with all that it starts. ``connection``: its
    descriptor of a socket, or None. ``result``: path of a file that it may write, or empty. ``relay``: pass what it
    prints on to our standard error."""

    words: list[str]
    folder: str
    memory_mb: int
    connection: int | None = None
    result: str = ""
    relay: bool = False


class Report(NamedTuple):
    """Of a program that has ended. ``last_line``: of its standard error, else of its output. ``result``: what the file
    holds, None if there is none, cut after `MAX_RESULT_BYTES` + 1."""

    exceeded: str
    code: int
    last_line: str
    result: str | None


def main() -> None:
    """``keeper JOB``, as JSON, in the environment and the folder of the program."""
    job = Job(*json.loads(sys.argv[1]))
    private = [] if job.connection is None else [job.connection]
    for descriptor in private:
        os.set_inheritable(descriptor, False)
    result = os.memfd_create("result")
    watches: list[_Watch] = []

    def work() -> None:
        for descriptor in private:
            os.set_inheritable(descriptor, True)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # by Python; a program would inherit that
            signal.signal(ignored, signal.SIG_DFL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # between two measurements the machine may run out of memory: agents end first
        try:
            os.execvp(job.words[0], job.words)
        except OSError as e:
            os.write(_STDERR, f"{job.words[0]}: {e.strerror}\n".encode())
            os._exit(127)

    def watch(stand_in: int) -> _Watch:
        watches.append(_Watch(stand_in, job))
        return watches[0]

    def at_end(worker: int) -> None:
        with contextlib.suppress(OSError):
            os.write(result, b"+" + _read(job.result))  # empty: there is no such file

    exceeded, code = keep(work, watch, job.folder, private=private, outputs=((_STDOUT,), (_STDERR,)), at_end=at_end)
    found = os.pread(result, MAX_RESULT_BYTES + 2, 0)
    text = found[1:].decode(errors="replace") if found else None
    report = Report(exceeded, code, watches[0].last_line(), text)
    with contextlib.suppress(BrokenPipeError), open(_REPORT, "wb", closefd=False) as file:
        file.write(json.dumps(report).encode())
    os._exit(0)  # leaves nothing to clean up, which would take milliseconds


def _read(path: str) -> bytes:
    """Raises OSError if there is no such file. Does not wait for the other end of a FIFO."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        return file.read(MAX_RESULT_BYTES + 1) or b""


class _Watch:
    def __init__(self, stand_in: int, job: Job) -> None:
        self._stand_in, self._job = stand_in, job
        self._relay = Relay(MAX_OUTPUT_BYTES, "sample") if job.relay else None
        self._tails = {_STDOUT: b"", _STDERR: b""}

    def heard(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(_PARENT, 4096):
                if self._relay is not None:
                    self._relay.begin()

    def printed(self, descriptor: int, chunk: bytes) -> None:
        self._tails[descriptor] = (self._tails[descriptor] + chunk)[-_TAIL_BYTES:]
        if self._relay is not None:
            self._relay.write(chunk)

    def exceeded(self) -> str:
        used = memory_above(self._job.memory_mb * MIB, pids_below(self._stand_in))
        return f"used {used // MIB} MiB of memory with all that it started" if used else ""

    def last_line(self) -> str:
        for descriptor in (_STDERR, _STDOUT):
            if tail := self._tails[descriptor].decode(errors="replace").strip():
                return tail.splitlines()[-1]
        return ""
