"""Runs a reward function on groups of responses: the process whose code is not trusted.

`asyncrl.rollouter.rewards.keeper` starts it, with its limits set. It exchanges frames with the pool over a socket, and
imports nothing heavy besides the reward function's module::

    pool → worker   pickle: (function, args, time limit, address of sandboxes)   once
    worker → pool   JSON: what it takes besides, or a text why it does not load
    pool → worker   pickle: [Answer, ...]                 per group
    worker → pool   JSON: outcomes, see `asyncrl.rollouter.rewards.replies`

Requests may be pickles because the pool is trusted; prompts from Parquet files hold values that JSON has not.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import resource
import socket
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from asyncrl.plugins.registry import UnknownPart
from asyncrl.rollouter.rewards.base import COLUMN, Answer, RewardFunction, columns_of, find_reward, prepare, taken_by
from asyncrl.rollouter.rewards.replies import FRAME, Outcome, checked, one_line


def serve(connection: socket.socket) -> None:
    """Answer requests until the pool closes its end."""
    with connection, connection.makefile("rb") as requests, connection.makefile("wb") as replies:
        path, args, timeout_s, address = _read(requests)
        try:
            function = find_reward(path)
            prepare(function, args, timeout_s)
        except UnknownPart as e:
            _write(replies, one_line(str(e)))
            return
        taken = taken_by(function)
        _write(replies, taken + [f"{COLUMN}{name}" for name in columns_of(function)])
        if "sandboxes" in taken and address is not None:
            from asyncrl.sandbox.client import SandboxClient  # heavy

            args = {**args, "sandboxes": SandboxClient(*address)}
        with asyncio.Runner() as runner:  # a single event loop, so that an async function can keep connections open
            while True:
                try:
                    answers = _read(requests)
                except EOFError:
                    return
                _write(replies, runner.run(score_group(function, path, args, answers)))


async def score_group(
    function: RewardFunction, path: str, args: Mapping[str, Any], answers: Sequence[Answer]
) -> list[Outcome]:
    """Score answers in order; calls of an ``async`` function run concurrently.

    A call that raises or returns no finite number yields an outcome that names the function."""

    async def one(answer: Answer) -> Outcome:
        more = {} if answer.trajectory is None else {"trajectory": answer.trajectory}
        try:
            returned = function(answer.prompt, answer.response, **more, **args)
            if inspect.isawaitable(returned):
                returned = await returned
            return checked(returned)
        except MemoryError as e:
            most = resource.getrlimit(resource.RLIMIT_DATA)[0] // 1024**2
            problem = f"MemoryError: {e}; reward.memory_mb = {most}"
        except Exception as e:
            problem = f"{type(e).__name__}: {e}"
        return one_line(f"{path} on prompt {answer.prompt.prompt_id}: {problem}")

    return list(await asyncio.gather(*(one(answer) for answer in answers)))


def _read(requests: BinaryIO) -> Any:
    """Raises EOFError when the other end has closed."""
    header = requests.read(FRAME.size)
    if len(header) < FRAME.size:
        raise EOFError
    return pickle.loads(requests.read(FRAME.unpack(header)[0]))


def _write(replies: BinaryIO, value: Any) -> None:
    payload = json.dumps(value).encode()
    replies.write(FRAME.pack(len(payload)) + payload)
    replies.flush()
