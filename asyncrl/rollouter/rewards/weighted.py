"""Several reward functions in one: the weighted sum of their rewards.

    reward:
      function: weighted
      args:
        functions:
          correct: {function: my_package.rewards:correct, weight: 1.0}
          brief: {function: my_package.rewards:length, weight: 0.2, args: {target: 40}}

Each one's reward is a metric ``reward_NAME``, and its metrics keep their names; of several with one name the first
keeps it, and the others' are ``NAME/metric``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.plugins.registry import UnknownPart
from asyncrl.rollouter.rewards.base import RewardFunction, columns_of, find_reward, prepare, taken_by
from asyncrl.rollouter.rewards.replies import checked
from asyncrl.types.prompts import Prompt

_OPTION = "reward.args.functions"


@dataclass(frozen=True)
class _Part:
    function: RewardFunction
    weight: float
    args: Mapping[str, Any]


class Weighted:
    """A call's functions run concurrently if they are ``async``. One that raises fails the sample, when all have ended:
    none may keep a sandbox beyond its call."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}

    def prepare(self, timeout_s: float, functions: Any = None) -> None:
        """Raises UnknownPart for functions that do not load or are described otherwise than above."""
        if not isinstance(functions, Mapping) or not functions:
            raise UnknownPart(f"{_OPTION}: expected name: {{function: …, weight: …}}, found {functions!r}")
        self._parts = {name: _part(str(name), described, timeout_s) for name, described in functions.items()}

    def takes(self) -> list[str]:
        return sorted({name for part in self._parts.values() for name in taken_by(part.function)})

    @property
    def columns(self) -> list[str]:
        return sorted({name for part in self._parts.values() for name in columns_of(part.function)})

    async def __call__(self, prompt: Prompt, response: str, functions: Any, **taken: Any) -> dict[str, float]:
        async def one(part: _Part) -> dict[str, float]:
            more = {name: taken[name] for name in taken_by(part.function)}
            returned = part.function(prompt, response, **more, **part.args)
            return checked(await returned if inspect.isawaitable(returned) else returned)

        found = await asyncio.gather(*map(one, self._parts.values()), return_exceptions=True)
        outcomes: dict[str, dict[str, float]] = {}
        for name, outcome in zip(self._parts, found, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            outcomes[name] = outcome
        total = {"reward": sum(self._parts[name].weight * outcome["reward"] for name, outcome in outcomes.items())}
        for name, outcome in outcomes.items():
            for metric, value in outcome.items():
                key = f"reward_{name}" if metric == "reward" else metric
                total[f"{name}/{metric}" if key in total else key] = value
        return total


def _part(name: str, described: Any, timeout_s: float) -> _Part:
    keys = {"function", "weight", "args"}
    if not isinstance(described, Mapping) or not {"function"} <= described.keys() <= keys:
        raise UnknownPart(f"{_OPTION}.{name}: expected function, and perhaps weight and args; found {described!r}")
    weight, args = described.get("weight", 1.0), described.get("args", {})
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise UnknownPart(f"{_OPTION}.{name}.weight: expected a number, found {weight!r}")
    if not isinstance(args, Mapping):
        raise UnknownPart(f"{_OPTION}.{name}.args: expected a mapping, found {args!r}")
    try:
        function = find_reward(str(described["function"]))
        if isinstance(function, Weighted):
            raise UnknownPart("a weighted sum has no sums in it; expected their functions here")
        prepare(function, args, timeout_s)
        return _Part(function, float(weight), dict(args))
    except UnknownPart as e:
        raise UnknownPart(f"{_OPTION}.{name}: {e}") from None


REWARD = Weighted()
