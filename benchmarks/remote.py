"""Objects in separate processes whose coroutines are called over a pipe: actors without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "xxhash", "asyncrl.param_sync.replica_session", "asyncrl.param_sync.session"])

_HALTED = frozenset("TZX")
_HALT_S = 30.0


class Remote:
    """An object in its own process: every method called here is a coroutine that runs there."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self.process.start()
        theirs.close()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._answered)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            self._waiting[self._calls] = future = asyncio.get_running_loop().create_future()
            self._pipe.send((self._calls, method, args, kwargs))
            return await future

        return call

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. After SIGKILL and SIGSTOP, wait until no thread of the process runs: on a busy machine the
        signal takes effect later, and other threads may run until then."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number in (signal.SIGKILL, signal.SIGSTOP):
            deadline = time.monotonic() + _HALT_S
            while not _states(self.process.pid) <= _HALTED:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"process {self.process.pid} still runs {_HALT_S} s after {number.name}")
                time.sleep(0.001)

    def end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
        self.process.kill()
        self.process.join()

    def _answered(self) -> None:
        try:
            number, answer, error = self._pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ConnectionError("its process has ended"))
            return
        future = self._waiting.pop(number)
        if future.done():
            return
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)


def _states(pid: int) -> set[str]:
    """States of the process's threads, as letters of proc(5)."""
    states = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
                states.add(stat.rpartition(")")[2].split()[0])
    return states


def _serve(pipe: Any, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    asyncio.run(_serve_calls(pipe, make, args))


async def _serve_calls(pipe: Any, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    served, running = make(*args), set()

    async def answer(number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            pipe.send((number, await getattr(served, method)(*args, **kwargs), None))
        except Exception as error:
            pipe.send((number, None, error))

    # A separate executor: the loop's default one would add a thread if a call arrived before the last one was finished.
    reading, loop = ThreadPoolExecutor(1), asyncio.get_running_loop()
    while True:
        try:
            call = await loop.run_in_executor(reading, pipe.recv)
        except EOFError:
            os._exit(0)
        task = asyncio.create_task(answer(*call))
        running.add(task)
        task.add_done_callback(running.discard)
