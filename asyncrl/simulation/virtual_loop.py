"""An asyncio event loop whose clock jumps to the next timer whenever nothing is left to do at the present time."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncrl.observability.telemetry import clock

T = TypeVar("T")

_RESOLUTION_S = 1e-9


class Stuck(RuntimeError):
    """Every task waits for another one, and no timer is set: nothing would ever happen again."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` begins at 0. Files and sockets never become ready, and what is given to a thread runs at once."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jump(self._pass))
        self._clock_resolution = _RESOLUTION_S  # asyncio runs timers that are due within it

    def time(self) -> float:
        return self._now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as e:
            done.set_exception(e)
        return done

    def _pass(self, seconds: float) -> None:
        self._now_s += seconds
        self._clock_resolution = max(_RESOLUTION_S, 2 * math.ulp(self._now_s))


class _Jump(selectors.SelectSelector):
    """Lets time pass where another selector would wait."""

    def __init__(self, wait: Callable[[float], None]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("all tasks wait for each other, and no timer is set")
        if timeout > 0:
            self._wait(timeout)
        return []


def run_virtually(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Result of ``work()``, run to its end in virtual time. Raises Stuck, and whatever ``work`` raises."""
    loop = VirtualLoop()
    try:
        with clock.virtual(loop.time):
            try:
                return loop.run_until_complete(work())
            finally:
                pending = asyncio.all_tasks(loop)
                for task in pending:
                    task.cancel()
                if pending:
                    loop.run_until_complete(asyncio.wait(pending))
    finally:
        loop.close()
