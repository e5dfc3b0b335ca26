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


class Generate(Protocol):
    """Sample after the prompt and ``response`` (int32 [R]: everything after the prompt so far). Bound to one sample:
    its random numbers go on from call to call. Raises GenerationFailed."""

    async def __call__(self, response: np.ndarray, max_new_tokens: int) -> Completion: ...


class AgentLoop(Protocol):
    """Makes one sample of a prompt. One instance serves all samples, so ``run`` keeps its state in locals.

    ``__init__`` gets the tokenizer, the response limit and ``rollout.agent_loop_args``. Tokens that the policy did not
    sample (a tool's answer) have ``loss_mask`` False and logprob 0."""

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
