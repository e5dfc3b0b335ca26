"""Waiting for and cancelling asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

UNWINDING_S = 2.0  # for cancelled tasks to end; one that hangs longer ends with the actors it waits for


class Late(RuntimeError):
    """Something did not end by its deadline."""


async def within(seconds: float, work: Awaitable[T], what: str) -> T:
    """Result of ``work``; it is cancelled after ``seconds``, and Late raised: "``what`` did not end within …"."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await work
    except TimeoutError:
        if not deadline.expired():
            raise
        raise Late(f"{what} did not end within {seconds:g} s") from None


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Result of ``work``, which may block for ever: the process does not wait for its thread when it ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits any more
            loop.call_soon_threadsafe(lambda: None if done.done() else setter(value))

    def run() -> None:
        try:
            result = work()
        except BaseException as e:
            settle(done.set_exception, e)
        else:
            settle(done.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return await done


async def together(main: Coroutine[Any, Any, Any], beside: Sequence[Awaitable[Any]]) -> Any:
    """Run ``main`` to its end, and the others concurrently until then. Raises the first exception of any, and cancels
    the rest; the others may return early."""
    task = asyncio.ensure_future(main)
    pending = {task, *(asyncio.ensure_future(b) for b in beside)}
    try:
        while not task.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for d in done:
                d.result()
        return task.result()
    finally:
        await cancelled(pending)


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


async def end_of_first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of ``waits`` ends, and cancel the others. Raises its exception."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancelled(tasks)
