"""Agents of the anthropic client. Each returns whether it found what the tests' policy writes."""

import anthropic
from anthropic import Anthropic, AsyncAnthropic, beta_async_tool

WEATHER = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def weather(city: str) -> str:
    return f"It is sunny in {city}."


async def chat(task):
    client = AsyncAnthropic(base_url=task.anthropic_base_url, api_key=task.api_key)
    messages, ask = list(task.messages), {"model": task.model, "max_tokens": 1000, "system": "Be brief."}
    message = await client.messages.create(messages=messages, **ask)
    assert message.stop_reason == "end_turn", message
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "Are you sure?"}]
    message = await client.messages.create(messages=messages, **ask)
    return float(message.content[0].text == "Yes.")


def chat_streamed(task):
    """With the helper, which gathers the events."""
    client = Anthropic(base_url=task.anthropic_base_url, api_key=task.api_key)
    messages = list(task.messages)
    for question in ("Are you sure?", "Really?"):
        with client.messages.stream(model=task.model, max_tokens=1000, messages=messages) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert message.content[0].text == text, message
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": question}]
    return float(text == "Yes." and message.usage.output_tokens > 0)


async def tools(task, streamed: bool = False):
    client = AsyncAnthropic(base_url=task.anthropic_base_url, api_key=task.api_key)
    messages = list(task.messages)
    ask = {"model": task.model, "max_tokens": 1000, "tools": [WEATHER]}
    while True:
        if streamed:
            async with client.messages.stream(messages=messages, **ask) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(messages=messages, **ask)
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return float(message.content[-1].text == "Sunny.")
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


async def tool_runner(task, **options):
    """The client runs the tools."""

    @beta_async_tool
    async def weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: name of the city
        """
        return f"It is sunny in {city}."

    client = AsyncAnthropic(base_url=task.anthropic_base_url, api_key=task.api_key)
    runner = client.beta.messages.tool_runner(
        model=task.model, max_tokens=1000, tools=[weather], messages=task.messages, **options
    )
    message = await runner.until_done()
    return float(message.content[-1].text == "Sunny.")


async def errors(task):
    client = AsyncAnthropic(base_url=task.anthropic_base_url, api_key=task.api_key)
    ask = {"model": task.model, "max_tokens": 1000, "messages": task.messages}
    refused: list[anthropic.APIStatusError] = []
    try:
        await client.messages.create(**ask, extra_body={"temperature": 0.3})  # no argument of this release
    except anthropic.BadRequestError as e:
        refused.append(e)
    try:
        await client.with_options(api_key="sk-wrong").messages.create(**ask)
    except anthropic.AuthenticationError as e:
        refused.append(e)
    bad, unknown = refused
    assert "temperature: expected 1.0" in bad.message, bad
    assert unknown.type == "authentication_error", unknown
    models = await client.models.list()
    assert [model.id for model in models.data] == [task.model], models
    message = await client.messages.create(**ask)
    return float(message.content[0].text == "3")


async def dialogue(task, turns: int = 3):
    """For whole runs, whose policy writes anything: short answers, rewarded for digits. Every other sample streams."""
    client = AsyncAnthropic(base_url=task.anthropic_base_url, api_key=task.api_key)
    messages = list(task.messages)
    for turn in range(turns):
        ask = {"model": task.model, "max_tokens": 24, "messages": messages}
        if task.index % 2:
            async with client.messages.stream(**ask) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**ask)
        text = "".join(block.text for block in message.content if block.type == "text")
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": str(turn)}]
    return {"reward": sum(c.isdigit() for c in text) / max(len(text), 1), "metrics": {"turns": turns}}
