"""Scores responses in killable worker processes: a reward function may hang, crash or return garbage.

::

    pool = RewardPool(config.reward)
    await pool.start()                                  # raises RewardError if the function does not load
    results = await pool.score([(prompt, text), ...])   # one call per group; results in the same order
    await pool.close()

A group goes to one worker in one message. A worker that times out or dies is killed and replaced. Failed samples are
retried once, one by one, so that a bad sample does not fail its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.config.schema import RewardConfig
from asyncrl.config.secrets import revealed
from asyncrl.rollouter.rewards.worker import FRAME
from asyncrl.types.prompts import Prompt

START_TIMEOUT_S = 120.0  # to import the reward function's module, however heavy

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
    """``config.workers`` processes; calls to `score` share them and may overlap."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers = [_Worker(config) for _ in range(config.workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._open = False

    async def start(self) -> None:
        """Start the workers. Raises RewardError if the function does not load; no worker is left running then."""
        problems = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        for problem in filter(None, problems):
            await self.close()
            raise problem
        self._open = True
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[RewardResult]:
        """Score (prompt, response text) pairs. Failures are returned as results, after one retry.

        Raises RewardError if the pool is not open, or if a replacement worker does not start."""
        if not items:
            return []
        results = await self._attempt(items)
        failed = [i for i, result in enumerate(results) if result.error is not None]
        retries = await asyncio.gather(*(self._attempt([items[i]]) for i in failed))
        for i, (result,) in zip(failed, retries):
            results[i] = result
        return results

    async def close(self) -> None:
        """Kill the workers; pending calls to `score` raise RewardError."""
        self._open = False
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def _attempt(self, items: Sequence[tuple[Prompt, str]]) -> list[RewardResult]:
        self._check_open()
        worker = await self._idle.get()
        try:
            self._check_open()
            return await worker.score(items)
        finally:
            if not self._open:  # closed meanwhile, possibly while a replacement was starting
                await worker.kill()
            self._idle.put_nowait(worker)  # a dead one restarts with its next group

    def _check_open(self) -> None:
        if not self._open:
            raise RewardError("the reward pool is not open: call start() first, and score() not after close()")


class _Worker:
    """One worker process at a time, and the frames exchanged with it."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncrl.rollouter.rewards.worker", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # so that it can import the same
            start_new_session=True,  # its own process group: a kill includes what the function started
        )
        function = self._config.function
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                problem = await self._exchange((function, revealed("reward.args", self._config.args)))
        except TimeoutError:
            problem = f"reward.function: {function} did not import within {START_TIMEOUT_S:g} s"
        except _WorkerDied:
            problem = f"reward.function: {function} ended its process with exit code {await self.kill()} on import"
        except BaseException:
            await self.kill()
            raise
        if problem is not None:
            await self.kill()
            raise RewardError(problem)

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[RewardResult]:
        if self._process is None:
            await self.start()
        function, timeout_s = self._config.function, self._config.timeout_s
        kind: ErrorKind
        try:
            async with asyncio.timeout(timeout_s):
                outcomes = await self._exchange(list(items))
        except TimeoutError:
            await self.kill()
            kind, problem = "reward_timeout", f"did not return within reward.timeout_s = {timeout_s:g} s"
        except _WorkerDied:
            kind, problem = "reward_error", f"ended its process with exit code {await self.kill()}"
        except BaseException:  # cancelled: nobody would read the reply, and the next call must not
            await self.kill()
            raise
        else:
            return [
                RewardResult(reward, metrics, None if error is None else "reward_error", error or "")
                for reward, metrics, error in outcomes
            ]
        message = f"{function} {problem} on {len(items)} response(s) to prompt {items[0][0].prompt_id}"
        return [RewardResult(0.0, {}, kind, message) for _ in items]

    async def kill(self) -> int | None:
        """Kill the process and its descendants; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return await process.wait()

    async def _exchange(self, value: Any) -> Any:
        """Send a frame and await the reply. Raises _WorkerDied if the process ends instead."""
        assert self._process is not None
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        payload = pickle.dumps(value)
        try:
            requests.write(FRAME.pack(len(payload)) + payload)
            await requests.drain()
            (length,) = FRAME.unpack(await replies.readexactly(FRAME.size))
            return pickle.loads(await replies.readexactly(length))
        except (ConnectionError, asyncio.IncompleteReadError):
            raise _WorkerDied from None


class _WorkerDied(Exception):
    pass
