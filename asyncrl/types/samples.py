"""Sample: one rollout for a prompt, of one token sequence or several."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from asyncrl.types.prompts import Message
from asyncrl.types.versions import PolicyVersion, VersionSpan

TOKEN_REWARDS = "token_rewards"  #: extra column of rewards of turns: float32 [R], each at its turn's last token


class FinishReason(enum.IntEnum):
    """Reason why a sample, or one request of it, ended."""

    STOP = 0  # stop token or stop string
    LENGTH = 1  # limit of a sequence's tokens
    ABORT = 2  # aborted; its tokens so far are kept and may be continued
    ERROR = 3  # engine error
    TURNS = 4  # limit of a sample's turns
    TIME = 5  # limit of a sample's seconds
    TOKENS = 6  # limit of a sample's sampled tokens

    @property
    def truncated(self) -> bool:
        """True if a limit ended the sample: it is overlong."""
        return self in (FinishReason.LENGTH, FinishReason.TURNS, FinishReason.TIME, FinishReason.TOKENS)


TRUNCATED = tuple(reason for reason in FinishReason if reason.truncated)


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
    """One rollout: one or more sequences, in the order of their creation, with one reward.

    ``reward`` is None until it has one; an agent loop may set it. ``messages`` (chat messages with their tool calls)
    are what the loop has to show to a reward function; they stay in the rollouter."""

    index: int
    sequences: list[TokenSequence]
    finish: FinishReason
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    @classmethod
    def single(
        cls,
        index: int,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        loss_mask: np.ndarray,
        spans: list[VersionSpan],
        finish: FinishReason,
        reward: float | None = None,
        metrics: dict[str, float] | None = None,
        extras: dict[str, np.ndarray] | None = None,
    ) -> Sample:
        """A sample of one sequence after the whole prompt; shapes as in `TokenSequence`."""
        sequence = TokenSequence(tokens, logprobs, loss_mask, spans, extras=extras or {})
        return cls(index, [sequence], finish, reward, metrics or {})

    @property
    def succeeded(self) -> bool:
        """True if its metric ``accuracy`` is positive, or without that metric its reward."""
        return self.metrics.get("accuracy", self.reward or 0.0) > 0

    @property
    def versions(self) -> set[PolicyVersion]:
        """Those that sampled its tokens."""
        return {span.version for sequence in self.sequences for span in sequence.spans}


def sequence_problem(sequence: TokenSequence, prompt_tokens: int) -> str | None:
    """What is wrong with a sequence after a prompt of ``prompt_tokens`` tokens, if anything."""
    count, starts = len(sequence.tokens), [span.start for span in sequence.spans]
    if not count == len(sequence.logprobs) == len(sequence.loss_mask):
        return (
            f"{count} tokens, {len(sequence.logprobs)} logprobs and {len(sequence.loss_mask)} mask entries; expected "
            "equal lengths"
        )
    if sequence.prefix is not None and not 0 <= sequence.prefix <= prompt_tokens:
        return f"expected a prefix of 0 to {prompt_tokens} tokens, as many as the prompt has, found {sequence.prefix}"
    in_order = starts == sorted(starts) and max(starts, default=0) <= count
    if not in_order or (count and starts[:1] != [0]):
        return f"expected version spans that start at token 0 and ascend to at most {count}, found {sequence.spans}"
    shared = prompt_tokens if sequence.prefix is None else sequence.prefix
    if not shared and count and sequence.loss_mask[0]:
        return "nothing precedes its first token, which is trained; expected at least one token, such as BOS"
    rewards = sequence.extras.get(TOKEN_REWARDS)
    if rewards is not None and not (len(rewards) == count and np.isfinite(rewards).all()):
        return f"expected {count} finite {TOKEN_REWARDS}, one for each token, found {rewards}"
    return None
