"""Agents of the openai client. Each returns whether it found what the tests' policy writes."""

import asyncio
import json
import re

import openai
from openai import AsyncOpenAI, OpenAI

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Weather of a city.", "parameters": SCHEMA}


def weather(city: str) -> str:
    return f"It is sunny in {city}."


async def chat(task):
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = list(task.messages)
    completion = await client.chat.completions.create(model=task.model, messages=messages)
    messages += [completion.choices[0].message, {"role": "user", "content": "Are you sure?"}]
    completion = await client.chat.completions.create(model=task.model, messages=messages)
    return float(completion.choices[0].message.content == "Yes.")


def chat_streamed(task):
    client = OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = list(task.messages)
    for question in ("Are you sure?", "Really?"):
        chunks = client.chat.completions.create(
            model=task.model, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        for chunk in chunks:
            usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    return float(text == "Yes." and usage.completion_tokens > 0)


async def chat_tools(task):
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = [{"role": "system", "content": "Be brief."}, *task.messages]
    tools = [{"type": "function", "function": WEATHER}]
    while True:
        completion = await client.chat.completions.create(
            model=task.model, messages=messages, tools=tools, tool_choice="auto", parallel_tool_calls=True
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(message.content == "Sunny.")
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def chat_tools_streamed(task):
    """With the helper, which gathers the events."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = list(task.messages)
    tools = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    while True:
        async with client.chat.completions.stream(model=task.model, messages=messages, tools=tools) as stream:
            kinds = {event.type async for event in stream}
            message = (await stream.get_final_completion()).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(message.content == "Sunny." and "content.delta" in kinds)
        assert "tool_calls.function.arguments.done" in kinds, kinds
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def responses(task):
    """The server keeps the conversation."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    first = await client.responses.create(model=task.model, input=task.messages, instructions="Be brief.")
    second = await client.responses.create(
        model=task.model, input="Are you sure?", instructions="Be brief.", previous_response_id=first.id
    )
    return float(second.output_text == "Yes." and second.previous_response_id == first.id)


async def responses_streamed(task):
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    text = ""
    async for event in await client.responses.create(model=task.model, input=task.messages, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.completed":
            first = event.response
    assert text == first.output_text, text
    async with client.responses.stream(
        model=task.model, input="Are you sure?", previous_response_id=first.id
    ) as stream:  # the helper, which gathers the events
        async for event in stream:
            if event.type == "response.output_text.done":
                text = event.text
        second = await stream.get_final_response()
    return float(text == second.output_text == "Yes.")


async def responses_tools(task):
    """The client keeps the conversation."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    items = list(task.messages)
    while True:
        response = await client.responses.create(
            model=task.model, input=items, tools=[{"type": "function", **WEATHER, "strict": True}], store=False
        )
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return float(response.output_text == "Sunny.")
        for call in calls:
            result = weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def completions(task):
    client = OpenAI(base_url=task.base_url, api_key=task.api_key)
    first = client.completions.create(model=task.model, prompt="Once upon", max_tokens=100)
    pieces = client.completions.create(model=task.model, prompt="The end", max_tokens=100, stream=True)
    text = "".join(choice.text for chunk in pieces for choice in chunk.choices)
    return float((first.choices[0].text, text) == (" a time", " is near"))


async def errors(task):
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    ask = {"model": task.model, "messages": task.messages}
    refused: list[openai.APIStatusError] = []
    try:
        await client.chat.completions.create(**ask, temperature=0.3)
    except openai.BadRequestError as e:
        refused.append(e)
    try:
        await client.with_options(api_key="sk-wrong").chat.completions.create(**ask)
    except openai.AuthenticationError as e:
        refused.append(e)
    bad, unknown = refused
    assert "temperature: expected 1.0" in bad.message, bad
    assert (bad.param, unknown.type) == ("temperature", "authentication_error"), refused
    models = await client.models.list()
    assert [model.id for model in models.data] == [task.model], models
    completion = await client.chat.completions.create(**ask)
    return float(completion.choices[0].message.content == "3")


async def dialogue(task, turns: int = 3):
    """For whole runs, whose policy writes anything: short answers, rewarded for digits. Every other sample streams."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = list(task.messages)
    for turn in range(turns):
        ask = {"model": task.model, "messages": messages, "max_completion_tokens": 24}
        if task.index % 2:  # not with the helper, which raises where a limit ends an answer
            chunks = await client.chat.completions.create(**ask, stream=True)
            text = "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])
        else:
            text = (await client.chat.completions.create(**ask)).choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(turn)}]
    return {"reward": sum(c.isdigit() for c in text) / max(len(text), 1), "metrics": {"turns": turns}}


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


async def options(task):
    """All that a call may ask for, with ``rollout.agent.untrained: mask``; then turns until a limit ends the sample."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)

    async def ask(max_tokens=24, **options):
        extra_body = {"return_token_ids": True} | options.pop("extra_body", {})
        ask = {"model": task.model, "messages": task.messages, "max_tokens": max_tokens, "logprobs": True} | options
        completion = await client.chat.completions.create(**ask, extra_body=extra_body)
        choice, tokens = completion.choices[0], completion.usage.completion_tokens
        assert tokens == len(choice.token_ids) == len(choice.logprobs.content) <= max_tokens, completion
        assert all(token.logprob <= 0 for token in choice.logprobs.content), completion
        assert choice.finish_reason == "stop" or tokens == max_tokens, completion
        return choice

    best, *_ = await asyncio.gather(*(ask() for _ in range(3)), ask(1))
    low = list("0123")
    assert not set(low) & set((await ask(stop=low)).message.content)
    for untrained in ({"temperature": 0}, {"top_p": 0.5}, {"extra_body": {"top_k": 2, "min_p": 0.1}}):
        await ask(**untrained)
    assert re.fullmatch("[0-9]{3}", (await ask(extra_body={"guided_regex": "[0-9]{3}"})).message.content)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}
    numbered = await ask(96, response_format=form)
    assert numbered.finish_reason == "length" or isinstance(json.loads(numbered.message.content)["n"], int), numbered
    biased = await ask(3, logit_bias={str(best.token_ids[0]): 100}, temperature=0)
    assert biased.token_ids == [best.token_ids[0]] * len(biased.token_ids), biased
    await client.completions.create(model=task.model, prompt=best.token_ids, max_tokens=8)
    while True:
        await ask()
