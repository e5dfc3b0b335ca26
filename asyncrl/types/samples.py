"""Sample: one rollout for a prompt, of one token sequence or several."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from asyncrl.types.versions import PolicyVersion, VersionSpan


class FinishReason(enum.IntEnum):
    """Reason why a sample, or one request of it, ended."""

    STOP = 0  # stop token or stop string
    LENGTH = 1  # limit of a sequence's tokens
    ABORT = 2  # aborted; its tokens so far are kept and may be continued
    ERROR = 3  # engine error
    TURNS = 4  # limit of a sample's turns
    TIME = 5  # limit of a sample's seconds

    @property
    def truncated(self) -> bool:
        """True if a limit ended the sample: it is overlong."""
        return self in (FinishReason.LENGTH, FinishReason.TURNS, FinishReason.TIME)


def effective_reward(reward: float, finish: int, overlong: str, penalty: float) -> float | None:
    """Reward from which advantages are computed, in float32 as in a group; None for a masked sample. ``finish`` is a
    FinishReason; ``overlong`` and ``penalty`` are algorithm.overlong and algorithm.overlong_penalty.

    Shared by both pools: a group whose effective rewards are all equal has no gradient, so the rollouter drops it,
    judging by the values that the trainer would use."""
    truncated = FinishReason(finish).truncated
    if truncated and overlong == "mask":
        return None
    taken = penalty if truncated and overlong == "penalize" else 0.0
    return float(np.float32(reward) - np.float32(taken))


@dataclass
class TokenSequence:
    """What the policy read and wrote in one order: the first ``prefix`` tokens of the group's prompt (None: all), then
    ``R`` tokens.

    Shapes: ``tokens`` int32 [R], ``logprobs`` float32 [R] (behaviour logprobs; 0 where nothing was sampled),
    ``loss_mask`` bool [R]: True for tokens to train. False for those that the policy did not sample, such as a tool's
    output, and for those that an earlier sequence of the sample trains. ``extras``: further columns, one row per token
    or any other number."""

    tokens: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    spans: list[VersionSpan]
    prefix: int | None = None
    extras: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Sample:
    """One rollout: one or more sequences, in the order of their creation, with one reward."""

    index: int
    sequences: list[TokenSequence]
    finish: FinishReason
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def single(
        cls,
        index: int,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        loss_mask: np.ndarray,
        spans: list[VersionSpan],
        finish: FinishReason,
        reward: float = 0.0,
        metrics: dict[str, float] | None = None,
        extras: dict[str, np.ndarray] | None = None,
    ) -> Sample:
        """A sample of one sequence after the whole prompt; shapes as in `TokenSequence`."""
        sequence = TokenSequence(tokens, logprobs, loss_mask, spans, extras=extras or {})
        return cls(index, [sequence], finish, reward, metrics or {})

    @property
    def versions(self) -> set[PolicyVersion]:
        """Those that sampled its tokens."""
        return {span.version for sequence in self.sequences for span in sequence.spans}
