"""The ``generate`` of agent loops: records every call, and answers repeated calls from the record.

An agent loop that runs again after a crash repeats the calls of its first run. Those are replayed instead of sampled
again, and the call that was in flight continues from the tokens it had.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import xxhash

from asyncrl.rollouter.agents.base import Completion, SampleRestarts
from asyncrl.rollouter.agents.watch import AgentWatch
from asyncrl.rollouter.engines.base import Request
from asyncrl.rollouter.partial import PartialSample
from asyncrl.rollouter.router import Router


class ReplayedGenerate:
    """Implements `asyncrl.rollouter.agents.base.Generate` for one run of an agent loop; ``sample`` outlives it.

    ``prompt`` is a request with the prompt's tokens only, whose id names the sample. With ``one_version`` the sample
    restarts rather than mix tokens of two policy versions."""

    def __init__(
        self, router: Router, sample: PartialSample, prompt: Request, one_version: bool, watch: AgentWatch
    ) -> None:
        self._router, self._sample, self._prompt, self._one_version = router, sample, prompt, one_version
        self._watch = watch
        self._next_call = 0  # in the record
        self._in_flight = False

    @property
    def state(self) -> bytes | None:
        return self._sample.state

    def save(self, state: bytes) -> None:
        """Raises RuntimeError while a call is in flight: its tokens would be lost."""
        self._check_idle("save")
        self._sample.save(state, self._next_call)
        self._next_call = 0

    async def __call__(self, response: np.ndarray, max_new_tokens: int) -> Completion:
        """Raises GenerationFailed, SampleRestarts, or RuntimeError while another call is in flight."""
        self._check_idle("generate")
        tokens = np.concatenate([self._prompt.tokens, np.asarray(response, np.int32)])
        arguments = xxhash.xxh3_64_intdigest(tokens.tobytes() + int(max_new_tokens).to_bytes(8, "little", signed=True))
        sample = self._sample
        if self._next_call == len(sample.calls):
            sample.begin(arguments)
        call = sample.calls[self._next_call]
        if call.arguments != arguments:
            raise SampleRestarts("the agent loop called generate with other arguments than in its first run")
        if call.finish is None:
            sample.requests += 1
            request = dataclasses.replace(
                self._prompt,
                id=f"{self._prompt.id}/{sample.requests}",
                tokens=tokens,
                position=sample.token_count - call.output.count,
                max_new_tokens=max_new_tokens,
            )
            self._in_flight = True
            self._watch.generating(True)
            try:
                sample.finish(call, await self._router.generate(request, call.output, self._one_version))
            except BaseException:
                sample.discard(call)
                raise
            finally:
                self._in_flight = False
                self._watch.generating(False)
        self._next_call += 1
        assert call.finish is not None
        return call.output.completion(call.finish)

    def _check_idle(self, method: str) -> None:
        if self._in_flight:
            raise RuntimeError(f"{method} called while a call of generate is in flight: await one after another")
