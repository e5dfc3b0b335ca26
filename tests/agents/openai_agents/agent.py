"""Agents of openai-agents. Each returns whether it found what the tests' policy writes."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}

set_tracing_disabled(True)  # it would be sent to OpenAI


@function_tool
def weather(city: str) -> str:
    """Weather of a city."""
    return f"It is sunny in {city}."


def model_of(task, api: str):
    return MODELS[api](task.model, AsyncOpenAI(base_url=task.base_url, api_key=task.api_key))


async def tools(task, api: str, streamed: bool = False):
    agent = Agent("Forecaster", instructions="Be brief.", model=model_of(task, api), tools=[weather])
    if streamed:
        result = Runner.run_streamed(agent, task.messages)
        kinds = {event.type async for event in result.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
    else:
        result = await Runner.run(agent, task.messages)
    return float(result.final_output == "Sunny.")


async def two_questions(task, api: str):
    agent = Agent("Forecaster", instructions="Be brief.", model=model_of(task, api), tools=[weather])
    result = await Runner.run(agent, task.messages)
    result = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "Are you sure?"}])
    return float(result.final_output == "Yes.")


async def server_keeps_the_conversation(task):
    agent = Agent("Forecaster", instructions="Be brief.", model=model_of(task, "responses"), tools=[weather])
    result = await Runner.run(agent, task.messages)
    result = await Runner.run(agent, "Are you sure?", previous_response_id=result.last_response_id)
    return float(result.final_output == "Yes.")


async def handoff(task, api: str):
    model = model_of(task, api)
    forecaster = Agent("Forecaster", instructions="Forecast.", model=model, tools=[weather])
    triage = Agent("Triage", instructions="Hand over.", model=model, handoffs=[forecaster])
    result = await Runner.run(triage, task.messages)
    assert result.last_agent is forecaster, result.last_agent.name
    return float(result.final_output == "Sunny.")


async def dialogue(task, turns: int = 3):
    """For whole runs, whose policy writes anything: short answers, rewarded for digits. Every other sample streams."""
    settings = ModelSettings(max_tokens=24)
    agent = Agent("Writer", instructions="Digits.", model=model_of(task, "chat"), model_settings=settings)
    items = list(task.messages)
    for turn in range(turns):
        if task.index % 2:
            result = Runner.run_streamed(agent, items)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, items)
        items = [*result.to_input_list(), {"role": "user", "content": str(turn)}]
    text = str(result.final_output)
    return {"reward": sum(c.isdigit() for c in text) / max(len(text), 1), "metrics": {"turns": turns}}
