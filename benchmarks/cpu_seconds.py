"""Measures CPU seconds of all descendant processes, and of the threads of one of them."""

from __future__ import annotations

import contextlib
import math
import threading
from pathlib import Path

import psutil

LOOK_EVERY_S = 0.25


class CpuSeconds:
    """Samples all descendants of this process four times a second while its context is open::

        with CpuSeconds("ray::SampleQueueActor", since=run_dir / "ledger.sqlite") as cpu:
            subprocess.run(...)
        share = cpu.threads_s(2) / cpu.all_s

    The one process is the one whose name starts with ``name``; its threads count from the moment when the file
    ``since`` exists, and its seconds are NaN if it was never seen. CPU time between the last sample and a process's end
    is missed, so shares come out slightly too large."""

    def __init__(self, name: str, since: Path) -> None:
        self._name, self._since = name, since
        self._seconds: dict[psutil.Process, float] = {}
        self._process: psutil.Process | None = None
        self._threads: dict[int, float] = {}
        self._threads_before: dict[int, float] | None = None
        self._done = threading.Event()
        self._looking = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CpuSeconds:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._looking.join()

    @property
    def all_s(self) -> float:
        return sum(self._seconds.values())

    @property
    def process_s(self) -> float:
        """CPU seconds of the one process, from its start."""
        return self._seconds[self._process] if self._process else math.nan

    def threads_s(self, count: int) -> float:
        """CPU seconds of its ``count`` busiest threads."""
        before = self._threads_before
        if before is None:
            return math.nan
        since = sorted(seconds - before.get(thread, 0.0) for thread, seconds in self._threads.items())
        return sum(since[-count:])

    def _run(self) -> None:
        while not self._done.wait(LOOK_EVERY_S):
            counts = self._since.exists()
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # the process has just ended
                    self._look(process, counts)

    def _look(self, process: psutil.Process, counts: bool) -> None:
        times = process.cpu_times()
        self._seconds[process] = times.user + times.system
        if not process.name().startswith(self._name):
            return
        self._process = process
        if counts:
            threads = {t.id: t.user_time + t.system_time for t in process.threads()}
            self._threads_before = self._threads_before or threads
            self._threads |= threads  # ended threads keep their last value
