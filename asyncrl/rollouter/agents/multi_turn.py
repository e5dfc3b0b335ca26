"""Base class of agent loops that alternate between the policy and an environment, in the rollouter's process."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.observability.telemetry.recorder import now_s
from asyncrl.rollouter.agents.base import Completion, Generate
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason, Sample


class MultiTurn(ABC):
    """A subclass defines `observe`. Limits of a sample: ``max_response_tokens`` of its sequence, ``max_turns`` answers,
    ``max_seconds`` from its start or, after a death of the rollouter, from its continuation."""

    def __init__(
        self, tokenizer: Any, max_response_tokens: int, max_turns: int = 8, max_seconds: float = float("inf")
    ) -> None:
        if max_turns < 1 or not max_seconds > 0:
            raise ValueError(f"expected max_turns ≥ 1 and max_seconds > 0, found {max_turns} and {max_seconds}")
        self.tokenizer, self._max_tokens = tokenizer, max_response_tokens
        self._max_turns, self._max_seconds = max_turns, max_seconds

    @abstractmethod
    async def observe(
        self, prompt: Prompt, turns: TrajectoryBuilder, answer: Completion
    ) -> np.ndarray | Sequence[int] | None:
        """Tokens that the policy reads after its ``answer``, the last part of ``turns``; None to end the sample. Called
        again if the rollouter dies before the next answer is begun."""

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample:
        until_s = now_s() + self._max_seconds
        turns = TrajectoryBuilder.from_bytes(generate.state) if generate.state else TrajectoryBuilder()
        while (room := self._max_tokens - len(turns.response)) > 0:
            answer = await generate(turns.response, room)
            turns.append(answer)
            if answer.finish.truncated:
                break
            try:
                async with asyncio.timeout(max(0.0, until_s - now_s()) if self._max_seconds < float("inf") else None):
                    seen = await self.observe(prompt, turns, answer)
            except TimeoutError:
                if now_s() < until_s:  # of a tool
                    raise
                return turns.sample(index, FinishReason.TIME)
            if seen is None:
                return turns.sample(index)
            if turns.completions == self._max_turns:
                return turns.sample(index, FinishReason.TURNS)
            turns.append(seen)
            generate.save(turns.to_bytes())
        return turns.sample(index, FinishReason.LENGTH)
