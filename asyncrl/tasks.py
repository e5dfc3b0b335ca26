"""Small helpers around asyncio's tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

UNWINDING_S = 2.0  # for tasks to end once they are cancelled; what hangs longer ends with the actors it waits for


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel and wait until they are, but not for ever; what they raise on their way is no news any more."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
    if pending := [t for t in tasks if not t.done()]:
        await asyncio.wait(pending, timeout=UNWINDING_S)
