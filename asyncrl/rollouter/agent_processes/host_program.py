"""Runs agents: a program of the standard library alone (CPython 3.10 or newer), for any environment.

``python host_program.py DESCRIPTOR``, a socket on which lines of JSON pass, so that agents may print::

    parent → host   {"path": "package.module:function", "args": {...}}     once
    host → parent   {"ready": true}, or {"problem": why it does not load or start}
    parent → host   {"run": id, "task": fields of AgentTask}               per sample; they run concurrently
    host → parent   {"id": id, "result": ...}, {"id": id, "bad": what was returned instead of one},
                    or {"id": id, "error": "Type: message", "traceback": "...", "infra": whether the fault is not its}
    parent → host   {"cancel": id}                                         ends a coroutine; drops a thread's result
    parent → host   {"ping": n}
    host → parent   {"pong": n}                                            from the event loop in which coroutines run

The function is called as ``function(task, **args)``: a coroutine function in the event loop, any other in a thread per
sample. It returns None, a number (the sample's reward), or ``{"reward": number, "metrics": {name: number}}``, where
each may be left out. An exception with a true attribute ``infra`` says that what it needs has failed, such as a server.
A function that has ``prepare`` is asked ``prepare(**args)`` before its first task, and raises ValueError for arguments
that it cannot serve.

In place of a module the path may name an adapter, ``verifiers:TASKSET`` or ``openenv:SERVER``: a file of the folder
``adapters``, whose ``Agent`` is made of the rest of the path and the arguments, started, and then called.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # nothing in this file's folder should hide a module of the agent's
    sys.path = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import socket
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

MAX_RESULT_BYTES = 64 * 1024
MAX_TEXT = 8000  # characters of an error or a traceback
ADAPTERS = ("verifiers", "openenv")
_FOLDER = os.path.dirname(os.path.abspath(__file__))


@dataclass
class AgentTask:
    """A sample to make. OpenAI's clients take ``base_url``, which ends in /v1; Anthropic's ``anthropic_base_url``. The
    ``api_key`` is of this sample alone: calls with it are its turns."""

    uid: str  # of the prompt
    index: int  # of the sample among those of its prompt
    messages: list[dict[str, Any]]  # chat messages of the prompt
    text: str | None  # the prompt as it is, if it has no messages
    answer: Any  # the prompt's expected answer
    model: str
    base_url: str
    anthropic_base_url: str
    api_key: str = field(repr=False)
    data: dict[str, Any] = field(default_factory=dict)  # the prompt's further columns
    seconds: float | None = None  # time limit


class _Unusable(Exception):
    """The function does not load; the message is one line."""


def _load(path: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not (module and name):
        raise _Unusable(f"expected an import path such as package.module:function, found {path!r}")
    try:
        found = importlib.import_module(module)
    except BaseException as e:  # a module may raise anything
        message = " ".join(str(e).split())[:MAX_TEXT]
        raise _Unusable(f"{path}: module {module} does not import ({type(e).__name__}: {message})") from e
    for part in name.split("."):
        if not hasattr(found, part):
            raise _Unusable(f"{path}: module {module} has no {name}")
        found = getattr(found, part)
    if not callable(found) or isinstance(found, type):
        raise _Unusable(f"{path} is a {'class' if isinstance(found, type) else type(found).__name__}, not a function")
    with contextlib.suppress(ValueError):  # some functions of C have no signature
        try:
            inspect.signature(found).bind(None, **args)
        except TypeError as e:
            raise _Unusable(f"{path} cannot be called with a task and the arguments {sorted(args)}: {e}") from e
    if prepare := getattr(found, "prepare", None):
        try:
            prepare(**args)
        except ValueError as e:
            raise _Unusable(f"{path}: {' '.join(str(e).split())[:MAX_TEXT]}") from e
    return found


def _adapter(path: str, args: Mapping[str, Any]) -> Any:
    """A started agent is called with a task."""
    name, _, target = path.partition(":")
    spec = importlib.util.spec_from_file_location(f"asyncrl_{name}", os.path.join(_FOLDER, "adapters", f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _refusing(path):
        spec.loader.exec_module(module)
        return module.Agent(target, **args)


@contextlib.contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Raises _Unusable for any exception."""
    try:
        yield
    except BaseException as e:
        raise _Unusable(f"{path}: {type(e).__name__}: {' '.join(str(e).split())[:MAX_TEXT]}") from e


class _Host:
    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any], connection: socket.socket) -> None:
        self._function, self._args, self._connection = function, args, connection
        call = getattr(function, "__call__", None)  # noqa: B004 - an instance may have an async one
        self._in_loop = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        self._samples: dict[int, asyncio.Task[None]] = {}

    async def serve(self, start: Callable[[], Awaitable[None]] | None) -> None:
        """Run until the parent closes its end. ``start``: before the first sample; raises _Unusable."""
        if start is not None:
            await start()
        self._connection.sendall(_line({"ready": True}))
        frames, self._replies = await asyncio.open_connection(sock=self._connection, limit=1 << 30)
        with contextlib.suppress(ConnectionError):
            while line := await frames.readline():
                frame = json.loads(line)
                if "run" in frame:
                    sample = self._run(frame["run"], AgentTask(**frame["task"]))
                    self._samples[frame["run"]] = asyncio.create_task(sample)
                elif "cancel" in frame:
                    if sample_task := self._samples.pop(frame["cancel"], None):
                        sample_task.cancel()
                else:
                    self._replies.write(_line({"pong": frame["ping"]}))
        os._exit(0)

    async def _run(self, number: int, task: AgentTask) -> None:
        reply: dict[str, Any]
        try:
            call = lambda: self._function(task, **self._args)
            result = call() if self._in_loop else await _in_thread(call)
            if inspect.isawaitable(result):
                result = await result
            reply = _reply(result)
        except BaseException as e:  # SystemExit would end all samples
            trace = "".join(traceback.format_exception(type(e), e, e.__traceback__))[-MAX_TEXT:]
            infra = bool(getattr(e, "infra", False))
            reply = {"error": f"{type(e).__name__}: {_text_of(e)}"[:MAX_TEXT], "traceback": trace, "infra": infra}
        if self._samples.pop(number, None):  # else it was cancelled
            self._replies.write(_line({"id": number, **reply}))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as e:
        return f"(its text cannot be shown: {type(e).__name__})"


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Result of ``work`` in a thread of its own. An executor has few threads, and waits for them at exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = work(), None
        except BaseException as e:
            outcome = None, e
        loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(outcome))

    threading.Thread(target=run, daemon=True).start()
    result, problem = await done
    if problem is not None:
        raise problem
    return result


def _reply(result: Any) -> dict[str, Any]:
    try:
        encoded = json.dumps(result, default=_number)
    except (TypeError, ValueError, RecursionError) as e:
        return {"bad": f"a {type(result).__name__} that JSON cannot hold ({e})"[:MAX_TEXT]}
    if len(encoded) > MAX_RESULT_BYTES:
        return {"bad": f"a {type(result).__name__} of {len(encoded)} bytes of JSON, more than {MAX_RESULT_BYTES}"}
    return {"result": result}


def _number(value: Any) -> float:
    """Numbers of NumPy and PyTorch."""
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"found a {type(value).__name__}")


def _line(frame: Mapping[str, Any]) -> bytes:
    return json.dumps(frame, default=_number).encode() + b"\n"


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # what an agent starts should not hold it open
    connection = socket.socket(fileno=descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    begin = json.loads(connection.makefile("rb").readline())
    path, args = begin["path"], begin["args"]
    try:
        if path.partition(":")[0] in ADAPTERS:
            agent = _adapter(path, args)
            asyncio.run(_Host(agent, {}, connection).serve(partial(_start, path, agent)))
        else:
            asyncio.run(_Host(_load(path, args), args, connection).serve(None))
    except _Unusable as e:
        connection.sendall(_line({"problem": str(e)}))


async def _start(path: str, agent: Any) -> None:
    with _refusing(path):
        await agent.start()


if __name__ == "__main__":
    main()
