"""The ``generate`` of agent loops: records every call, and answers repeated calls from the record.

An agent loop that runs again after a crash repeats the calls of its first run. Those are replayed instead of sampled
again, and calls that were under way continue from the tokens they had.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import xxhash

from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.watch import AgentWatch
from asyncrl.rollouter.engines.base import Request
from asyncrl.rollouter.partial import GenerateCall, PartialSample
from asyncrl.rollouter.router import Router, VersionChanged
from asyncrl.rollouter.sampling import call_key


class ReplayedGenerate:
    """Implements `asyncrl.rollouter.agents.base.Generate` for one run of an agent loop; ``sample`` outlives it.

    ``prompt`` is a request with the prompt's tokens only, whose id names the sample. With ``one_version`` a call starts
    again rather than mix tokens of two policy versions."""

    def __init__(
        self,
        router: Router,
        sample: PartialSample,
        prompt: Request,
        one_version: bool,
        watch: AgentWatch,
        recorder: Recorder,
    ) -> None:
        self._router, self._sample, self._prompt, self._one_version = router, sample, prompt, one_version
        self._watch, self._recorder = watch, recorder
        self._claimed: list[GenerateCall] = []  # calls of the record that this run has made
        self._returned: list[GenerateCall] = []  # those whose results it has

    @property
    def state(self) -> bytes | None:
        return self._sample.state

    def save(self, state: bytes) -> None:
        self._sample.save(state, self._returned)
        self._returned = []

    async def __call__(self, response: np.ndarray, max_new_tokens: int, prefix: int | None = None) -> Completion:
        """Raises GenerationFailed, or ValueError for a prefix that the prompt does not have."""
        prompt = self._prompt.tokens
        if prefix is not None and not 0 <= prefix <= len(prompt):
            raise ValueError(f"prefix: expected 0 to {len(prompt)} tokens of the prompt, found {prefix}")
        shared = prompt[:prefix]
        tokens = np.concatenate([shared, np.asarray(response, np.int32)])
        arguments = xxhash.xxh3_64_intdigest(tokens.tobytes() + int(max_new_tokens).to_bytes(8, "little", signed=True))
        call = self._claim(arguments)
        if call.finish is None:
            first = not len(response) and prefix is None and not call.ordinal
            await self._generate(call, tokens, max_new_tokens, len(shared), first)
        self._returned.append(call)
        assert call.finish is not None
        return call.output.completion(call.finish)

    def _claim(self, arguments: int) -> GenerateCall:
        """The first call of the record with these arguments that this run has not made yet, or a new one."""
        for call in self._sample.calls:
            if call.arguments == arguments and not any(call is other for other in self._claimed):
                break
        else:
            call = self._sample.begin(arguments)
        self._claimed.append(call)
        return call

    async def _generate(self, call: GenerateCall, tokens: np.ndarray, limit: int, shared: int, first: bool) -> None:
        """``first``: of the answer to the plain prompt, which draws the numbers of a single-turn sample."""
        sample = self._sample
        request = dataclasses.replace(
            self._prompt,
            tokens=tokens,
            shared_prefix=shared,
            key=self._prompt.key if first else call_key(self._prompt.key, call.arguments, call.ordinal),
            max_new_tokens=limit,
        )
        self._watch.generating(True)
        try:
            while call.finish is None:
                sample.requests += 1
                request = dataclasses.replace(request, id=f"{self._prompt.id}/{sample.requests}")
                try:
                    sample.finish(call, await self._router.generate(request, call.output, self._one_version))
                except VersionChanged:
                    self._recorder.count("rollout/restarted_calls")
                    sample.start_again(call)
        except BaseException:
            sample.discard(call)
            self._claimed = [other for other in self._claimed if other is not call]
            raise
        finally:
            self._watch.generating(False)
