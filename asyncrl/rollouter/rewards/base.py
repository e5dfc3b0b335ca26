"""Reward functions: the interface, and the lookup by name. Light: every reward worker imports it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from asyncrl.plugins.registry import Registry, UnknownPart, check_arguments
from asyncrl.types.prompts import Prompt
from asyncrl.types.trajectories import Trajectory

Score = float | Mapping[str, float]

#: parameters that a function may have besides: the whole `Trajectory`, and the run's sandboxes
#: (`asyncrl.sandbox.base.Sandboxes`)
TAKEN = ("trajectory", "sandboxes")
COLUMN = "prompt."  # begins the name of a column of the prompt file that a function takes


class Answer(NamedTuple):
    """What a reward function scores: ``response`` is the text of the sample's last sequence."""

    prompt: Prompt
    response: str
    trajectory: Trajectory | None = None  # for functions that take it


class RewardFunction(Protocol):
    """Scores one response; ``args`` are ``reward.args``. A function with a parameter ``trajectory`` gets the whole
    `Trajectory`, too. Runs in worker processes, within the limits of ``reward``.

    Returns a number, or a dict with ``reward`` and further numbers, which are reported as ``rollout/NAME``. May be
    ``async``: then a group's responses are scored concurrently. An object with a method ``prepare`` is asked with
    ``reward.args`` before its first call, and raises UnknownPart for those that it cannot serve; a parameter
    ``timeout_s`` of that method gets ``reward.timeout_s``. Its attribute ``columns``, if it has one, names columns of a
    prompt file without which it cannot score a response."""

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


def prepare(function: RewardFunction, args: Mapping[str, Any], timeout_s: float) -> None:
    """Calls the function's method ``prepare``, if it has one. Raises UnknownPart, also for ``args`` that the method, or
    without it the function, does not take."""
    method = getattr(function, "prepare", None)
    if method is None:
        check_arguments("reward.args", function, None, "", **{**dict.fromkeys(taken_by(function)), **args})
        return
    given = {**args, "timeout_s": timeout_s} if _takes("timeout_s", method) else args
    check_arguments("reward.args", method, **given)
    method(**given)


def taken_by(function: RewardFunction) -> list[str]:
    """The `TAKEN` that the function wants; one that passes them on has a method ``takes``, asked after ``prepare``."""
    method = getattr(function, "takes", None)
    return method() if method is not None else [name for name in TAKEN if _takes(name, function)]


def columns_of(function: RewardFunction) -> list[str]:
    """Columns of a prompt file that the function needs; asked after ``prepare``."""
    return list(getattr(function, "columns", ()))


def _takes(parameter: str, function: Callable[..., Any]) -> bool:
    try:
        return parameter in inspect.signature(function).parameters
    except ValueError:  # a builtin
        return False
