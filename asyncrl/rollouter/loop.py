"""The rollout loop: prompts in, finished groups out, as many at a time as the staleness budget and the slots allow.

budget ──► prompt ──► n agent loops ──► rewards ──► group ──► queue
                          │                 │          └─ equal rewards: dropped, refilled
                          └ failed samples ─┴ fewer than min_group_size left: dropped
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from asyncrl.config.checks import Derived
from asyncrl.config.schema import Config
from asyncrl.rollouter.agent_loops.base import AgentLoop, Completion, GenerationFailed
from asyncrl.rollouter.engine import Request, SamplingParams
from asyncrl.rollouter.outbox import Outbox
from asyncrl.rollouter.rewards.pool import RewardResult
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.sample import Group, Prompt, Sample, effective_reward
from asyncrl.sample_queue.core import Ticket
from asyncrl.telemetry.recorder import Recorder, now_s


class QueueClient(Protocol):
    """The rollouter's side of the sample queue."""

    async def issue(self, tickets: Sequence[Ticket]) -> int: ...
    async def put(self, groups: Sequence[bytes], now_s: float) -> None: ...
    async def drop(self, drops: Sequence[tuple[str, str]]) -> None: ...
    async def close(self, reason: str) -> None: ...


class Rewards(Protocol):
    async def score(self, items: Sequence[tuple[Prompt, str]]) -> Sequence[RewardResult]: ...


@dataclass(frozen=True)
class _Failed:
    """A sample that did not come about, and why: the reasons are what drops are counted by."""

    reason: str
    message: str


class NothingToTrain(RuntimeError):
    """Group after group is dropped: the run would go on for ever without training."""


def random_key(seed: int, uid: str, sample: int) -> int:
    """63 bits that name one sample's stream of random numbers, the same in every process and run."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{uid}/{sample}".encode()) >> 1


def truncations(sampling: SamplingParams) -> list[str]:
    """The options that keep some tokens from being drawn, as ``name=value``."""
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return [f"{name}={getattr(sampling, name)}" for name, value in off.items() if getattr(sampling, name) != value]


def _trainable(sample: Sample | _Failed) -> Sample | _Failed:
    if isinstance(sample, Sample) and not sample.loss_mask.any():
        return _Failed("no_trained_token", f"none of its {len(sample.tokens)} response tokens has loss_mask set")
    return sample


class RolloutLoop:
    """One per run, on one asyncio loop. ``prompts`` may end (then no group starts any more) or be endless."""

    def __init__(
        self,
        config: Config,
        derived: Derived,
        tokenizer: PromptTokenizer,
        agent_loop: AgentLoop,
        prompts: Iterator[Prompt],
        max_prompt_tokens: int,
        router: Router,
        rewards: Rewards,
        queue: QueueClient,
        recorder: Recorder,
    ) -> None:
        self._config = config
        self._derived = derived
        self._tokenizer = tokenizer
        self._agent_loop = agent_loop
        self._prompts = prompts
        self._max_prompt_tokens = max_prompt_tokens
        self._router = router
        self._rewards = rewards
        self._queue = queue
        self._recorder = recorder
        self._sampling = SamplingParams(
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            min_p=config.rollout.min_p,
            stop_token_ids=tokenizer.stop_token_ids,
            stop_strings=tuple(config.rollout.stop_strings),
        )
        self._finished: Outbox[bytes] = Outbox(lambda groups: queue.put(groups, now_s()))
        self._drops: Outbox[tuple[str, str]] = Outbox(queue.drop)
        self._places = asyncio.Semaphore(derived.max_concurrent_groups)
        self._drops_in_a_row: Counter[str] = Counter()

    async def run(self) -> None:
        """Until the queue is closed. Raises what a group's task, an outbox or the queue raised."""
        if cuts := truncations(self._sampling):
            print(
                f"rollout: {', '.join(cuts)} cuts the distribution that tokens are drawn from, but behaviour logprobs "
                "are over the whole vocabulary: importance ratios are biased. Expected top_p=1, top_k=0 and min_p=0",
                file=sys.stderr,
                flush=True,
            )
        async with asyncio.TaskGroup() as tasks:
            carriers = [tasks.create_task(self._finished.run()), tasks.create_task(self._drops.run())]
            async with asyncio.TaskGroup() as groups:
                prompts_ended = await self._issue(lambda prompt: groups.create_task(self._group(prompt)))
            await self._finished.emptied()
            await self._drops.emptied()
            if prompts_ended:
                await self._queue.close("the prompts ended")
            for task in carriers:
                task.cancel()

    async def validate(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Answer each prompt ``validation.samples`` times beside the training samples, behind them in priority.

        Returns the means of the reward and of what it reports, under ``validation/``."""
        v = self._config.validation
        sampling = SamplingParams(
            v.temperature, stop_token_ids=self._sampling.stop_token_ids, stop_strings=self._sampling.stop_strings
        )

        async def answered(prompt: Prompt) -> list[Sample | _Failed]:
            tokens, group = self._tokenizer.encode(prompt), f"validation/{prompt.uid}"
            made = await self._samples(prompt, tokens, v.samples, sampling, group, priority=1)
            return await self._score(prompt, made)  # a call per prompt, as reward.timeout_s is for one group

        with self._recorder.span("rollout/validate", prompts=len(prompts)):
            groups = await asyncio.gather(*map(answered, prompts))
        judged = [s for group in groups for s in group]
        scored = [s for s in judged if isinstance(s, Sample)]
        values: dict[str, float] = {
            "validation/samples": len(scored),
            "validation/failed": len(judged) - len(scored),
        }
        if scored:
            values["validation/reward"] = float(np.mean([s.reward for s in scored]))
            for name in sorted({k for s in scored for k in s.metrics}):
                values[f"validation/{name}"] = float(np.mean([s.metrics.get(name, 0.0) for s in scored]))
        return values

    # -- starting groups -------------------------------------------------------------------------------------------

    async def _issue(self, start: Callable[[Prompt], Any]) -> bool:
        """Until the prompts end (True) or the queue is closed (False)."""
        upcoming: list[Prompt] = []
        while True:
            await self._places.acquire()
            wanted = 1
            while not self._places.locked():
                await self._places.acquire()
                wanted += 1
            while len(upcoming) < wanted and (prompt := next(self._prompts, None)) is not None:
                upcoming.append(prompt)
            if not upcoming:
                return True
            issued = await self._queue.issue([Ticket(p.uid, p.prompt_id, p.epoch) for p in upcoming[:wanted]])
            if issued == 0:
                return False
            for prompt in upcoming[:issued]:
                start(prompt)
            del upcoming[:issued]
            for _ in range(wanted - issued):
                self._places.release()

    async def _group(self, prompt: Prompt) -> None:
        issued_s = now_s()
        try:
            tokens, n = self._tokenizer.encode(prompt), self._config.rollout.n
            made = await self._samples(prompt, tokens, n, self._sampling, prompt.uid, priority=0)
        finally:
            self._places.release()
        judged = await self._score(prompt, [_trainable(s) for s in made])
        failed = [s for s in judged if isinstance(s, _Failed)]
        samples = [s for s in judged if isinstance(s, Sample)]
        for f in failed:
            self._recorder.count(f"rollout/failed_samples/{f.reason}")
        self._count(samples)
        if reason := self._drop_reason(samples, failed):
            self._drop(prompt, reason, failed)
            return
        self._drops_in_a_row.clear()
        times = {"issued_s": issued_s, "finished_s": now_s()}
        group = Group.from_samples(prompt.uid, prompt.prompt_id, prompt.epoch, tokens, samples, times)
        self._finished.add(group.to_bytes())

    def _drop(self, prompt: Prompt, reason: str, failed: Sequence[_Failed]) -> None:
        self._drops.add((prompt.uid, reason))
        self._drops_in_a_row[reason] += 1
        if self._drops_in_a_row.total() >= self._config.rollout.max_consecutive_drops:
            counts = ", ".join(f"{n} × {reason}" for reason, n in self._drops_in_a_row.most_common())
            last = f"; the last one: {failed[0].message}" if failed and failed[0].message else ""
            raise NothingToTrain(
                f"the last {self._drops_in_a_row.total()} groups were all dropped ({counts}){last}. "
                "Look at the task, the reward, or algorithm.filter_zero_variance"
            )

    def _drop_reason(self, samples: Sequence[Sample], failed: Sequence[_Failed]) -> str | None:
        if len(samples) < self._config.rollout.min_group_size:
            return failed[0].reason if failed else "too_small"
        a = self._config.algorithm
        rewards = {effective_reward(s.reward, s.finish, a.overlong, a.overlong_penalty) for s in samples} - {None}
        if len(rewards) <= 1:
            self._recorder.count("rollout/zero_variance_groups")
            if a.filter_zero_variance:
                return "zero_variance"
        return None

    def _count(self, samples: Sequence[Sample]) -> None:
        """What generation gives, before any filter: the honest accuracy of the policy at work."""
        self._recorder.count("rollout/groups")
        self._recorder.count("rollout/samples", len(samples))
        self._recorder.count("rollout/partial_samples", sum(len({x.version for x in s.spans}) > 1 for s in samples))
        for s in samples:
            self._recorder.count("rollout/sum/reward", s.reward)
            for name, value in s.metrics.items():
                self._recorder.count(f"rollout/sum/{name}", value)

    # -- one group's samples ---------------------------------------------------------------------------------------

    async def _samples(
        self, prompt: Prompt, tokens: np.ndarray, n: int, sampling: SamplingParams, group: str, priority: int
    ) -> list[Sample | _Failed]:
        if len(tokens) > self._max_prompt_tokens:
            message = f"prompt of {len(tokens)} tokens, at most {self._max_prompt_tokens} leave room for the response"
            return [_Failed("prompt_too_long", message)] * n
        return await asyncio.gather(
            *(self._sample(prompt, tokens, index, sampling, group, priority) for index in range(n))
        )

    async def _sample(
        self, prompt: Prompt, tokens: np.ndarray, index: int, sampling: SamplingParams, group: str, priority: int
    ) -> Sample | _Failed:
        calls, drawn = 0, 0

        async def generate(response: np.ndarray, max_new_tokens: int) -> Completion:
            nonlocal calls, drawn
            calls += 1
            completion = await self._router.generate(
                Request(
                    id=f"{group}/{index}/{calls}",
                    group=group,
                    tokens=np.concatenate([tokens, response]),
                    shared_prefix=len(tokens),
                    key=random_key(self._config.seed, group, index),
                    position=drawn,
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    priority=priority,
                )
            )
            drawn += len(completion.tokens)
            return completion

        try:
            return await self._agent_loop.run(prompt, index, generate)
        except GenerationFailed as e:
            return _Failed("generation_failed", str(e))

    async def _score(self, prompt: Prompt, made: Sequence[Sample | _Failed]) -> list[Sample | _Failed]:
        """The samples with their rewards and metrics; one whose reward cannot be had becomes a failed one."""
        judged = list(made)
        places = [i for i, s in enumerate(judged) if isinstance(s, Sample)]
        if not places:
            return judged
        texts = self._tokenizer.decode_batch([judged[i].tokens for i in places])  # type: ignore[union-attr]
        with self._recorder.span("rollout/reward", samples=len(places)):
            results = await self._rewards.score([(prompt, text) for text in texts])
        for i, result in zip(places, results, strict=True):
            sample = judged[i]
            assert isinstance(sample, Sample)
            if result.error is not None:
                judged[i] = _Failed(result.error, result.message)
            else:
                sample.reward, sample.metrics = result.reward, dict(result.metrics)
        return judged
