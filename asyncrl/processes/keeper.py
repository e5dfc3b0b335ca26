"""Keeper of a process tree: runs work in a process, watches it, and kills it with all that it started.

::

    parent ── keeper ── stand-in ── worker ── whatever the worker starts

Keeper and stand-in adopt orphans, so neither double forks nor new sessions lead out of the tree below them. They kill
all of it when the worker ends or exceeds a limit, and when the parent closes its end of the keeper's standard input or
dies. If one of them is killed, the other one does it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from asyncrl.processes.parent import adopt_orphans, end_with_parent
from asyncrl.processes.tree import kill_descendants

_MEASURE_EVERY_S = 0.5
_MEASURING_SHARE = 5  # pauses are at least this many times as long as a measurement
_STAND_IN_ENDS_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)  # blocked in keeper and stand-in, which wait for them
_PARENT, _STDERR = 0, 2
_CHUNK = 64 * 1024


class Watch(Protocol):
    """The keeper's part that depends on the kind of worker."""

    def heard(self) -> None:
        """The parent may have written to standard input, which is non-blocking; called before output is passed."""

    def printed(self, descriptor: int, chunk: bytes) -> None:
        """The worker, or something that it started, has printed."""

    def exceeded(self) -> str:
        """The limit that the tree exceeds, as the end of a sentence about the worker; empty if none is."""


class Ended(NamedTuple):
    """``exceeded``: the limit for which the worker was killed, or empty. ``code``: of its exit, 128 + n by signal n."""

    exceeded: str
    code: int


def keep(
    work: Callable[[], object],
    watch: Callable[[int], Watch],
    folder: str,
    *,
    private: Sequence[int] = (),
    outputs: Sequence[Sequence[int]] = ((1, 2),),
    at_end: Callable[[int], object] | None = None,
    at_end_s: float = 0.0,
) -> Ended:
    """Make this process the keeper of ``work``, which runs in a process group of its own; returns when nothing is
    left of it.

    ``watch`` is made with the stand-in's pid. ``private``: descriptors of the worker alone. ``outputs``: groups of the
    worker's descriptors, each a pipe that the keeper reads. ``at_end`` runs in the stand-in, with the worker's pid,
    when all below it has ended, and may take ``at_end_s``; then ``folder`` is removed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    adopt_orphans()
    keeper = os.getpid()
    pipes = [(*os.pipe(), group) for group in outputs]
    if stand_in := os.fork():
        _close(*private, *(printed for _, printed, _ in pipes))
        printed_by = {output: group[0] for output, _, group in pipes}
        return _keep(stand_in, printed_by, folder, watch(stand_in), _STAND_IN_ENDS_S + at_end_s)
    end_with_parent(keeper, by=signal.SIGTERM)
    adopt_orphans()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for output, printed, group in pipes:
        for descriptor in group:
            os.dup2(printed, descriptor)
        _close(output, printed)
    stand_in = os.getpid()
    if worker := os.fork():
        _close(*private)
        os._exit(_stand_in(worker, folder, at_end))  # leaves nothing to clean up, which would take milliseconds
    end_with_parent(stand_in)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.setpgid(0, 0)  # killing one's own process group is common; of sessions, each may get an equal share of a core
    work()
    sys.exit()


def _keep(stand_in: int, outputs: dict[int, int], folder: str, watch: Watch, ends_s: float) -> Ended:
    exceeded, ending, measure_at = "", False, 0.0
    events = select.poll()
    events.register(_PARENT, 0)  # only its end: what the parent writes should not wake the keeper
    for output in outputs:
        events.register(output, select.POLLIN)
    os.set_blocking(_PARENT, False)
    while not (exceeded or ending or os.waitid(os.P_PID, stand_in, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
        ready = [descriptor for descriptor, _ in events.poll(1000 * max(0.0, measure_at - time.monotonic()))]
        watch.heard()
        if _PARENT in ready:
            break
        for output in ready:
            if chunk := os.read(output, _CHUNK):
                watch.printed(outputs[output], chunk)
            else:
                ending = True  # the stand-in, which has the other end, too
        if (began := time.monotonic()) >= measure_at:
            exceeded = watch.exceeded()
            ended = time.monotonic()
            measure_at = ended + max(_MEASURE_EVERY_S, _MEASURING_SHARE * (ended - began))
    os.kill(stand_in, signal.SIGTERM)
    signal.sigtimedwait([signal.SIGCHLD], ends_s)
    status = kill_descendants()[stand_in]
    for output, descriptor in outputs.items():
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(output, _CHUNK):
                watch.printed(descriptor, chunk)
    remove_folder(folder)
    return Ended(exceeded, os.waitstatus_to_exitcode(status))


def _stand_in(worker: int, folder: str, at_end: Callable[[int], object] | None) -> int:
    """Exit code of the worker; 128 + n after signal n, as in a shell."""
    statuses: dict[int, int] = {}
    while worker not in statuses and signal.sigwait(_SIGNALS) == signal.SIGCHLD:
        statuses |= _ended_children()
    statuses |= kill_descendants()
    if at_end is not None:
        at_end(worker)
    remove_folder(folder)
    code = os.waitstatus_to_exitcode(statuses[worker])
    return code if code >= 0 else 128 - code


def _ended_children() -> Iterator[tuple[int, int]]:
    """(pid, wait status) of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def remove_folder(folder: str) -> None:
    """Remove a folder that may hold anything: nested to any depth, closed to its owner."""
    try:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    except OSError:
        if os.path.lexists(folder):
            os.spawnlp(os.P_WAIT, "chmod", "chmod", "-Rf", "u+rwx", folder)
            os.spawnlp(os.P_WAIT, "rm", "rm", "-rf", folder)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Relay:
    """Passes what a worker prints on to our standard error, up to ``most_bytes`` per ``unit``; discards the rest."""

    def __init__(self, most_bytes: int, unit: str) -> None:
        self._most_bytes, self._unit = most_bytes, unit
        self.begin()

    def begin(self) -> None:
        """A unit begins."""
        self._left = self._most_bytes

    def write(self, chunk: bytes) -> None:
        if self._left < 0:
            return
        passed, self._left = chunk[: self._left], self._left - len(chunk)
        if self._left < 0:
            note = f"[the rest of this {self._unit}'s output, beyond {self._most_bytes} bytes, is discarded]"
            passed += f"\n{note}\n".encode()
        with contextlib.suppress(OSError):
            for start in range(0, len(passed), select.PIPE_BUF):
                if not select.select([], [_STDERR], [], 0.1)[1]:  # nobody reads it, and the worker must not wait
                    return
                os.write(_STDERR, passed[start : start + select.PIPE_BUF])
