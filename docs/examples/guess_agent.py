"""An agent written with the openai client: it looks for a number with a tool that says higher or lower."""

import json
import math
import re
from functools import cache

from openai import AsyncOpenAI

GUESS = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Says whether the number is higher or lower.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}


@cache
def connection(base_url):
    """One pool of connections for all samples, because opening one takes longer than a call; the client's own limit of
    five seconds for that is too short for many at once on a busy machine."""
    return AsyncOpenAI(base_url=base_url, api_key="of each sample", timeout=600)


async def solve(task, guesses: int = 5):
    """Reward 1 for the number, and up to a half for how far the possible ones are narrowed down."""
    client = connection(task.base_url).with_options(api_key=task.api_key)
    messages, number = list(task.messages), int(task.answer)
    low, high = first = tuple(map(int, re.findall(r"\d+", task.messages[-1]["content"])))
    found, turns, answer = False, 0, None
    while turns < guesses and not found and (answer is None or answer.tool_calls):
        turns += 1
        asked = await client.chat.completions.create(model=task.model, messages=messages, tools=[GUESS])
        answer = asked.choices[0].message
        messages.append(answer)
        for call in answer.tool_calls or ():
            n = json.loads(call.function.arguments).get("n")
            if not isinstance(n, int):
                said = "expected an integer"
            elif n < number:
                said, low = f"higher than {n}", max(low, n)
            else:
                said, high = f"lower than {n}", min(high, n)
            found = found or n == number
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    narrowed = 1 - math.log(high - low) / math.log(first[1] - first[0])
    reward = 1.0 if found else narrowed / 2
    return {"reward": reward, "metrics": {"accuracy": float(found), "turns": turns}}
