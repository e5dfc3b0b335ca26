"""The agent loop of samples whose agent calls the endpoint: serves its calls, then builds the sample that it made."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from asyncrl.rollouter.agents.base import Completion, Generate, GenerationFailed, LimitReached
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.rollouter.endpoint.link import (
    CallError,
    EndedSession,
    EndpointDied,
    EndpointLink,
    FinishedCall,
    KnownCall,
    RestartedSession,
    Session,
    StartedCall,
)
from asyncrl.rollouter.endpoint.token_path import TokenPath
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason, Sample

T = TypeVar("T")


class AgentFailure(GenerationFailed):
    """The sample's agent failed; counted under its reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason  # type: ignore[misc]


class EndpointLoop:
    """An `asyncrl.rollouter.agents.base.AgentLoop`. What the agent did survives this process, in the endpoint."""

    def __init__(self, link: EndpointLink, max_response_tokens: int) -> None:
        self._link, self._max_response_tokens = link, max_response_tokens

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample:
        """Raises AgentFailure, and the errors of ``generate``."""
        while True:
            try:
                return await self._run(prompt, index, generate)
            except EndpointDied:  # and the agent with it
                generate.restart()

    async def _run(self, prompt: Prompt, index: int, generate: Generate) -> Sample:
        seconds = generate.seconds_left
        seconds_left = None if math.isinf(seconds) else seconds
        session, events = self._link.open(f"{generate.key:016x}", prompt, index, seconds_left)
        served = _ServedCalls(self._link, session, generate, self._max_response_tokens)
        try:
            while True:
                event = await served.unless_failed(events.get())
                match event:
                    case StartedCall():
                        served.start(event)
                    case KnownCall():
                        served.restore(event)
                    case RestartedSession():
                        await served.cancel()
                        generate.restart()
                    case EndpointDied():
                        raise event
                    case EndedSession():
                        return served.sample(index, event)
        finally:
            self._link.end(session)
            await served.cancel()


class _ServedCalls:
    """Calls of one session, and the completions of those that are finished, by number."""

    def __init__(self, link: EndpointLink, session: Session, generate: Generate, max_response_tokens: int) -> None:
        self._link, self._session, self._generate = link, session, generate
        self._max_response_tokens = max_response_tokens
        self._running: dict[int, asyncio.Task[None]] = {}
        self._completions: dict[int, Completion] = {}
        self._ends: dict[int, tuple[TokenPath, int]] = {}  # prompt and answer, and the sequence's prefix
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def unless_failed(self, waits: Coroutine[Any, Any, T]) -> T:
        """Result of ``waits``, or the first error of a call."""
        waiting = asyncio.create_task(waits)
        try:
            waits_for: list[asyncio.Future[Any]] = [waiting, self._failed]
            await asyncio.wait(waits_for, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return waiting.result()
        finally:
            waiting.cancel()

    def start(self, call: StartedCall) -> None:
        self._running[call.number] = asyncio.create_task(self._serve(call))

    def restore(self, known: KnownCall) -> None:
        call, completion = known.call, known.completion
        prompt, prefix = self._prompt(call)
        self._ends[call.number] = TokenPath(completion.tokens, prompt), prefix
        response = prompt.array()[prefix:]
        self._completions[call.number] = self._generate.restore(
            response, completion, call.max_tokens, prefix, call.stop, call.sampling
        )

    async def cancel(self) -> None:
        tasks, self._running, self._completions, self._ends = list(self._running.values()), {}, {}, {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._failed.done():
            self._failed.exception()  # was raised, or comes too late for anybody
            self._failed = asyncio.get_running_loop().create_future()

    async def _serve(self, call: StartedCall) -> None:
        result: Completion | CallError
        try:
            prompt, prefix = self._prompt(call)
            response = prompt.array()[prefix:]
            result = await self._generate(response, call.max_tokens, prefix, call.stop, call.sampling)
            self._completions[call.number] = result
            self._ends[call.number] = TokenPath(result.tokens, prompt), prefix
        except LimitReached as e:
            if e.finish is FinishReason.LENGTH:
                most = self._max_response_tokens + prefix - 1
                # with what clients look for that shorten a conversation
                message = (
                    f"prompt is too long: {len(prompt)} tokens > {most} maximum; the maximum context length is {most} "
                    f"tokens for a prompt: rollout.max_response_tokens = {self._max_response_tokens} may follow the "
                    "task's own prompt, an answer included"
                )
                result = CallError("context", message)
            else:
                result = CallError("limit", str(e), e.finish)
        except Exception as e:
            # a call with a grammar, which is never trained, may be impossible by itself
            if type(e) is not GenerationFailed or "grammar" not in (call.sampling or {}):
                if not self._failed.done():
                    self._failed.set_exception(e)
                return
            result = CallError("refused", str(e))
        finally:
            self._running.pop(call.number, None)
        self._link.answer(FinishedCall(self._session.address, call.number, result))

    def _prompt(self, call: StartedCall) -> tuple[TokenPath, int]:
        """Its prompt, and how many tokens of the group's prompt its sequence begins with."""
        if call.after is None:
            return TokenPath(call.tokens), self._prefix(call.tokens)
        before, prefix = self._ends[call.after]
        return TokenPath(call.tokens, before), prefix

    def _prefix(self, first: np.ndarray) -> int:
        """The number of tokens that the first prompt of a sequence shares with the group's prompt."""
        prompt = self._generate.prompt_tokens
        most = min(len(prompt), len(first))
        different = np.flatnonzero(prompt[:most] != first[:most])
        return int(different[0]) if len(different) else most

    def sample(self, index: int, ended: EndedSession) -> Sample:
        if ended.failure is not None:
            raise AgentFailure(*ended.failure)
        root: TrajectoryBuilder | None = None
        last: FinishReason | None = None
        for plan in ended.plan:
            first = plan[0]
            assert isinstance(first, np.ndarray)
            prefix = self._prefix(first)
            builder = TrajectoryBuilder(prefix) if root is None else root.start(prefix)
            root = root or builder
            builder.append(first[prefix:])
            for part in plan[1:]:
                builder.append(part if isinstance(part, np.ndarray) else self._completions[part])
            last = last if builder.finish is None else builder.finish
        if root is None or last is None:
            raise AgentFailure("nothing_trained", "no answer of the policy is trained: it sampled otherwise for all")
        root.messages.extend(ended.messages)
        finish = last if ended.finish is None else ended.finish
        sample = root.sample(index, finish, ended.reward, whole=True)  # a masked last answer is scored, too
        sample.metrics = dict(ended.metrics)
        return sample
