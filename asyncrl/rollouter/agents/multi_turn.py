"""Base class of agent loops that alternate between the policy and an environment, in the rollouter's process."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.rollouter.agents.base import Completion, Generate, LimitReached
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason, Sample


class MultiTurn(ABC):
    """A subclass defines `observe`. A limit (``rollout.max_response_tokens``, ``max_turns``, ``max_sample_tokens``,
    ``max_sample_s``) ends the sample with its finish reason. ``discount``: of the rewards of later turns."""

    def __init__(self, tokenizer: Any, max_response_tokens: int, discount: float = 1.0) -> None:
        if not 0 <= discount <= 1:
            raise ValueError(f"expected a discount of 0 to 1, found {discount}")
        self.tokenizer, self._discount = tokenizer, discount

    @abstractmethod
    async def observe(
        self, prompt: Prompt, turns: TrajectoryBuilder, answer: Completion
    ) -> np.ndarray | Sequence[int] | None:
        """Tokens that the policy reads after its ``answer``, the last part of ``turns``; None to end the sample. May
        reward the turn: `TrajectoryBuilder.reward`. Called again if the rollouter dies before it returns."""

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample:
        turns = TrajectoryBuilder.from_bytes(generate.state) if generate.state else TrajectoryBuilder()
        finish = None
        try:
            while True:
                answer = await generate(turns.response)
                turns.append(answer)
                if answer.finish.truncated:
                    break
                if (seen := await self._observe(prompt, turns, answer, generate.seconds_left)) is None:
                    break
                turns.append(seen)
                generate.save(turns.to_bytes())
        except LimitReached as limit:
            if not turns.completions:
                raise
            finish = limit.finish
        return turns.sample(index, finish, await self.grade(prompt, turns), self._discount)

    async def grade(self, prompt: Prompt, turns: TrajectoryBuilder) -> float | None:
        """Reward of the sample, however it ended, in addition to those of its turns; None: these alone, or without any
        that of ``reward.function``."""
        return None

    async def _observe(
        self, prompt: Prompt, turns: TrajectoryBuilder, answer: Completion, limit_s: float
    ) -> np.ndarray | Sequence[int] | None:
        """Raises LimitReached after ``limit_s``."""
        try:
            async with asyncio.timeout(None if math.isinf(limit_s) else limit_s) as time:
                return await self.observe(prompt, turns, answer)
        except TimeoutError:
            if not time.expired():  # it is the environment's own
                raise
            raise LimitReached(FinishReason.TIME) from None
