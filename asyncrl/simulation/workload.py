"""What a simulated policy is asked and answers: prompts, answers, waits for tools and rewards, as in the profile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from asyncrl.rollouter.agents.base import Generate, LimitReached
from asyncrl.rollouter.agents.single_turn import SingleTurn
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.rollouter.rewards.base import Answer
from asyncrl.rollouter.rewards.pool import RewardResult
from asyncrl.simulation.profile import Profile
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample

TOKEN, STOP = 1, 2  # every token is the first one, but the last of an answer
VOCABULARY = 3


def prompts(count: int) -> list[Prompt]:
    return [Prompt(uid=str(i), prompt_id=str(i), messages=(), answer="") for i in range(count)]


class SimulatedTokenizer:
    """Stands for `asyncrl.rollouter.tokenizer.PromptTokenizer`."""

    stop_token_ids = (STOP,)

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def encode(self, prompt: Prompt) -> np.ndarray:
        return np.full(self._profile.group(prompt.uid).prompt_tokens, TOKEN, np.int32)

    def in_vocabulary(self, tokens: np.ndarray) -> bool:
        return True

    def decode_batch(self, tokens: Sequence[np.ndarray], special_tokens: bool = False) -> list[str]:
        return [""] * len(tokens)


class SimulatedAgent:
    """Agent loop that takes its sample's turns in the profile; with ``rewards`` it also gives the sample's reward."""

    def __init__(self, profile: Profile, rewards: bool) -> None:
        self._profile, self._rewards = profile, rewards

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample:
        recorded, trajectory, finish = self._profile.sample(prompt.uid, index), TrajectoryBuilder(), None
        if len(recorded.turns) == 1:
            sample = await SingleTurn(None, recorded.turns[0].sampled).run(prompt, index, generate)
            sample.reward = recorded.reward if self._rewards else None
            return sample
        try:
            for turn in recorded.turns:
                answer = await generate(trajectory.response)
                trajectory.append(answer)
                if answer.finish.truncated:
                    break
                if turn.wait_s:
                    await asyncio.sleep(turn.wait_s)
                trajectory.append(np.full(turn.observed, TOKEN, np.int32))
        except LimitReached as limit:
            if not trajectory.completions:
                raise
            finish = limit.finish
        return trajectory.sample(index, finish, recorded.reward if self._rewards else None)


class SimulatedRewards:
    """Stands for `asyncrl.rollouter.rewards.pool.RewardPool`: the profile's rewards, after its seconds."""

    takes_trajectories = False

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    async def score(self, answers: Sequence[Answer]) -> list[RewardResult]:
        await asyncio.sleep(self._profile.reward_s)
        return [
            RewardResult(self._profile.sample(answer.prompt.uid, index).reward) for index, answer in enumerate(answers)
        ]
