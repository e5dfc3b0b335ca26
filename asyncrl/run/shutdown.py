"""Shutdown of a run: finished, interrupted by a signal, or failed; each cause is reported once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from asyncrl.config.load import ConfigError
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.processes.actor_client import first_leaf
from asyncrl.processes.tasks import cancelled
from asyncrl.run.driver_epoch import EpochOver

log = logging.getLogger(__name__)

EXIT_FAILED = 1


def say(line: str) -> None:
    """Print a line for people. If they piped it into a program, Ctrl-C ends that first, and writing to it fails."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


class Interrupted(Exception):
    """A signal arrived while the run was starting, or a second one while it was shutting down."""


class Shutdown:
    """Collects the reasons for the run's end. The first signal asks for an orderly end after the current step, the
    second abandons that step. ``failure``: one line about the first failure; ``stopped``: any other reason for an early
    end."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.stopped: str | None = None
        self.signal: signal.Signals | None = None
        self._began_s = now_s()
        self._interrupted = asyncio.Event()
        self._abandoned = asyncio.Event()
        self._callbacks: list[Callable[[str], None]] = []

    def interrupt(self, signum: int) -> None:
        if self.signal is not None:
            self._abandoned.set()
            return
        self.signal = signal.Signals(signum)
        self.stopped = self.signal.name
        self._interrupted.set()
        for callback in self._callbacks:
            callback(self.signal.name)
        say(f"{self.signal.name}: finishing the current step, then saving; a second signal abandons it")

    def on_interrupt(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(name of the signal)`` at the first signal, at once if it has arrived already."""
        self._callbacks.append(callback)
        if self.signal is not None:
            callback(self.signal.name)

    async def at_the_latest(self, max_time_s: float, stop: Callable[[str], None]) -> None:
        """Never returns. Calls ``stop(reason)`` once the run has lasted ``max_time_s``; 0: never."""
        if max_time_s:
            await asyncio.sleep(self._began_s + max_time_s - now_s())
            reason = f"trainer.max_time_s: {max_time_s:g} s have passed"
            stop(reason)
            say(f"{reason}: finishing the current step, then saving")
        await asyncio.Event().wait()

    async def unless_interrupted(self, work: Awaitable[Any]) -> Any:
        """Await ``work``; raises Interrupted if a signal arrives first."""
        return await self._race(work, self._interrupted)

    async def unless_abandoned(self, work: Awaitable[Any]) -> Any:
        """Await ``work``; raises Interrupted if a second signal arrives first."""
        return await self._race(work, self._abandoned)

    async def _race(self, work: Awaitable[Any], event: asyncio.Event) -> Any:
        await asyncio.sleep(0)  # handles a signal that arrived while nothing was awaited
        working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Interrupted(f"abandoned by {self.signal.name if self.signal else 'a signal'}")
        finally:
            await cancelled([working, waiting])

    def failed(self, error: BaseException) -> None:
        """Record a failure and log it with its traceback; one whose message says what to do needs none, and neither
        does an interruption."""
        # not before the signal handlers are set: these load torch
        from asyncrl.rollouter.drops import NothingToTrain
        from asyncrl.run.placement_plan import PlacementError

        error = first_leaf(error)
        if isinstance(error, Interrupted):
            log.warning("%s", error)
            return
        if isinstance(error, EpochOver) and self.failure is not None:
            return  # every closing step finds that the run has another driver
        self.failure = self.failure or f"{type(error).__name__}: {error}"
        if isinstance(error, (ConfigError, PlacementError, EpochOver, NothingToTrain)):
            log.error("%s", error)
        elif remote := remote_traceback(error):  # raised in an actor: the driver's own frames add nothing
            log.error("Traceback of an actor:\n%s", remote.strip())
        else:
            log.error("%s", "".join(traceback.format_exception(error)).strip())

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record an exception of one closing step as a failure of the run, so that the other steps still run."""
        try:
            yield
        except Exception as e:
            self.failed(e)

    @property
    def exit_status(self) -> int:
        if self.failure is not None:
            return EXIT_FAILED
        return 0 if self.signal is None else 128 + self.signal

    @property
    def status(self) -> str:
        return "failed" if self.failure else "interrupted" if self.signal else "finished"


@contextlib.contextmanager
def on_signals(handler: Callable[[int], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call ``handler`` on the running event loop."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for s in signals:
        loop.add_signal_handler(s, handler, s)
    try:
        yield
    finally:
        for s in signals:
            loop.remove_signal_handler(s)


def remote_traceback(error: BaseException | None) -> str | None:
    """Traceback in the actor that raised ``error`` or one of its causes, if one did."""
    while error is not None:
        if remote := getattr(error, "remote_traceback", None):
            return str(remote)
        error = error.__cause__
    return None
