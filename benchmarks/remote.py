"""Objects in processes of their own, whose coroutines are called over a pipe: actors without Ray."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "xxhash", "asyncrl.param_sync.endpoint", "asyncrl.param_sync.session"])


class Remote:
    """An object in a process of its own: any method called here is a coroutine that runs there."""

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
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

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

    # Of its own: the loop's threads grow in number by chance, when the next call comes before the last one is put away.
    reading, loop = ThreadPoolExecutor(1), asyncio.get_running_loop()
    while True:
        try:
            call = await loop.run_in_executor(reading, pipe.recv)
        except EOFError:
            os._exit(0)
        task = asyncio.create_task(answer(*call))
        running.add(task)
        task.add_done_callback(running.discard)
