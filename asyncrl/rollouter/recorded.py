"""The generate that an agent loop is given: it records the calls, and answers from the record those made before."""

from __future__ import annotations

import dataclasses

import numpy as np
import xxhash

from asyncrl.rollouter.agent_loops.base import Completion, SampleRestarts
from asyncrl.rollouter.engine import Request
from asyncrl.rollouter.partial import PartialSample
from asyncrl.rollouter.router import Router


class RecordedGenerate:
    """Implements `asyncrl.rollouter.agent_loops.base.Generate` for one run of a loop; ``sample`` outlives it.

    ``prompt`` is the request that has the prompt's tokens alone, its id that of the sample. With ``one_version`` the
    sample restarts rather than hold tokens of two."""

    def __init__(self, router: Router, sample: PartialSample, prompt: Request, one_version: bool) -> None:
        self._router, self._sample, self._prompt, self._one_version = router, sample, prompt, one_version
        self._answered = 0  # calls of the record
        self._under_way = False

    @property
    def state(self) -> bytes | None:
        return self._sample.state

    def save(self, state: bytes) -> None:
        """Raises RuntimeError while a call is under way: its tokens would be lost."""
        self._one_at_a_time("save")
        self._sample.save(state, self._answered)
        self._answered = 0

    async def __call__(self, response: np.ndarray, max_new_tokens: int) -> Completion:
        """Raises GenerationFailed, SampleRestarts, or RuntimeError while another call is under way."""
        self._one_at_a_time("generate")
        tokens = np.concatenate([self._prompt.tokens, np.asarray(response, np.int32)])
        asked = xxhash.xxh3_64_intdigest(tokens.tobytes() + int(max_new_tokens).to_bytes(8, "little", signed=True))
        sample = self._sample
        if self._answered == len(sample.calls):
            sample.begin(asked)
        call = sample.calls[self._answered]
        if call.asked != asked:
            raise SampleRestarts("the agent loop asks for something else than before, given the same answers")
        if call.finish is None:
            sample.requests += 1
            request = dataclasses.replace(
                self._prompt,
                id=f"{self._prompt.id}/{sample.requests}",
                tokens=tokens,
                position=sample.drawn - call.drawn.count,
                max_new_tokens=max_new_tokens,
            )
            self._under_way = True
            try:
                sample.finish(call, await self._router.generate(request, call.drawn, self._one_version))
            except BaseException:
                sample.forget(call)
                raise
            finally:
                self._under_way = False
        self._answered += 1
        assert call.finish is not None
        return call.drawn.completion(call.finish)

    def _one_at_a_time(self, what: str) -> None:
        if self._under_way:
            raise RuntimeError(f"{what} while a call of generate is under way: an agent loop awaits one after another")
