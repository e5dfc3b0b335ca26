"""A program as an agent: the client reads its URL and key from the environment, as everywhere."""

import json
import os

from openai import OpenAI

with open(os.environ["ASYNCRL_TASK"]) as file:
    task = json.load(file)
asked = OpenAI().chat.completions.create(model=os.environ["ASYNCRL_MODEL"], messages=task["messages"])
answer = asked.choices[0].message.content or ""
with open(os.environ["ASYNCRL_RESULT"], "w") as file:
    json.dump({"reward": float(answer.strip().endswith(str(task["answer"])))}, file)
