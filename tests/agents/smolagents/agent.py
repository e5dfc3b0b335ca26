"""Agents of smolagents. Each returns whether it found what the tests' policy writes."""

from smolagents import AgentGenerationError, CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: name of the city
    """
    return f"It is sunny in {city}."


def model_of(task, **options):
    return OpenAIModel(task.model, api_base=task.base_url, api_key=task.api_key, **options)


def code(task, streamed: bool = False):
    model = model_of(task)
    agent = CodeAgent([weather], model, stream_outputs=streamed, verbosity_level=LogLevel.ERROR)
    return float(agent.run(task.messages[-1]["content"]) == "It is sunny in Bern.")


def tools(task, streamed: bool = False):
    model = model_of(task, tool_choice="auto")
    agent = ToolCallingAgent([weather], model, stream_outputs=streamed, verbosity_level=LogLevel.ERROR)
    return float(agent.run(task.messages[-1]["content"]) == "Sunny.")


def two_questions(task):
    """Without tools in between: each question is answered by a first step."""
    agent = CodeAgent([weather], model_of(task), verbosity_level=LogLevel.ERROR)
    agent.run(task.messages[-1]["content"])
    return float(agent.run("Are you sure?", reset=False) == "Yes.")


def forced_tools(task):
    """By default a tool-calling agent forces calls, which changes the distribution."""
    agent = ToolCallingAgent([weather], model_of(task), verbosity_level=LogLevel.ERROR)
    refused = ""
    try:
        agent.run(task.messages[-1]["content"])
    except AgentGenerationError as e:
        refused = " ".join(str(e).split())
    expected = "tool_choice: expected 'auto', the distribution that is trained, found 'required'"
    return float(expected in refused and code(task) == 1.0)


def forced_tools_then_code(task, streamed: bool = False):
    """As it comes, it works where such calls are masked; what it samples then is trained."""
    agent = ToolCallingAgent([weather], model_of(task), stream_outputs=streamed, verbosity_level=LogLevel.ERROR)
    return float(agent.run(task.messages[-1]["content"]) == "Sunny." and code(task) == 1.0)


TEMPLATES = {
    "system_prompt": "Write Python in <code></code>.",
    "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "Answer.", "post_messages": "{{task}}"},
}


def dialogue(task, turns: int = 2):
    """For whole runs, whose policy writes anything: short steps, rewarded for digits. None of them is a program, so the
    last turn asks for an answer without one. Every other sample streams."""
    model, streams = model_of(task, max_tokens=24), bool(task.index % 2)
    agent = CodeAgent([], model, TEMPLATES, max_steps=turns - 1, stream_outputs=streams, verbosity_level=LogLevel.OFF)
    text = str(agent.run(task.messages[-1]["content"]))
    return {"reward": sum(c.isdigit() for c in text) / max(len(text), 1), "metrics": {"turns": turns}}
