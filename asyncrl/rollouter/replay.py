"""The ``generate`` of agent loops: records every call, answers repeated calls from the record, and keeps the limits.

An agent loop that runs again after a crash repeats the calls of its first run. Those are replayed instead of sampled
again, and calls that were under way continue from the tokens they had.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.config.schema import RolloutConfig
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import Completion, GenerationFailed, LimitReached
from asyncrl.rollouter.agents.provenance import SampledCall, tokens_digest, untrained_digest
from asyncrl.rollouter.agents.watch import AgentWatch
from asyncrl.rollouter.engines.base import CONSTRAINTS, ENGINES, Request
from asyncrl.rollouter.partial import GenerateCall, GeneratedTokens, PartialSample
from asyncrl.rollouter.router import CannotContinue, Router
from asyncrl.rollouter.sampling import call_key, limits_digest
from asyncrl.types.samples import FinishReason


class ReplayedGenerate:
    """Implements `asyncrl.rollouter.agents.base.Generate` for one run of an agent loop; ``sample`` outlives it.

    ``prompt`` is a request with the prompt's tokens only, whose id names the sample. With ``one_version`` a call starts
    again rather than mix tokens of two policy versions. The limit of time counts from now on."""

    def __init__(
        self,
        router: Router,
        sample: PartialSample,
        prompt: Request,
        limits: RolloutConfig,
        one_version: bool,
        watch: AgentWatch,
        recorder: Recorder,
    ) -> None:
        self._router, self._sample, self._prompt, self._one_version = router, sample, prompt, one_version
        self._limits, self._watch, self._recorder = limits, watch, recorder
        self._until_s = now_s() + (limits.max_sample_s or math.inf)
        self._claimed: list[GenerateCall] = []  # calls of the record that this run has made
        self._unsaved: list[GenerateCall] = []  # those whose results it has
        self._running: set[asyncio.Task[Any]] = set()  # tasks that wait for a call
        self._closed = False
        self.sampled: list[SampledCall] = []  # all calls whose results the loop has
        self._restarted = False
        self._returned: tuple[int, int, float] | None  # by the last call: its tokens, all tokens then, and when
        self._begin()

    @property
    def key(self) -> int:
        return self._prompt.key

    @property
    def prompt_tokens(self) -> np.ndarray:
        return self._prompt.tokens

    @property
    def state(self) -> bytes | None:
        return self._sample.state

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._until_s - now_s())

    def save(self, state: bytes) -> None:
        self._sample.save(state, self._unsaved)
        self._unsaved = []

    def close(self) -> None:
        """The sample has ended: cancel what a loop has left running, and refuse further calls."""
        self._closed = True
        self._turn_taken(None)
        for task in self._running:
            task.cancel()
        if self._restarted:
            left_out = [c for c in self._sample.calls if not any(c is other for other in self._claimed)]
            self._recorder.count("rollout/agent/untrained_tokens/restarted", sum(c.output.count for c in left_out))

    def restart(self) -> None:
        self._restarted = True
        self._begin()

    def _turn_taken(self, context: int | None) -> None:
        """The loop calls again, with so many tokens; None: it has ended, or had called before."""
        if self._returned is not None:
            sampled, end, at_s = self._returned
            read, waited_s = (0, 0.0) if context is None else (max(0, context - end), now_s() - at_s)
            self._sample.turns.append((sampled, read, waited_s))
            self._returned = None

    def _begin(self) -> None:
        self._sample.turns, self._returned = [], None
        saved = self._sample.saved_calls
        self.sampled = [SampledCall(call.start, call.context, call.tokens, call.result) for call in saved]
        self._claimed, self._unsaved = [], []

    def restore(
        self,
        response: np.ndarray,
        completion: Completion,
        max_new_tokens: int | None = None,
        prefix: int | None = None,
        stop_strings: Sequence[str] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> Completion:
        context, _ = self._context(response, prefix)
        digest, limits = _digest(context, sampling), limits_digest(max_new_tokens, stop_strings)
        unclaimed = self._unclaimed(digest, limits)
        finished = (c for c in unclaimed if c.finish is not None and c.output.equals(completion))
        if (call := next(finished, None)) is None:
            call = next((c for c in unclaimed if c.finish is None), None)
            call = call or self._sample.begin(digest, len(context), limits)
            self._sample.restore(call, completion)
        self._claimed.append(call)
        return self._result(call)

    async def __call__(
        self,
        response: np.ndarray,
        max_new_tokens: int | None = None,
        prefix: int | None = None,
        stop_strings: Sequence[str] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Raises GenerationFailed, LimitReached, or ValueError for a prefix that the prompt does not have."""
        if self._closed:
            raise GenerationFailed("a call of generate after its sample's end; expected run to wait for all its calls")
        engine = self._limits.engine.name
        if sampling and CONSTRAINTS & sampling.keys() and not ENGINES.find(engine).constrains:
            raise GenerationFailed(f"the {engine} engine serves neither grammars nor logit biases")
        context, shared = self._context(response, prefix)
        self._turn_taken(len(context))
        call = self._claim(
            _digest(context, sampling), len(context), limits_digest(max_new_tokens, stop_strings), len(response)
        )
        if call.finish is None:
            room = self._limits.max_response_tokens - len(response)
            first = len(context) == len(self.prompt_tokens) == shared and not call.ordinal and sampling is None
            changed = self._prompt.sampling
            if sampling or stop_strings:
                stops = tuple(dict.fromkeys([*changed.stop_strings, *stop_strings]))
                changed = dataclasses.replace(changed, **{**(sampling or {}), "stop_strings": stops})
            request = self._prompt._replace(
                tokens=context,
                shared_prefix=shared,
                # the answer to the plain prompt draws the numbers of a single-turn sample
                key=self._prompt.key if first else call_key(self._prompt.key, call.context, call.ordinal),
                max_new_tokens=room if max_new_tokens is None else min(max_new_tokens, room),
                sampling=changed,
            )
            await self._generate(call, request)
        return self._result(call)

    def _context(self, response: np.ndarray, prefix: int | None) -> tuple[np.ndarray, int]:
        """int32 [P + R]: what a call continues; and P, tokens of the prompt."""
        prompt = self._prompt.tokens
        if prefix is not None and not 0 <= prefix <= len(prompt):
            raise ValueError(f"prefix: expected 0 to {len(prompt)} tokens of the prompt, found {prefix}")
        shared = prompt[:prefix]
        context = np.concatenate([shared, np.asarray(response, np.int32)]) if len(response) else shared
        if not len(context):
            raise ValueError("a call of generate without any token; expected at least one, such as BOS")
        return context, len(shared)

    @property
    def _claimed_since(self) -> list[GenerateCall]:
        """Calls that this run has made and not saved."""
        recorded = set(map(id, self._sample.calls))
        return [call for call in self._claimed if id(call) in recorded]

    def _result(self, call: GenerateCall) -> Completion:
        self._unsaved.append(call)
        assert call.finish is not None
        completion = call.output.completion(call.finish)
        self._turn_taken(None)
        self._returned = call.output.count, call.start + call.output.count, now_s()
        self.sampled.append(SampledCall(call.start, call.context, call.output.count, completion))
        return completion

    def _unclaimed(self, context: int, limits: int) -> list[GenerateCall]:
        """Calls of the record with this context and these limits that this run has not made yet."""
        equal = [c for c in self._sample.calls if (c.context, c.limits) == (context, limits)]
        return [c for c in equal if not any(c is other for other in self._claimed)]

    def _claim(self, context: int, start: int, limits: int, response_tokens: int) -> GenerateCall:
        """The first unclaimed call with this context and these limits, or a new one. Raises LimitReached."""
        if (call := next(iter(self._unclaimed(context, limits)), None)) is None:
            if response_tokens >= self._limits.max_response_tokens:
                raise LimitReached(FinishReason.LENGTH)
            made = len(self._sample.saved_calls) + len(self._claimed_since)
            if self._limits.max_turns and made >= self._limits.max_turns:
                raise LimitReached(FinishReason.TURNS)
            call = self._sample.begin(context, start, limits)
        self._claimed.append(call)
        return call

    async def _generate(self, call: GenerateCall, request: Request) -> None:
        sample, limits = self._sample, self._limits
        most = limits.max_sample_tokens or sys.maxsize
        if limits.max_sample_tokens:  # of the sample; less what other calls have or may have:
            others = (other for other in self._claimed_since if other is not call)
            most -= sum(max(other.output.count, 0 if other.finish is not None else other.most) for other in others)
            most -= sum(saved.tokens for saved in sample.saved_calls)
        running = asyncio.current_task()
        assert running is not None
        self._running.add(running)
        self._watch.generating(True)
        try:
            if most <= 0:
                raise LimitReached(FinishReason.TOKENS)
            call.most = min(request.max_new_tokens, most)
            while call.finish is None:
                sample.requests += 1
                id = f"{self._prompt.id}/{sample.requests}"
                request = request._replace(id=id, max_new_tokens=call.most)
                try:
                    finish = await self._served(request, call.output)
                except CannotContinue:
                    self._recorder.count("rollout/restarted_calls")
                    self._recorder.count("rollout/agent/untrained_tokens/interrupted", call.output.count)
                    sample.start_again(call)
                    continue
                cut = finish is FinishReason.LENGTH and call.output.count == most
                sample.finish(call, FinishReason.TOKENS if cut else finish)
        except BaseException:
            sample.discard(call)
            self._claimed = [other for other in self._claimed if other is not call]
            raise
        finally:
            self._running.discard(running)
            self._watch.generating(False)

    async def _served(self, request: Request, output: GeneratedTokens) -> FinishReason:
        """Until its end, or that of the sample's time. Raises LimitReached if that passes before its first token."""
        serving = self._router.generate(request, output, self._one_version)
        if math.isinf(self._until_s):
            return await serving
        try:
            async with asyncio.timeout(self.seconds_left) as time:
                return await serving
        except TimeoutError:
            if not time.expired():
                raise
            if not output.count:
                raise LimitReached(FinishReason.TIME) from None
            return FinishReason.TIME


def _digest(context: np.ndarray, sampling: Mapping[str, Any] | None) -> int:
    """Of a call's context; of an untrained one another, so that it explains no token, see `sample_problem`."""
    digest = tokens_digest(context)
    return digest if sampling is None else untrained_digest(digest, sampling)
