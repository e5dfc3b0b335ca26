"""Worker process of a reward function: contains its hangs and crashes.

`asyncrl.rollouter.rewards.pool` starts it as ``python -m asyncrl.rollouter.rewards.worker``. It exchanges frames (an
8-byte length, then a pickle) over its original standard input and output; what the reward function prints goes to
standard error. It imports nothing heavy besides the reward function's module::

    pool → worker   (function, args)                      once
    worker → pool   None, or why the function does not load
    pool → worker   [(prompt, response), ...]             per group
    worker → pool   [(reward, metrics, error), ...]       error is None or a message

It exits at the end of its input; on Linux the kernel kills it when its parent dies, even in the middle of a call.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import os
import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from asyncrl.plugins.registry import UnknownPart
from asyncrl.processes.parent import end_with_parent
from asyncrl.rollouter.rewards.base import RewardFunction, find_reward
from asyncrl.types.prompts import Prompt

FRAME = struct.Struct("<Q")

#: (reward, metrics, error message or None); plain values: this module is ``__main__``, which the pool cannot unpickle
Outcome = tuple[float, dict[str, float], str | None]


async def score_group(
    function: RewardFunction, path: str, args: Mapping[str, Any], items: Sequence[tuple[Prompt, str]]
) -> list[Outcome]:
    """Score (prompt, response) pairs in order; calls of an ``async`` function run concurrently.

    A call that raises or returns no finite number yields an outcome whose error names the function."""

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
    """(reward, metrics) from a reward function's result: a number, or a dict with ``reward`` and more numbers.

    Raises TypeError or ValueError for anything else, including non-finite numbers."""
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
    """Raises EOFError when the other end has closed."""
    header = stream.read(FRAME.size)
    if len(header) < FRAME.size:
        raise EOFError
    payload = stream.read(FRAME.unpack(header)[0])
    return pickle.loads(payload)


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Reserve the two pipes for frames: the reward function reads from the null device and prints to standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def main() -> None:
    end_with_parent(int(sys.argv[1]))  # a reward that hangs never sees its input close
    requests, replies = _take_standard_streams()
    path, args = read_frame(requests)
    try:
        function = find_reward(path)
    except UnknownPart as e:
        write_frame(replies, str(e))
        return
    write_frame(replies, None)
    with asyncio.Runner() as runner:  # a single event loop, so that an async function can keep connections open
        while True:
            try:
                items = read_frame(requests)
            except EOFError:
                return
            write_frame(replies, runner.run(score_group(function, path, args, items)))


if __name__ == "__main__":
    main()
