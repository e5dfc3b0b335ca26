"""Scores responses in worker processes that are not trusted: a reward function may hang, crash, leak or return garbage.

::

    pool = RewardPool(config.reward)
    await pool.start()                                  # raises RewardError if the function does not load
    results = await pool.score([Answer(prompt, text), ...])   # one call per group; results in the same order
    await pool.close()

A group goes to one worker in one message. A worker that times out, dies, exceeds a limit or sends anything but a reply
is killed with all that it started, and replaced. Failed samples are retried once, one by one, so that a bad sample does
not fail its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from asyncrl.config.schema import RewardConfig
from asyncrl.config.secrets import revealed
from asyncrl.rollouter.rewards.base import Answer
from asyncrl.rollouter.rewards.environment import unset_secrets, worker_environment
from asyncrl.rollouter.rewards.keeper import CALL
from asyncrl.rollouter.rewards.limits import Limits
from asyncrl.rollouter.rewards.replies import FRAME, MAX_OUTCOME_BYTES, BadReply, Outcome, decode, decode_start
from asyncrl.sandbox.service import Address

START_TIMEOUT_S = 120.0  # to import the reward function's module, however heavy
KILL_TIMEOUT_S = 15.0  # for the keeper to kill what is below it

log = logging.getLogger(__name__)

ErrorKind = Literal["reward_error", "reward_timeout"]


class RewardError(RuntimeError):
    """The reward function does not load, or the pool is closed; a retry would not help."""


@dataclass(frozen=True)
class RewardResult:
    """``error`` is None, or the kind of failure, detailed in ``message``."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    error: ErrorKind | None = None
    message: str = ""


class RewardPool:
    """``config.workers`` processes; calls to `score` share them and may overlap. ``sandboxes``: address of the run's,
    for a function that takes them; they need not be served before `start` returns. Without ``reveal`` workers get the
    names of secrets in place of their values, enough to load the function."""

    def __init__(self, config: RewardConfig, sandboxes: Address | None = None, reveal: bool = True) -> None:
        self._config = config
        count = config.workers if config.has_function else 0
        self._workers = [_Worker(config, sandboxes, reveal) for _ in range(count)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._open = False

    async def start(self) -> None:
        """Start the workers, if there is a function. Raises RewardError if it does not load or a secret is missing; no
        worker is left running then."""
        if missing := unset_secrets(self._config.secrets):
            raise RewardError(missing)
        problems = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        for problem in filter(None, problems):
            await self.close()
            raise problem
        self._open = True
        for worker in self._workers:
            self._idle.put_nowait(worker)

    @property
    def taken(self) -> frozenset[str]:
        """What the function takes, see `asyncrl.rollouter.rewards.base.TAKEN` and ``COLUMN`` there; known after
        ``start``."""
        return frozenset().union(*(worker.taken for worker in self._workers))

    @property
    def takes_trajectories(self) -> bool:
        """True if the function wants `Answer.trajectory`; known after ``start``."""
        return "trajectory" in self.taken

    async def score(self, answers: Sequence[Answer]) -> list[RewardResult]:
        """Score the answers to one prompt. Failures are returned as results, after one retry.

        Raises RewardError if the pool is not open, or if a replacement worker does not start."""
        if not answers:
            return []
        results = await self._attempt(answers)
        failed = [i for i, result in enumerate(results) if result.error is not None]
        retries = await asyncio.gather(*(self._attempt([answers[i]]) for i in failed))
        for i, (result,) in zip(failed, retries):
            results[i] = result
        return results

    async def close(self) -> None:
        """Kill the workers; pending calls to `score` raise RewardError."""
        self._open = False
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def _attempt(self, answers: Sequence[Answer]) -> list[RewardResult]:
        self._check_open()
        worker = await self._idle.get()
        try:
            self._check_open()
            return await worker.score(answers)
        finally:
            if not self._open:  # closed meanwhile, possibly while a replacement was starting
                await worker.kill()
            self._idle.put_nowait(worker)  # a dead one restarts with its next group

    def _check_open(self) -> None:
        if not self._open:
            raise RewardError("the reward pool is not open: call start() first, and score() not after close()")


def tried(config: RewardConfig) -> frozenset[str]:
    """What the reward function takes, found in a worker. Needs no event loop, nor minds one. Raises RewardError if it
    does not load."""

    async def start() -> frozenset[str]:
        pool = RewardPool(replace(config, workers=1), reveal=False)  # secrets may be set elsewhere only
        await pool.start()
        await pool.close()
        return pool.taken

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, start()).result()


class _Worker:
    """One worker process at a time, below its keeper, and the frames exchanged with it."""

    def __init__(self, config: RewardConfig, sandboxes: Address | None, reveal: bool) -> None:
        self._config, self._sandboxes, self._reveal = config, sandboxes, reveal
        self.taken: list[str] = []
        self._keeper: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        function = self._config.function
        args = revealed("reward.args", self._config.args) if self._reveal else self._config.args
        begin = function, args, self._config.timeout_s, self._sandboxes
        try:
            await self._start_keeper()
            started = decode_start(await self._exchange(begin, START_TIMEOUT_S, MAX_OUTCOME_BYTES))
            if isinstance(started, list):
                self.taken = started
                return
            problem = started
        except TimeoutError:
            problem = f"reward.function: {function} did not import within {START_TIMEOUT_S:g} s"
        except _WorkerDied:
            problem = f"reward.function: {function} {await self.kill()} on import"
        except BadReply as e:
            problem = f"reward.function: {function} {e} on import"
        except BaseException:
            await self.kill()
            raise
        await self.kill()
        raise RewardError(problem)

    async def score(self, answers: Sequence[Answer]) -> list[RewardResult]:
        function, timeout_s = self._config.function, self._config.timeout_s
        if self._keeper is not None and self._keeper.returncode is not None:
            log.warning("%s %s between two groups; its worker is replaced", function, await self.kill())
        if self._keeper is None:
            await self.start()
        kind: ErrorKind = "reward_error"
        try:
            reply = await self._exchange(list(answers), timeout_s, MAX_OUTCOME_BYTES * len(answers))
            return [_result(outcome) for outcome in decode(reply, len(answers))]
        except TimeoutError:
            await self.kill()
            kind, problem = "reward_timeout", f"did not return within reward.timeout_s = {timeout_s:g} s"
        except _WorkerDied:
            problem = await self.kill()
        except BadReply as e:
            await self.kill()
            problem = str(e)
        except BaseException:  # cancelled: nobody would read the reply, and the next call must not
            await self.kill()
            raise
        message = f"{function} {problem} on {len(answers)} response(s) to prompt {answers[0].prompt.prompt_id}"
        return [RewardResult(0.0, {}, kind, message) for _ in answers]

    async def kill(self) -> str:
        """Kill the worker with all that it started. Returns why it had ended, as the end of a sentence about it."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return "was killed"
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        keeper.stdin.close()
        why = b""
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                why = await keeper.stdout.read()
        except TimeoutError:
            keeper.kill()  # it is stopped or stuck; its stand-in does the rest
        finally:
            self._requests.transport.abort()
        await keeper.wait()
        return why.decode() or "had its keeper killed"

    async def _start_keeper(self) -> None:
        config = self._config
        limits = json.dumps(asdict(Limits(config.memory_mb, config.file_mb)))
        folder = tempfile.mkdtemp(prefix="asyncrl-reward-")
        ours, theirs = socket.socketpair()
        self._replies, self._requests = await asyncio.open_connection(sock=ours)
        try:
            self._keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "asyncrl.rollouter.rewards.keeper"),
                *(str(theirs.fileno()), folder, limits),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=worker_environment(config.secrets, folder),
                cwd=folder,
                process_group=0,  # signals to ours do not reach it
            )
        except BaseException:
            self._requests.transport.abort()
            with contextlib.suppress(OSError):
                os.rmdir(folder)
            raise
        finally:
            theirs.close()

    async def _exchange(self, request: Any, limit_s: float, most_bytes: int) -> bytes:
        """Send a request and await the reply. Raises TimeoutError, BadReply for one of more than ``most_bytes``, and
        _WorkerDied if the process ends instead."""
        assert self._keeper is not None
        calls = self._keeper.stdin
        assert calls is not None
        payload = pickle.dumps(request)
        try:
            async with asyncio.timeout(limit_s):
                calls.write(CALL.pack(limit_s))
                self._requests.write(FRAME.pack(len(payload)) + payload)
                await self._requests.drain()
                (length,) = FRAME.unpack(await self._replies.readexactly(FRAME.size))
                if length > most_bytes:
                    raise BadReply(f"sent a reply of {length} bytes, more than the {most_bytes} that it may have")
                reply = await self._replies.readexactly(length)
        except (ConnectionError, asyncio.IncompleteReadError):
            raise _WorkerDied from None
        calls.write(CALL.pack(0.0))
        return reply


def _result(outcome: Outcome) -> RewardResult:
    if isinstance(outcome, str):
        return RewardResult(0.0, {}, "reward_error", outcome)
    reward = outcome.pop("reward")
    return RewardResult(reward, outcome)


class _WorkerDied(Exception):
    pass
