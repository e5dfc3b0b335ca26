"""Makes a group's samples: runs an agent loop for each, then scores them. Samples fail independently."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import AgentLoop, Completion, GenerationFailed
from asyncrl.rollouter.agents.provenance import SampledCall, sample_problem
from asyncrl.rollouter.agents.watch import AgentWatch
from asyncrl.rollouter.engines.base import Request, SamplingParams
from asyncrl.rollouter.limiter import GroupPlaces
from asyncrl.rollouter.partial import PartialSample
from asyncrl.rollouter.replay import ReplayedGenerate
from asyncrl.rollouter.rewards.base import Answer
from asyncrl.rollouter.rewards.pool import RewardResult
from asyncrl.rollouter.rewards.replies import checked
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.sampling import random_key
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.sample_queue.messages import PROMPT_REFUSED, PROMPT_TOO_LONG
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample, TokenSequence
from asyncrl.types.trajectories import Trajectory, TrajectorySequence

MAX_METRICS = 256  # of all samples, under different names; each is a curve in every sink

log = logging.getLogger(__name__)


class Rewards(Protocol):
    @property
    def takes_trajectories(self) -> bool: ...

    async def score(self, answers: Sequence[Answer]) -> Sequence[RewardResult]: ...


@dataclass(frozen=True)
class FailedSample:
    """A sample without a usable response or reward; drops are counted by ``reason``. ``sampled`` (int32 [C] each): for
    people to read, what calls returned, or what each sequence trains."""

    reason: str
    message: str
    sampled: Sequence[np.ndarray] = ()


class PromptTokens(NamedTuple):
    """int32 [P]; none of a prompt that cannot be encoded, for the reason ``refused``."""

    tokens: np.ndarray
    refused: str = ""


@dataclass(frozen=True)
class GroupTask:
    """Shared inputs of a group's samples, which all fail if the prompt is ``refused``.

    ``name`` prefixes the ids of its requests and is unique among groups in flight; ``key`` seeds its random numbers.
    With ``one_version`` a call of ``generate`` starts again rather than mix tokens of two policy versions."""

    prompt: Prompt
    tokens: np.ndarray  # int32 [P]: the prompt's
    sampling: SamplingParams
    name: str
    key: str
    one_version: bool
    priority: int = 0
    refused: str = ""


class SampleMaker:
    """Shared by training and validation: `encode` a prompt, `make` its group's samples, then `score` them."""

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
        self._seed, self._reward, self._rollout = config.seed, config.reward, config.rollout
        self.tokenizer = tokenizer
        self._agent_loop = agent_loop
        self._max_prompt_tokens = max_prompt_tokens
        self._router = router
        self._rewards = rewards
        self._recorder = recorder
        self._metrics: set[str] = set()  # names
        self._reported: set[str] = set()  # kinds of agent errors, and of what else is reported once

    def encode(self, prompt: Prompt) -> PromptTokens:
        """Logs the first prompt that is refused; `rollout/failed_samples/prompt_refused` counts the samples of all."""
        try:
            return PromptTokens(self.tokenizer.encode(prompt))
        except Exception as e:  # of the chat template, which may raise anything
            refused = f"prompt {prompt.prompt_id} cannot be encoded ({type(e).__name__}: {e})"
            if self._first(PROMPT_REFUSED):
                log.warning("%s: its samples fail; further such prompts are counted", refused)
            return PromptTokens(np.empty(0, np.int32), refused)

    async def make(
        self, task: GroupTask, partials: Sequence[PartialSample], places: GroupPlaces | None = None
    ) -> list[Sample | FailedSample]:
        """Complete each partial sample. ``places`` are given back as samples wait for their agent loops, and end."""
        if task.refused:
            return [FailedSample(PROMPT_REFUSED, task.refused)] * len(partials)
        if len(task.tokens) > self._max_prompt_tokens:
            message = (
                f"prompt of {len(task.tokens)} tokens, at most {self._max_prompt_tokens} leave room for the response"
            )
            return [FailedSample(PROMPT_TOO_LONG, message)] * len(partials)

        async def one(index: int, partial: PartialSample) -> Sample | FailedSample:
            try:
                return await self._sample(task, index, partial, places)
            except asyncio.CancelledError:
                running = asyncio.current_task()
                if running is not None and running.cancelling():
                    raise
                return FailedSample("agent_cancelled", "the agent loop awaited a task that was cancelled")
            finally:
                if places is not None:
                    places.ended(index)

        samples = [asyncio.create_task(one(index, partial)) for index, partial in enumerate(partials)]
        try:
            return self._with_equal_columns(task.prompt, await asyncio.gather(*samples))
        except Exception:
            for sample in samples:
                sample.cancel()
            raise
        finally:  # gather returns at the first cancelled sample, but no sample may outlive its group
            await asyncio.wait(samples)
            self._router.forget(task.name)

    def decodable(self, made: Sequence[Sample | FailedSample]) -> bool:
        """True if no sample has a token outside the model's vocabulary."""
        return all(self.tokenizer.in_vocabulary(q.tokens) for s in made if isinstance(s, Sample) for q in s.sequences)

    async def score(self, prompt: Prompt, made: Sequence[Sample | FailedSample]) -> list[Sample | FailedSample]:
        """Add rewards and metrics to the samples.

        The reward function scores those to which the agent loop gave no reward, and with ``reward.function_share`` also
        the others. A sample whose reward fails becomes a failed one, or with reward.on_failure=value gets
        reward.failure_value, so that a policy that makes the reward hang learns not to. So does one that nothing scores
        because a limit ended its agent."""
        scored = [self._scorable(s) if isinstance(s, Sample) else s for s in made]
        config, graded = self._reward, [s for s in scored if isinstance(s, Sample)]
        asked = [s for s in graded if config.has_function and (s.reward is None or config.function_share)]
        if not asked:
            return self._with_known_metrics(scored)
        with self._recorder.span("rollout/reward", samples=len(asked)):
            results = await self._rewards.score(self._answers(prompt, asked))
        failures: dict[int, FailedSample] = {}
        for sample, result in zip(asked, results, strict=True):
            reward = result.reward
            if result.error is not None:
                if self._first(result.error):
                    log.warning("a reward failed (%s): %s; further ones are counted", result.error, result.message)
                if config.on_failure == "drop":
                    failures[id(sample)] = _failed(sample, result.error, result.message)
                    continue
                reward = config.failure_value
                self._recorder.count(f"rollout/failed_rewards/{result.error}")
            if sample.reward is not None:
                reward = (1 - config.function_share) * sample.reward + config.function_share * reward
            sample.reward, sample.metrics = reward, {**sample.metrics, **result.metrics}
        return self._with_known_metrics([failures.get(id(s), s) for s in scored])

    def _with_known_metrics(self, scored: list[Sample | FailedSample]) -> list[Sample | FailedSample]:
        """The samples without metrics that are not among the first `MAX_METRICS` names."""
        for sample in scored:
            if not isinstance(sample, Sample) or sample.metrics.keys() <= self._metrics:
                continue
            new = [name for name in sample.metrics if name not in self._metrics]
            room = MAX_METRICS - len(self._metrics)
            self._metrics.update(new[:room])
            if new[room:] and self._first("metrics"):
                message = "agent loop and reward function have given metrics of %d names; ignoring others, such as %r"
                log.warning(message, MAX_METRICS, new[room])
            sample.metrics = {name: v for name, v in sample.metrics.items() if name in self._metrics}
        return scored

    def _scorable(self, sample: Sample) -> Sample | FailedSample:
        """The sample, or its failure if it cannot have a reward."""
        if not self.decodable([sample]):
            return _failed(sample, "token_out_of_vocabulary", "it has tokens outside the model's vocabulary")
        if sample.reward is None and not self._reward.has_function:
            return self._without_reward(sample)
        return sample

    def _without_reward(self, sample: Sample) -> Sample | FailedSample:
        """The failure of a sample that nothing scores; or the sample with reward.failure_value, if a limit ended it and
        reward.on_failure=value, so that a policy that runs into the limit learns not to."""
        message = "the agent loop gave no reward, and reward.function is none"
        if sample.finish.truncated:
            if self._reward.on_failure == "value":
                self._recorder.count("rollout/failed_rewards/no_reward")
                return dataclasses.replace(sample, reward=self._reward.failure_value)
            message += (
                f"; a limit ended the sample ({sample.finish.name.lower()}): reward.on_failure=value gives such ones "
                "reward.failure_value"
            )
        if self._first(message):
            log.warning("a sample without a reward fails; further ones are counted: %s", message)
        return _failed(sample, "no_reward", message)

    def _answers(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Answer]:
        if self._rewards.takes_trajectories:
            trajectories = [self._trajectory(s) for s in samples]
            return [Answer(prompt, t.sequences[-1].text, t) for t in trajectories]
        texts = self.tokenizer.decode_batch([s.sequences[-1].tokens for s in samples])
        return [Answer(prompt, text, None) for text in texts]

    def _trajectory(self, sample: Sample) -> Trajectory:
        texts = self.tokenizer.decode_batch([q.tokens for q in sample.sequences])
        sequences = [
            TrajectorySequence(text, q.tokens.tolist(), q.loss_mask.tolist())
            for text, q in zip(texts, sample.sequences, strict=True)
        ]
        return Trajectory(sequences, sample.messages, sample.finish.name.lower(), sample.reward, sample.metrics)

    async def _sample(
        self, task: GroupTask, index: int, partial: PartialSample, places: GroupPlaces | None
    ) -> Sample | FailedSample:
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
        generates: Callable[[bool], None] = (
            functools.partial(places.generates, index) if places is not None else lambda _: None
        )
        watch = AgentWatch(self._rollout.agent_timeout_s, generates)
        generate = ReplayedGenerate(
            self._router, partial, request, self._rollout, task.one_version, watch, self._recorder
        )
        try:
            sample = await self._agent_loop.run(task.prompt, index, generate)
            if (problem := self._problem(sample, task.tokens, generate.sampled)) is None:
                return _with_arrays(sample, index)
            reason, message = "bad_sample", self._bad_sample(task.prompt, index, problem)
        except GenerationFailed as e:
            reason, message = e.reason, self._generation_failed(task.prompt, e)
        except asyncio.CancelledError:
            if not watch.expired:
                raise
            reason = "agent_timeout"
            message = f"no call of generate within rollout.agent_timeout_s = {self._rollout.agent_timeout_s:g} s"
        except Exception as e:
            reason, message = "agent_error", self._agent_error(task.prompt, e)
        finally:
            watch.close()
            generate.close()
        returned = (call.result for call in generate.sampled)
        return FailedSample(reason, message, [r.tokens for r in returned if isinstance(r, Completion)])

    def _problem(self, sample: object, prompt_tokens: np.ndarray, calls: Sequence[SampledCall]) -> str | None:
        """What is wrong with what an agent loop returned, if anything."""
        problem = sample_problem(sample, prompt_tokens, calls, self._rollout.max_response_tokens)
        return problem or (_problem_beside_tokens(sample) if isinstance(sample, Sample) else None)

    def _with_equal_columns(self, prompt: Prompt, made: Sequence[Sample | FailedSample]) -> list[Sample | FailedSample]:
        """The samples, or the failures of those whose extra columns have rows of another shape than the first's."""
        shapes: dict[str, tuple[int, ...]] = {}
        checked: list[Sample | FailedSample] = []
        for index, sample in enumerate(made):
            if isinstance(sample, Sample):
                columns = [(name, v.shape[1:]) for q in sample.sequences for name, v in q.extras.items()]
                expected = dict(reversed(columns)) | shapes
                if different := next(((name, shape) for name, shape in columns if shape != expected[name]), None):
                    name, shape = different
                    problem = f"extra column {name!r}: expected rows of shape {expected[name]}, found {shape}"
                    sample = _failed(sample, "bad_sample", self._bad_sample(prompt, index, problem))
                else:
                    shapes = expected
            checked.append(sample)
        return checked

    def _bad_sample(self, prompt: Prompt, index: int, problem: str) -> str:
        """Logs the first one; `rollout/failed_samples/bad_sample` counts all. Returns the message."""
        message = f"group {prompt.uid} sample {index}: {problem}"
        if self._first("bad_sample"):
            log.warning("the agent loop returned a bad sample, which is dropped; further ones are counted: %s", message)
        return message

    def _generation_failed(self, prompt: Prompt, error: GenerationFailed) -> str:
        """Logs the first one of each reason; `rollout/failed_samples/` counts all. Returns the message."""
        if self._first(error.reason):
            log.warning("a sample of prompt %s failed (%s): %s", prompt.prompt_id, error.reason, error)
        return str(error)

    def _agent_error(self, prompt: Prompt, error: Exception) -> str:
        """Logs the first error of each type with its traceback; `rollout/failed_samples/agent_error` counts all.
        Returns the message."""
        kind = type(error).__name__
        if self._first(kind):
            log.warning(
                "the agent loop failed on prompt %s; further %s are counted without a message",
                prompt.prompt_id,
                kind,
                exc_info=error,
            )
        return f"{kind}: {error}"

    def _first(self, kind: str) -> bool:
        """True at the first of each kind, which is logged."""
        known = kind in self._reported
        self._reported.add(kind)
        return not known


def _failed(sample: Sample, reason: str, message: str) -> FailedSample:
    return FailedSample(reason, message, [q.tokens[q.loss_mask] for q in sample.sequences])


def _problem_beside_tokens(sample: Sample) -> str | None:
    """What is wrong with the reward, metrics, messages and extra columns that an agent loop gave, if anything."""
    if "reward" in sample.metrics:
        return "a metric 'reward'; expected the reward in Sample.reward"
    try:
        checked({**sample.metrics, "reward": 0.0 if sample.reward is None else sample.reward})
        if sample.messages:
            json.dumps(sample.messages)
        for name, values in ((name, v) for q in sample.sequences for name, v in q.extras.items()):
            column = np.asarray(values)
            if column.dtype.kind not in "biuf" or not column.ndim:
                return f"extra column {name!r}: expected rows of numbers, found {values!r:.100}"
    except (TypeError, ValueError, OverflowError) as e:
        return str(e)
    return None


def _with_arrays(sample: Sample, index: int) -> Sample:
    """The sample under its index, with its columns as arrays of their types."""
    sequences = [
        TokenSequence(
            np.asarray(q.tokens, np.int32),
            np.asarray(q.logprobs, np.float32),
            np.asarray(q.loss_mask, bool),
            q.spans,
            q.prefix,
            {name: np.asarray(values) for name, values in q.extras.items()},
        )
        for q in sample.sequences
    ]
    return dataclasses.replace(sample, index=index, sequences=sequences)
