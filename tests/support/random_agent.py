"""An agent that does at random what agents do: turns in all APIs, tools, sub-agents, best of n, a compacted history,
connections that are cut, with and without a retry. Needs aiohttp."""

import asyncio
import json
import random

import aiohttp

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
CUTS_S = 0.05  # a connection is cut within this time


def demonstrations(seed, careful):
    """Half of them call the tool; see `asyncrl.models.make_checkpoint`."""
    rng = random.Random(f"{seed}/{careful}")
    while True:
        a, b = rng.randrange(10), rng.randrange(10)
        call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
        answer = f"<tool_call>\n{call}\n</tool_call>" if rng.random() < 0.5 else str(a + b)
        yield [{"role": "user", "content": f"Compute {a}+{b}"}], answer


async def solve(task, max_tokens: int = 48):
    rng = random.Random(f"{task.uid}/{task.index}")
    async with aiohttp.ClientSession() as http:
        agent = _Agent(task, http, rng, max_tokens)
        try:
            turns = await agent.converse()
        except _TooLong:  # of the context: it goes on with a summary
            turns = await agent.turn([{"role": "user", "content": "Go on"}]) and 1
    return {"reward": rng.random(), "metrics": {"conversation": turns}}


class _TooLong(Exception):
    pass


class _Agent:
    def __init__(self, task, http, rng, max_tokens) -> None:
        self.task, self.http, self.rng, self.max_tokens = task, http, rng, max_tokens
        self.tools = TOOLS if rng.random() < 0.6 else []

    async def converse(self) -> int:
        messages, turns = list(self.task.messages), self.rng.randint(1, 5)
        for turn in range(turns):
            doing = self.rng.choice([self.turn] * 5 + [self.best_of, self.sub_agents, self.compacted])
            answer = await doing(messages)
            messages.append(answer)
            called = answer.get("tool_calls") or ()
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": str(turn)} for call in called]
            if not answer.get("tool_calls"):
                messages.append({"role": "user", "content": f"Compute {turn}+{turn}"})
        return turns

    async def best_of(self, messages):
        answers = await asyncio.gather(*(self.turn(messages) for _ in range(2)))
        return max(answers, key=lambda answer: str(answer["content"]))

    async def sub_agents(self, messages):
        asked = [[{"role": "user", "content": f"Part {i} of {len(messages)}"}] for i in range(2)]
        await asyncio.gather(*map(self.turn, asked))
        return await self.turn(messages)

    async def compacted(self, messages):
        messages[:] = [{"role": "user", "content": f"So far {len(messages)}"}]
        return await self.turn(messages)

    async def turn(self, messages):
        api = self.rng.choice(["chat", "chat", "messages", "responses"])
        stream = self.rng.random() < 0.3
        body = getattr(self, f"{api}_body")(messages) | {"model": self.task.model, "stream": stream}
        path = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}[api]
        headers = {}
        if self.rng.random() < 0.15:  # a cut connection; the call is repeated, as a retry or as another one
            cut = asyncio.create_task(self.post(path, body, {}))
            await asyncio.wait([cut], timeout=self.rng.random() * CUTS_S)
            cut.cancel()
            await asyncio.wait([cut])
            if self.rng.random() < 0.7:
                headers = {"x-stainless-retry-count": "1"}
        found = await self.post(path, body, headers)
        return getattr(self, f"{api}_answer")(found, stream)

    async def post(self, path, body, headers):
        headers = {"Authorization": f"Bearer {self.task.api_key}", **headers}
        async with self.http.post(self.task.anthropic_base_url + path, json=body, headers=headers) as response:
            text = await response.text()
            if response.status == 400 and "the prompt has" in text:
                raise _TooLong
            if response.status != 200:
                raise RuntimeError(f"{response.status} {text}")
            if not body["stream"]:
                return json.loads(text)
            data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            return [json.loads(event) for event in data if event != "[DONE]"]

    # -- the APIs --------------------------------------------------------------------------------------------------

    def chat_body(self, messages):
        return {"messages": messages, "max_tokens": self.max_tokens, **({"tools": self.tools} if self.tools else {})}

    def chat_answer(self, found, stream):
        if not stream:
            return found["choices"][0]["message"]
        answer = {"role": "assistant", "content": None}
        for delta in (event["choices"][0]["delta"] for event in found if event["choices"]):
            if delta.get("content"):
                answer["content"] = (answer["content"] or "") + delta["content"]
            for call in delta.get("tool_calls") or ():
                calls = answer.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
                made = calls[call["index"]]
                made["id"] += call.get("id") or ""
                for name, value in (call.get("function") or {}).items():
                    made["function"][name] += value or ""
        return answer

    def messages_body(self, messages):
        made = []
        for m in messages:
            if m["role"] == "tool":
                result = {"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": m["content"]}
                made.append({"role": "user", "content": [result]})
                continue
            blocks = [{"type": "text", "text": m["content"]}] if m.get("content") else []
            for call in m.get("tool_calls") or ():
                use = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
                blocks.append(use | {"input": json.loads(call["function"]["arguments"])})
            made.append({"role": m["role"], "content": blocks or ""})
        tools = [
            {"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in self.tools
        ]  # fmt: skip
        return {"messages": made, "max_tokens": self.max_tokens, **({"tools": tools} if tools else {})}

    def messages_answer(self, found, stream):
        if stream:
            blocks = []
            for event in found:
                if event["type"] == "content_block_start":
                    blocks.append(dict(event["content_block"], json=""))
                elif event["type"] == "content_block_delta":
                    delta = event["delta"]
                    if delta["type"] == "text_delta":
                        blocks[-1]["text"] += delta["text"]
                    elif delta["type"] == "input_json_delta":
                        blocks[-1]["json"] += delta["partial_json"]
            for block in blocks:
                if block["type"] == "tool_use":
                    block["input"] = json.loads(block["json"] or "{}")
        else:
            blocks = found["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [_call(b["id"], b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}

    def responses_body(self, messages):
        items = []
        for m in messages:
            if m["role"] == "tool":
                output = {"type": "function_call_output", "call_id": m["tool_call_id"], "output": m["content"]}
                items.append(output)
                continue
            if m.get("content") or not m.get("tool_calls"):
                items.append({"role": m["role"], "content": m.get("content") or ""})
            called = m.get("tool_calls") or ()
            items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in called]
        tools = [{"type": "function", **t["function"]} for t in self.tools]
        return {"input": items, "max_output_tokens": self.max_tokens, **({"tools": tools} if tools else {})}

    def responses_answer(self, found, stream):
        output = (found[-1]["response"] if stream else found)["output"]
        text = "".join(p["text"] for item in output if item["type"] == "message" for p in item["content"])
        calls = [_call(i["call_id"], i["name"], i["arguments"]) for i in output if i["type"] == "function_call"]
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _call(identity, name, arguments):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
