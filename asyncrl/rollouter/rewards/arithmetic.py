"""Reward of the arithmetic task: 1 for the correct final answer, whatever the steps."""

from __future__ import annotations

from asyncrl.data.arithmetic import final_answer, is_well_formed
from asyncrl.types.prompts import Prompt


def score(prompt: Prompt, response: str, format_share: float = 0.0) -> dict[str, float]:
    """``reward`` is 1 if the last line is ``answer: N`` with the prompt's answer, else 0; ``accuracy`` and
    ``valid_format`` are metrics. ``format_share`` in [0, 1] moves that share of the reward to the format.

    Raises ValueError if the prompt's answer is not an integer: a fault of the data, not of the response."""
    accuracy = float(final_answer(response) == int(prompt.answer))
    valid_format = float(is_well_formed(response))
    reward = (1 - format_share) * accuracy + format_share * valid_format
    return {"reward": reward, "accuracy": accuracy, "valid_format": valid_format}


REWARD = score
