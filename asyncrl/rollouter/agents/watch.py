"""Watches what agent loops do between their calls of ``generate``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrl.observability.telemetry.clock import now_s


class AgentWatch:
    """Cancels the current task once its agent loop has spent ``limit_s`` without a call of ``generate`` in flight, and
    tells ``generates`` when there is none any more, and when there is one again::

    watch = AgentWatch(limit_s, generates)
    try:
        await loop.run(prompt, index, generate)    # generate calls watch.generating(True), then watch.generating(False)
    finally:
        watch.close()                              # watch.expired tells whether it cancelled the task
    """

    def __init__(self, limit_s: float, generates: Callable[[bool], None]) -> None:
        self._limit_s, self._generates, self._idle_since_s = limit_s, generates, now_s()
        self._calls = 0  # of generate, under way
        self.expired = self._closed = False
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        asyncio.get_running_loop().call_soon(self._rest)  # the agent may begin with something else than a call

    def generating(self, generating: bool) -> None:
        self._calls += 1 if generating else -1
        self._idle_since_s = now_s()
        if generating:
            self._generates(True)
        else:  # later, for the loop may go on with the next call at once
            asyncio.get_running_loop().call_soon(self._rest)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _rest(self) -> None:
        if not self._calls and not self._closed:
            self._generates(False)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check)

    def _check(self) -> None:
        if self._calls:
            self._timer = None  # until the loop rests
            return
        left_s = self._idle_since_s + self._limit_s - now_s()
        if left_s <= 0 and self._task is not None:
            self.expired = True
            self._task.cancel()
            left_s = self._limit_s  # the loop may have caught the cancellation
        self._timer = asyncio.get_running_loop().call_later(left_s, self._check)
