"""Waiting for and cancelling asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

UNWINDING_S = 2.0  # for cancelled tasks to end; one that hangs longer ends with the actors it waits for


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait up to `UNWINDING_S` for their end. Exceptions raised during cancellation are ignored."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
    if pending := [t for t in tasks if not t.done()]:
        await asyncio.wait(pending, timeout=UNWINDING_S)


async def first_of(*waits: Coroutine[Any, Any, Any], beside: asyncio.Future[Any] | None = None) -> None:
    """Wait until one of ``waits`` or ``beside`` ends; then cancel the other waits, but never ``beside``. Does not raise
    their exceptions."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait([*tasks, *([beside] if beside is not None else [])], return_when="FIRST_COMPLETED")
    finally:
        await cancelled(tasks)
