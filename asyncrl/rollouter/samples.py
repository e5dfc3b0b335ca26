"""Makes a group's samples: runs an agent loop for each, then scores them. Samples fail independently."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import AgentLoop, GenerationFailed
from asyncrl.rollouter.agents.watch import AgentWatch
from asyncrl.rollouter.engines.base import Request, SamplingParams
from asyncrl.rollouter.partial import PartialSample
from asyncrl.rollouter.replay import ReplayedGenerate
from asyncrl.rollouter.rewards.pool import RewardResult
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.sampling import random_key
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample

log = logging.getLogger(__name__)


class Rewards(Protocol):
    async def score(self, items: Sequence[tuple[Prompt, str]]) -> Sequence[RewardResult]: ...


@dataclass(frozen=True)
class FailedSample:
    """A sample without a usable response or reward; drops are counted by ``reason``."""

    reason: str
    message: str


@dataclass(frozen=True)
class GroupTask:
    """Shared inputs of a group's samples.

    ``name`` prefixes the ids of its requests and is unique among groups in flight; ``key`` seeds its random numbers.
    With ``one_version`` a call of ``generate`` starts again rather than mix tokens of two policy versions."""

    prompt: Prompt
    tokens: np.ndarray  # int32 [P]: the prompt's
    sampling: SamplingParams
    name: str
    key: str
    one_version: bool
    priority: int = 0


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
        self._seed, self._reward, self._agent_timeout_s = config.seed, config.reward, config.rollout.agent_timeout_s
        self.tokenizer = tokenizer
        self._agent_loop = agent_loop
        self._max_prompt_tokens = max_prompt_tokens
        self._router = router
        self._rewards = rewards
        self._recorder = recorder
        self._reported: set[str] = set()  # types of agent errors

    async def make(
        self, task: GroupTask, partials: Sequence[PartialSample], ended: Callable[[], None] = lambda: None
    ) -> list[Sample | FailedSample]:
        """Complete each partial sample; ``ended`` is called at the end of each."""
        if len(task.tokens) > self._max_prompt_tokens:
            message = (
                f"prompt of {len(task.tokens)} tokens, at most {self._max_prompt_tokens} leave room for the response"
            )
            return [FailedSample("prompt_too_long", message)] * len(partials)

        async def one(index: int, partial: PartialSample) -> Sample | FailedSample:
            try:
                return await self._sample(task, index, partial)
            except asyncio.CancelledError:
                running = asyncio.current_task()
                if running is not None and running.cancelling():
                    raise
                return FailedSample("agent_cancelled", "the agent loop awaited a task that was cancelled")
            finally:
                ended()

        samples = [asyncio.create_task(one(index, partial)) for index, partial in enumerate(partials)]
        try:
            return await asyncio.gather(*samples)
        except Exception:
            for sample in samples:
                sample.cancel()
            raise
        finally:  # gather returns at the first cancelled sample, but no sample may outlive its group
            await asyncio.wait(samples)

    def decodable(self, made: Sequence[Sample | FailedSample]) -> bool:
        """True if no sample has a token outside the model's vocabulary."""
        return all(self.tokenizer.in_vocabulary(q.tokens) for s in made if isinstance(s, Sample) for q in s.sequences)

    async def score(self, prompt: Prompt, made: Sequence[Sample | FailedSample]) -> list[Sample | FailedSample]:
        """Add rewards and metrics to the samples, from the text of each one's last sequence.

        A sample whose reward fails becomes a failed one, or with reward.on_failure=value gets reward.failure_value, so
        that a policy that makes the reward hang learns not to."""
        undecodable = FailedSample("token_out_of_vocabulary", "it has tokens outside the model's vocabulary")
        scored = [undecodable if isinstance(s, Sample) and not self.decodable([s]) else s for s in made]
        at = [i for i, s in enumerate(scored) if isinstance(s, Sample)]
        if not at:
            return scored
        texts = self.tokenizer.decode_batch([scored[i].sequences[-1].tokens for i in at])  # type: ignore[union-attr]
        with self._recorder.span("rollout/reward", samples=len(at)):
            results = await self._rewards.score([(prompt, text) for text in texts])
        for i, result in zip(at, results, strict=True):
            sample = scored[i]
            assert isinstance(sample, Sample)
            if result.error is None:
                sample.reward, sample.metrics = result.reward, dict(result.metrics)
            elif self._reward.on_failure == "value":
                sample.reward = self._reward.failure_value
                self._recorder.count(f"rollout/failed_rewards/{result.error}")
            else:
                scored[i] = FailedSample(result.error, result.message)
        return scored

    async def _sample(self, task: GroupTask, index: int, partial: PartialSample) -> Sample | FailedSample:
        request = Request(
            id=f"{task.name}/{index}",
            group=task.name,
            tokens=task.tokens,
            shared_prefix=len(task.tokens),
            key=random_key(self._seed, task.key, index, partial.attempt),
            position=0,
            max_new_tokens=0,
            sampling=task.sampling,
            priority=task.priority,
        )
        watch = AgentWatch(self._agent_timeout_s)
        generate = ReplayedGenerate(self._router, partial, request, task.one_version, watch, self._recorder)
        try:
            return await self._agent_loop.run(task.prompt, index, generate)
        except GenerationFailed as e:
            return FailedSample(e.reason, str(e))
        except asyncio.CancelledError:
            if not watch.expired:
                raise
            message = f"no call of generate within rollout.agent_timeout_s = {self._agent_timeout_s:g} s"
            return FailedSample("agent_timeout", message)
        except Exception as e:
            return self._agent_error(task.prompt, e)
        finally:
            watch.close()

    def _agent_error(self, prompt: Prompt, error: Exception) -> FailedSample:
        """Logs the first error of each type with its traceback; `rollout/failed_samples/agent_error` counts all."""
        kind = type(error).__name__
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning(
                "the agent loop failed on prompt %s; further %s are counted without a message",
                prompt.prompt_id,
                kind,
                exc_info=error,
            )
        return FailedSample("agent_error", f"{kind}: {error}")
