"""The process that runs a reward function, so that a hang or a crash in it costs one worker and nothing else.

It is started by `asyncrl.rollouter.rewards.pool` as ``python -m asyncrl.rollouter.rewards.worker`` and speaks frames
(an 8-byte length, then a pickle) on what were its standard input and output; whatever the reward function prints goes
to standard error. It imports the reward function's module and nothing heavy besides::

    pool → worker   (function, args)                      once
    worker → pool   None, or why the function cannot be had
    pool → worker   [(prompt, response), ...]             per group
    worker → pool   [(reward, metrics, error), ...]       error is None, or says what went wrong

It ends when its input does, and on Linux the kernel ends it with its parent even amid a call.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import math
import numbers
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from asyncrl.sample import Prompt

FRAME = struct.Struct("<Q")

#: (reward, metrics, error message or None): plain values, as this module is ``__main__`` where they are pickled
Outcome = tuple[float, dict[str, float], str | None]
RewardFunction = Callable[..., Any]

_PR_SET_PDEATHSIG = 1


def load_function(path: str) -> RewardFunction:
    """What ``package.module:function`` names. Raises ValueError or TypeError, or what the import raises."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"expected an import path like package.module:function, found {path!r}")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{path} is a {type(function).__name__}, expected a function")
    return function


async def score_group(
    function: RewardFunction, path: str, args: Mapping[str, Any], items: Sequence[tuple[Prompt, str]]
) -> list[Outcome]:
    """Score (prompt, response) pairs in order; an ``async`` function's calls run concurrently.

    A call that raises, or returns no finite number, gives an outcome with an error that names the function."""

    async def one(prompt: Prompt, response: str) -> Outcome:
        try:
            returned = function(prompt, response, **args)
            if inspect.isawaitable(returned):
                returned = await returned
            return (*checked(returned), None)
        except Exception as e:
            return 0.0, {}, f"{path} on prompt {prompt.prompt_id}: {type(e).__name__}: {e}"

    return list(await asyncio.gather(*(one(*item) for item in items)))


def checked(returned: Any) -> tuple[float, dict[str, float]]:
    """(reward, metrics) of what a reward function returned: a number, or a dict with ``reward`` and more numbers.

    Raises TypeError or ValueError for anything else, non-finite numbers included."""
    values = returned if isinstance(returned, Mapping) else {"reward": returned}
    if "reward" not in values:
        raise ValueError(f"returned a dict without 'reward', its keys are {sorted(map(str, values))}")
    for name, value in values.items():
        if not isinstance(value, numbers.Real):
            raise TypeError(f"returned {name!r} = {value!r} ({type(value).__name__}), expected a number")
        if not math.isfinite(value):
            raise ValueError(f"returned {name!r} = {value}, expected a finite number")
    metrics = {str(name): float(value) for name, value in values.items()}
    return metrics.pop("reward"), metrics


def write_frame(stream: BinaryIO, value: Any) -> None:
    payload = pickle.dumps(value)
    stream.write(FRAME.pack(len(payload)) + payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any:
    """Raises EOFError when the other end is gone."""
    header = stream.read(FRAME.size)
    if len(header) < FRAME.size:
        raise EOFError
    payload = stream.read(FRAME.unpack(header)[0])
    return pickle.loads(payload)


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends: a reward that hangs never sees its input close."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keep the two pipes for frames and put harmless ones in their place, for what the reward function reads and
    prints."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def main() -> None:
    _end_with_parent(parent=int(sys.argv[1]))
    requests, replies = _take_standard_streams()
    path, args = read_frame(requests)
    try:
        function = load_function(path)
    except Exception as e:
        write_frame(replies, f"{type(e).__name__}: {e}")
        return
    write_frame(replies, None)
    with asyncio.Runner() as runner:  # one loop for good, so that an async function may keep its connections
        while True:
            try:
                items = read_frame(requests)
            except EOFError:
                return
            write_frame(replies, runner.run(score_group(function, path, args, items)))


if __name__ == "__main__":
    main()
