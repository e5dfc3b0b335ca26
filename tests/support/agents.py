"""Agents that train in whole runs: functions of `rollout.agent.path`, with nothing but the standard library."""

import json
import os
import random
import time
import urllib.error
import urllib.request


def chat(task, messages, **body):
    """The message that answers a chat completion. A call that is cut is repeated, as the common clients do."""
    data = json.dumps({"model": task.model, "messages": messages, **body}).encode()
    for attempt in range(3):
        headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
        headers["x-stainless-retry-count"] = str(attempt)
        request = urllib.request.Request(f"{task.base_url}/chat/completions", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.loads(response.read())["choices"][0]["message"]
        except urllib.error.HTTPError as e:
            raise RuntimeError(f"{e.code} {e.read().decode()}") from e
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("no answer")


def single_turn(task):
    chat(task, task.messages)


def calls(task):
    """As many equal calls as the prompt's column ``calls`` says."""
    for _ in range(task.data["calls"]):
        chat(task, task.messages)
    return 0.0


def dialogue(task, turns: int = 3, die: float = 0.0, max_tokens: int = 6):
    """A few short turns; the share ``die`` of its processes ends in the middle."""
    messages = list(task.messages)
    for turn in range(turns):
        answer = chat(task, messages, max_tokens=max_tokens)
        if random.random() < die:
            os._exit(1)
        messages += [answer, {"role": "user", "content": str(turn)}]
    text = str(answer["content"])
    return {"reward": sum(c.isdigit() for c in text) / max(len(text), 1), "metrics": {"turns": turns}}
