"""Reward functions: the interface, and the lookup by name. Light: every reward worker imports it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from asyncrl.plugins.registry import Registry, UnknownPart
from asyncrl.types.prompts import Prompt

Score = float | Mapping[str, float]


class RewardFunction(Protocol):
    """Scores one response; ``args`` are ``reward.args``. Runs in worker processes, within the limits of ``reward``.

    Returns a number, or a dict with ``reward`` and further numbers, which are reported as ``rollout/NAME``. May be
    ``async``: then a group's responses are scored concurrently."""

    def __call__(self, prompt: Prompt, response: str, **args: Any) -> Score | Awaitable[Score]: ...


REWARDS: Registry[RewardFunction] = Registry(
    kind="reward function",
    option="reward.function",
    package="asyncrl.rollouter.rewards",
    attribute="REWARD",
    entry_points="asyncrl.rewards",
    interface=RewardFunction,
    instances=False,
)


def find_reward(name: str) -> RewardFunction:
    """The reward function of this name or import path. Raises UnknownPart."""
    found = REWARDS.find(name)
    if not callable(found):
        raise UnknownPart(f"{REWARDS.option}: expected a function, found {type(found).__name__} at {name}")
    return found
