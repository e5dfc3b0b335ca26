"""The agent-loop seam: how one sample comes about, given a way to generate."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from asyncrl.sample import FinishReason, Prompt, Sample, VersionSpan


@dataclass(frozen=True)
class Completion:
    """What a call of `Generate` sampled: int32 [C] tokens, float32 [C] behaviour logprobs, their version spans."""

    tokens: np.ndarray
    logprobs: np.ndarray
    spans: list[VersionSpan]
    finish: FinishReason


class GenerationFailed(RuntimeError):
    """The engine could not serve a request; the sample is dropped and counted."""


class SampleRestarts(BaseException):
    """What the sample has so far cannot be used, so ``run`` is called again, without any of it.

    Not an Exception, so that an agent loop which catches those of its tools lets it pass."""


class Generate(Protocol):
    """Sample after the prompt and ``response`` (int32 [R]: everything after the prompt so far). Bound to one sample:
    its random numbers go on from call to call, one call at a time. Raises GenerationFailed.

    ``save`` makes ``state`` (opaque bytes, the loop's own) what ``run`` finds in ``generate.state`` if it must be
    called again, after a death of the rollouter; None if nothing was saved."""

    @property
    def state(self) -> bytes | None: ...

    def save(self, state: bytes) -> None: ...

    async def __call__(self, response: np.ndarray, max_new_tokens: int) -> Completion: ...


class AgentLoop(Protocol):
    """Makes one sample of a prompt. One instance serves all samples, so ``run`` keeps its state in locals.

    ``__init__`` gets the tokenizer, the response limit and ``rollout.agent_loop_args``. Tokens that the policy did not
    sample (a tool's answer) have ``loss_mask`` False and logprob 0.

    After a death of the rollouter ``run`` is called again for a sample that was under way, and goes on from
    ``generate.state``. Calls of ``generate`` made since that was saved are answered from a record, and the one that was
    under way goes on with the tokens it had, as long as the arguments are those of the record: so between two saves
    (without any: from its start) a loop must be deterministic, given what its calls answered. One that is not restarts
    its sample, counted as ``rollout/restarted_samples``; one with tools saves after each of them::

        turns = decode(generate.state) if generate.state else []
        while not done(turns):
            answer = await generate(response(turns), limit)
            turns += [answer, await tool(answer)]
            generate.save(encode(turns))
    """

    def __init__(self, tokenizer: Any, max_response_tokens: int, **args: Any) -> None: ...

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample: ...


def load_object(path: str) -> Any:
    """The object at ``package.module:name``. Raises ImportError saying which half is wrong."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as e:
        raise ImportError(f"{path}: module {module} does not import ({e})") from e
    if not hasattr(found, name):
        raise ImportError(f"{path}: module {module} has no {name!r}")
    return getattr(found, name)
