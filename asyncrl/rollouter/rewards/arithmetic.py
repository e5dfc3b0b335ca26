"""The reward of the arithmetic task: one for the right final answer, and nothing for how it came about."""

from __future__ import annotations

from asyncrl.data.arithmetic import final_answer, is_well_formed
from asyncrl.sample import Prompt


def score(prompt: Prompt, response: str, format_share: float = 0.0) -> dict[str, float]:
    """``reward`` 1 if the last line is ``answer: N`` with the prompt's answer, else 0; ``accuracy`` and
    ``valid_format`` are reported beside it. ``format_share`` in [0, 1] moves that share of the reward to the format.

    Raises ValueError if the prompt's answer is not an integer: that is a fault of the data, not of the response."""
    accuracy = float(final_answer(response) == int(prompt.answer))
    valid_format = float(is_well_formed(response))
    reward = (1 - format_share) * accuracy + format_share * valid_format
    return {"reward": reward, "accuracy": accuracy, "valid_format": valid_format}
