"""Measures CPU seconds of all descendant processes, and of one of them."""

from __future__ import annotations

import contextlib
import math
import threading

import psutil

LOOK_EVERY_S = 0.25


class CpuSeconds:
    """Samples all descendants of this process four times a second while its context is open::

        with CpuSeconds("ray::SampleQueueActor") as cpu:
            subprocess.run(...)
        share = cpu.process_s / cpu.all_s

    The one process is the one whose name starts with ``name``; its seconds are NaN if it was never seen. CPU time
    between the last sample and a process's end is missed, so shares come out slightly too large."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seconds: dict[psutil.Process, float] = {}
        self._process: psutil.Process | None = None
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

    def _run(self) -> None:
        while not self._done.wait(LOOK_EVERY_S):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # the process has just ended
                    self._look(process)

    def _look(self, process: psutil.Process) -> None:
        times = process.cpu_times()
        self._seconds[process] = times.user + times.system
        if process.name().startswith(self._name):
            self._process = process
