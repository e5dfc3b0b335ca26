"""Demonstrations of a policy that calls a shell, for `asyncrl.models.make_checkpoint`."""

import json
import random


def shell(seed, careful):
    """Most answers call the tool."""
    rng = random.Random(f"{seed}/{careful}")
    while True:
        a, b = rng.randrange(10), rng.randrange(10)
        call = json.dumps({"name": "shell", "arguments": {"command": f"expr {a} + {b}"}})
        answer = f"<tool_call>\n{call}\n</tool_call>" if rng.random() < 0.8 else str(a + b)
        yield [{"role": "user", "content": f"Compute {a}+{b}"}], answer
