"""Ends agent loops that hang between their calls of ``generate``."""

from __future__ import annotations

import asyncio

from asyncrl.observability.telemetry.recorder import now_s


class AgentWatch:
    """Cancels the current task once its agent loop has spent ``limit_s`` without a call of ``generate`` in flight::

    watch = AgentWatch(limit_s)
    try:
        await loop.run(prompt, index, generate)    # generate calls watch.generating(True), then watch.generating(False)
    finally:
        watch.close()                              # watch.expired tells whether it cancelled the task
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._idle_since_s = limit_s, now_s()
        self._calls = 0  # of generate, under way
        self.expired = False
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._check)

    def generating(self, generating: bool) -> None:
        self._calls += 1 if generating else -1
        self._idle_since_s = now_s()

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        left_s = self._limit_s if self._calls else self._idle_since_s + self._limit_s - now_s()
        if left_s <= 0 and self._task is not None:
            self.expired = True
            self._task.cancel()
            left_s = self._limit_s  # the loop may have caught the cancellation
        self._timer = asyncio.get_running_loop().call_later(left_s, self._check)
