"""A reward for responses of a given length, in characters."""

from asyncrl.types.prompts import Prompt


def length(prompt: Prompt, response: str, target: int = 20) -> dict[str, float]:
    distance = abs(len(response) - target)
    return {"reward": -distance / target, "close": float(distance < 3)}
