"""One group's samples: an agent loop for each, then their rewards. A sample that fails takes no other with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from asyncrl.config.schema import Config
from asyncrl.rollouter.agent_loops.base import AgentLoop, GenerationFailed, SampleRestarts
from asyncrl.rollouter.engine import Request, SamplingParams
from asyncrl.rollouter.partial import PartialSample
from asyncrl.rollouter.recorded import RecordedGenerate
from asyncrl.rollouter.rewards.pool import RewardResult
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.sample import Prompt, Sample
from asyncrl.telemetry.recorder import Recorder


class Rewards(Protocol):
    async def score(self, items: Sequence[tuple[Prompt, str]]) -> Sequence[RewardResult]: ...


@dataclass(frozen=True)
class Failed:
    """A sample that did not come about, and why: the reasons are what drops are counted by."""

    reason: str
    message: str


@dataclass(frozen=True)
class Task:
    """What a group's samples are made for. ``name`` is that of its requests, unique among those under way; ``key`` that
    of its random numbers. ``one_version``: a sample restarts rather than hold tokens of two policy versions."""

    prompt: Prompt
    tokens: np.ndarray  # int32 [P]: the prompt's
    sampling: SamplingParams
    name: str
    key: str
    one_version: bool
    priority: int = 0


def random_key(seed: int, uid: str, sample: int) -> int:
    """63 bits that name one sample's stream of random numbers, the same in every process and run."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{uid}/{sample}".encode()) >> 1


class SampleMaker:
    """Shared by training and validation: `make` a group's samples, then `score` them."""

    def __init__(
        self,
        config: Config,
        tokenizer: PromptTokenizer,
        agent_loop: AgentLoop,
        max_prompt_tokens: int,
        router: Router,
        rewards: Rewards,
        recorder: Recorder,
    ) -> None:
        self._seed = config.seed
        self.tokenizer = tokenizer
        self._agent_loop = agent_loop
        self._max_prompt_tokens = max_prompt_tokens
        self._router = router
        self._rewards = rewards
        self._recorder = recorder

    async def make(
        self, task: Task, partials: Sequence[PartialSample], ended: Callable[[], None] = lambda: None
    ) -> list[Sample | Failed]:
        """One sample for each of ``partials``, from what it has so far; ``ended`` is called whenever one is made."""
        if len(task.tokens) > self._max_prompt_tokens:
            message = (
                f"prompt of {len(task.tokens)} tokens, at most {self._max_prompt_tokens} leave room for the response"
            )
            return [Failed("prompt_too_long", message)] * len(partials)

        async def one(index: int, partial: PartialSample) -> Sample | Failed:
            try:
                return await self._sample(task, index, partial)
            finally:
                ended()

        return await asyncio.gather(*(one(index, partial) for index, partial in enumerate(partials)))

    async def score(self, prompt: Prompt, made: Sequence[Sample | Failed]) -> list[Sample | Failed]:
        """The samples with their rewards and metrics; one whose reward cannot be had becomes a failed one."""
        judged = list(made)
        places = [i for i, s in enumerate(judged) if isinstance(s, Sample)]
        if not places:
            return judged
        texts = self.tokenizer.decode_batch([judged[i].tokens for i in places])  # type: ignore[union-attr]
        with self._recorder.span("rollout/reward", samples=len(places)):
            results = await self._rewards.score([(prompt, text) for text in texts])
        for i, result in zip(places, results, strict=True):
            sample = judged[i]
            assert isinstance(sample, Sample)
            if result.error is not None:
                judged[i] = Failed(result.error, result.message)
            else:
                sample.reward, sample.metrics = result.reward, dict(result.metrics)
        return judged

    async def _sample(self, task: Task, index: int, partial: PartialSample) -> Sample | Failed:
        request = Request(
            id=f"{task.name}/{index}",
            group=task.name,
            tokens=task.tokens,
            shared_prefix=len(task.tokens),
            key=random_key(self._seed, task.key, index),
            position=0,
            max_new_tokens=0,
            sampling=task.sampling,
            priority=task.priority,
        )
        while True:
            generate = RecordedGenerate(self._router, partial, request, task.one_version)
            try:
                return await self._agent_loop.run(task.prompt, index, generate)
            except GenerationFailed as e:
                return Failed("generation_failed", str(e))
            except SampleRestarts:
                self._recorder.count("rollout/restarted_samples")
                partial.restart()
