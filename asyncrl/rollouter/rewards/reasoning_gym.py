"""Reward of tasks of reasoning-gym: what their verifiers give, from 0 to 1, for the answer that a response has between
its last ``<answer>`` and ``</answer>``; see `asyncrl.data.sources.reasoning_gym`."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from typing import Any

from asyncrl.plugins.registry import UnknownPart
from asyncrl.types.prompts import Prompt

_ANSWER = re.compile(r".*<answer>(.*?)</answer>", re.DOTALL)  # the last one


class ReasoningGymVerifier:
    """``accuracy`` is 1 for the whole reward, else 0; ``answered`` is 1 if the response has the tags."""

    columns = ("task", "item")

    def prepare(self) -> None:
        """Raises UnknownPart without the package."""
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UnknownPart(
                "reward.function: reasoning_gym needs the package reasoning-gym, which is not installed; "
                "`pip install 'reasoning-gym>=0.1.25,<0.2'` adds it (a part of it is compiled with a C compiler)"
            )

    def __call__(self, prompt: Prompt, response: str) -> dict[str, float]:
        """Raises ValueError for a prompt that is not of `asyncrl.data.sources.reasoning_gym`."""
        if not {"task", "item"} <= prompt.extra.keys():
            raise ValueError("expected the columns task and item of data.source=reasoning_gym:TASK, found others")
        found = _ANSWER.match(response)
        score = float(_verifier(prompt.extra["task"])(found[1].strip(), prompt.extra["item"])) if found else 0.0
        return {"reward": score, "accuracy": float(score == 1.0), "answered": float(found is not None)}


@cache
def _verifier(task: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(task)


REWARD = ReasoningGymVerifier()
