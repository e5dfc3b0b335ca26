"""Agent loops: how one sample is made, given a way to generate. The interface, and the lookup by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from asyncrl.plugins.registry import Registry, UnknownPart, check_arguments
from asyncrl.sample_queue.messages import POISON
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import VersionSpan


@dataclass(frozen=True)
class Completion:
    """Output of one `Generate` call: int32 [C] tokens, float32 [C] behaviour logprobs, and their version spans."""

    tokens: np.ndarray
    logprobs: np.ndarray
    spans: list[VersionSpan]
    finish: FinishReason


class GenerationFailed(RuntimeError):
    """The engine could not serve a request; the sample is dropped and counted under ``reason``."""

    reason = "generation_failed"


class LimitReached(GenerationFailed):
    """A limit of the sample leaves nothing to sample. A loop that catches it may return its sample so far, with
    ``finish``; of others the sample is dropped."""

    reason = "limit_reached"

    def __init__(self, finish: FinishReason) -> None:
        super().__init__(f"a limit of the sample was reached ({finish.name.lower()})")
        self.finish = finish


class Poison(GenerationFailed):
    """Replicas died again and again while they served the request's group."""

    reason = POISON


class Generate(Protocol):
    """Samples a continuation of ``prefix`` tokens of the prompt (None: all) and ``response`` (int32 [R]: all tokens
    after them so far), of ``max_new_tokens`` or what the sample's limits leave, whichever is less. ``stop_strings`` end
    it, too. With ``sampling``, those of `SamplingParams` that replace the run's, its tokens cannot be trained; their
    values must have a ``repr`` that is equal in every process.

    Bound to one sample. Several calls may be under way at once: what one draws depends on the tokens that it continues,
    and on how many calls with equal ones came before, never on timing. Raises GenerationFailed, and LimitReached."""

    @property
    def key(self) -> int:
        """63 bits that name the sample's attempt, equal in every process."""

    @property
    def prompt_tokens(self) -> np.ndarray:
        """int32 [P]: the prompt's."""

    @property
    def state(self) -> bytes | None:
        """What ``save`` stored last, also by a rollouter that died since; None if nothing was saved."""

    @property
    def seconds_left(self) -> float:
        """Until the sample's limit of time; infinite without one."""

    def save(self, state: bytes) -> None:
        """Store what `state` is after a crash. Calls that have returned are not replayed any more, so a loop with
        several under way saves where ``state`` has the results of all that have: not while `asyncio.gather` still
        holds some back."""

    def restore(
        self,
        response: np.ndarray,
        completion: Completion,
        max_new_tokens: int | None = None,
        prefix: int | None = None,
        stop_strings: Sequence[str] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Record a call that an earlier rollouter answered with ``completion``; it may have died before the record was
        stored. Returns the recorded completion."""

    def restart(self) -> None:
        """The loop begins again: its calls until now count no more, and equal ones are answered from their record."""

    async def __call__(
        self,
        response: np.ndarray,
        max_new_tokens: int | None = None,
        prefix: int | None = None,
        stop_strings: Sequence[str] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> Completion: ...


class AgentLoop(Protocol):
    """Makes one sample of a prompt. One instance serves all samples concurrently, so ``run`` keeps its state in locals.

    ``__init__`` gets the tokenizer, the limit of a sequence's response in tokens, and ``rollout.agent_loop_args``.
    Tokens that the policy did not sample (a tool's answer) have ``loss_mask`` False and logprob 0. The loop may set the
    sample's ``reward``; else ``reward.function`` does. A sample that trains other tokens than ``generate`` returned, or
    one of them twice, fails, see `asyncrl.rollouter.agents.provenance`.

    After the rollouter died, ``run`` is called again for each sample in flight, and continues from ``generate.state``.
    Calls of ``generate`` whose results came after that state was saved are replayed from a record, and those that were
    under way continue from their tokens: a call gets the recorded one that continues equal tokens with equal
    ``max_new_tokens`` and ``stop_strings``. So a loop that is deterministic between two saves (without any: from its
    start) given its calls' results loses nothing. Others sample what the record does not have. A loop with tools saves
    after each of them::

        turns = TrajectoryBuilder.from_bytes(generate.state) if generate.state else TrajectoryBuilder()
        while not done(turns):
            answer = await generate(turns.response)
            turns.append(answer)
            turns.append(await tool(answer))
            generate.save(turns.to_bytes())
    """

    def __init__(self, tokenizer: Any, max_response_tokens: int, **args: Any) -> None: ...

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample: ...


AGENT_LOOPS: Registry[type[AgentLoop]] = Registry(
    kind="agent loop",
    option="rollout.agent_loop",
    package="asyncrl.rollouter.agents",
    attribute="AGENT_LOOP",
    entry_points="asyncrl.agent_loops",
    interface=AgentLoop,
    instances=False,
)


def find_agent_loop(name: str, args: Mapping[str, Any] | None = None) -> type[AgentLoop]:
    """The agent loop class of this name or import path, which takes ``args`` (None: not checked). Raises UnknownPart,
    before anything is instantiated."""
    found = AGENT_LOOPS.find(name)
    if not (callable(found) and inspect.iscoroutinefunction(found.run)):
        raise UnknownPart(
            f"{AGENT_LOOPS.option}: expected a class with `async def run(self, prompt, index, generate)`, found {name}"
        )
    if args is not None:
        check_arguments("rollout.agent_loop_args", found, None, 0, **args)
    return found
