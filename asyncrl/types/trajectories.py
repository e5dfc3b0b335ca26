"""Trajectory: a sample as reward functions see it. Light: every reward worker imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.types.prompts import Message


@dataclass(frozen=True)
class TrajectorySequence:
    """One token sequence after the prompt. ``loss_mask``: the tokens that the policy sampled and that are trained here;
    the others it only read, or an earlier sequence trains them."""

    text: str
    tokens: Sequence[int] = ()
    loss_mask: Sequence[bool] = ()


@dataclass(frozen=True)
class Trajectory:
    """All of a sample that its reward may depend on: its sequences in order of creation, the ``messages`` (chat
    messages and tool calls), ``reward`` and ``metrics`` that the agent loop gave it, and why it ended (the name of a
    `FinishReason`, in lower case)."""

    sequences: Sequence[TrajectorySequence]
    messages: Sequence[Message] = ()
    finish: str = "stop"
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
