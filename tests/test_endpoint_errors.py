"""The endpoint's refusals, in the form of each API, and agents that misbehave: each costs its own sample at most."""

import asyncio

import pytest

from asyncrl.rollouter.endpoint import server, session
from asyncrl.rollouter.endpoint.dialects import DIALECTS
from asyncrl.types.samples import FinishReason, Sample
from tests.support.endpoint import (
    PROMPT,
    EndpointSystem,
    Refused,
    chat,
    made,
    make_model,
    post,
    sampled_tokens,
    trained_tokens,
)

CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = DIALECTS
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def body(path, text="hi", **more):
    """The smallest request of an API, with that text as its prompt."""
    prompt = {
        CHAT: {"messages": [{"role": "user", "content": text}]},
        COMPLETIONS: {"prompt": text},
        RESPONSES: {"input": text},
        MESSAGES: {"messages": [{"role": "user", "content": text}], "max_tokens": 5},
        GENERATE: {"token_ids": [5] * len(text), "sampling_params": {}},
    }
    return {"model": "m", **prompt[path], **more}


async def error(call, status, path):
    """The error's type and message, in the API's own form."""
    with pytest.raises(Refused) as refused:
        await call
    found = refused.value.body
    assert refused.value.status == status, found
    if path == MESSAGES:
        assert found.keys() == {"type", "error"}
        assert (found["type"], found["error"].keys()) == ("error", {"type", "message"})
    else:
        assert found.keys() == {"error"}
        assert found["error"].keys() == {"message", "type", "param", "code"}
    return found["error"]["type"], found["error"]["message"]


@pytest.mark.parametrize("path", DIALECTS)
async def test_every_api_refuses_in_its_own_form(model, path):
    async def agent(task, http):
        for headers in ({"Authorization": ""}, {"Authorization": "Basic eA=="}, {"x-api-key": "sk-asyncrl-another"}):
            kind, message = await error(post(task, http, path, body(path), headers), 401, path)
            assert (kind, "API key" in message) == ("authentication_error", True)
        kind, message = await error(post(task, http, path, body(path, "long " * 100)), 400, path)
        assert kind == "invalid_request_error"
        assert "maximum context length is" in message
        assert "rollout.max_response_tokens = 60" in message
        unknown = body(path, surprise=1)
        kind, message = await error(post(task, http, path, unknown), 400, path)
        assert (kind, message.split(":")[0]) == ("invalid_request_error", "surprise")
        kind, message = await error(post(task, http, f"/sessions/{task.api_key[:-1]}{path}", body(path)), 401, path)
        await post(task, http, path, body(path))

        ended.append(task)
        if len(ended) == 2:
            kind, message = await error(post(ended[0], http, path, body(path)), 409, path)
            assert (kind, "has ended" in message) == ("invalid_request_error", True)

    ended = []
    async with EndpointSystem(model, agent, lambda prompt: "one", max_response_tokens=60) as system:
        await made(system)
        system.partials = [type(system.partials[0])()]
        assert isinstance((await system.samples())[0], Sample)
        assert system.counted()["refused"] == 4


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_policy_that_fails_is_an_error_of_the_server_and_costs_the_sample(model, path, monkeypatch):
    async def agent(task, http):
        kind, message = await error(post(task, http, path, body(path)), 500, path)
        assert kind == ("api_error" if path == MESSAGES else "server_error")
        assert "cannot be parsed" in message

    async with EndpointSystem(model, agent, lambda prompt: "one") as system:
        monkeypatch.setattr(system.renderer, "text_of", lambda tokens: 1 / 0)
        (failed,) = await system.samples()
        assert failed.reason == "endpoint_error"


async def test_requests_that_no_api_has(model, monkeypatch):
    async def agent(task, http):
        assert (await error(post(task, http, "/v1/embeddings", {}), 404, CHAT))[0] == "not_found_error"
        headers = {"Authorization": f"Bearer {task.api_key}"}
        async with http.get(task.anthropic_base_url + MESSAGES, headers=headers) as response:
            assert (response.status, (await response.json())["type"]) == (405, "error")
        for path in DIALECTS:
            kind, _ = await error(post(task, http, path, body(path, "x" * 1000)), 413, path)
            assert kind == ("request_too_large" if path == MESSAGES else "invalid_request_error")
        await chat(task, http, HI)

    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1000)
    async with EndpointSystem(model, agent, lambda prompt: "one") as system:
        await made(system)


@pytest.mark.parametrize("path", DIALECTS)
async def test_too_many_calls_at_once_are_refused_until_some_have_ended(model, path, monkeypatch):
    monkeypatch.setattr(session, "MAX_CALLS_AT_ONCE", 2)

    async def agent(task, http):
        system.policy.held.clear()
        calls = [asyncio.create_task(post(task, http, path, body(path, text))) for text in ("a", "bb")]
        await system.policy.has_requests(2)
        retried = body(path, "ccc")
        for count in ("0", "1"):
            call = post(task, http, path, retried, {"x-stainless-retry-count": count})
            assert (await error(call, 429, path))[0] == "rate_limit_error"
        url, headers = task.anthropic_base_url + path, {"Authorization": f"Bearer {task.api_key}"}
        async with http.post(url, json=retried, headers=headers) as response:
            assert "x-should-retry" not in response.headers  # clients retry of their own accord
        system.policy.held.set()
        await asyncio.gather(*calls)
        await post(task, http, path, retried, {"x-stainless-retry-count": "9" * 5000})

    async with EndpointSystem(model, agent, lambda prompt: "one") as system:
        await made(system)
        assert len(system.policy.log) == 3


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def called(**changed):
    return [*HI, {"role": "assistant", "tool_calls": [{**CALL, **changed}]}]


MALFORMED = {
    "no messages": (CHAT, {"messages": []}, "messages"),
    "a message that is a text": (CHAT, {"messages": ["hi"]}, "messages[0]"),
    "content that is a number": (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    "a call without arguments": (
        CHAT,
        {"messages": called(function={"name": "f"})},
        "messages[1].tool_calls[0].function.arguments",
    ),
    "a call without an id": (CHAT, {"messages": called(id=None)}, "messages[1].tool_calls[0].id"),
    "a result of no call": (CHAT, {"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    "tools that are an object": (CHAT, {"tools": TOOL}, "tools"),
    "a tool without a function": (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    "a tool without a name": (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "a schema that is a list": (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    "a forced tool": (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    "no tokens": (CHAT, {"max_tokens": 0}, "max_tokens"),
    "an empty stop": (CHAT, {"stop": [""]}, "stop"),
    "two choices": (CHAT, {"n": 2}, "n"),
    "half of a surrogate pair in a tool": (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "\ud800"}}]},
        "body",
    ),
    "half of a surrogate pair in a stop": (CHAT, {"stop": ["\ud800"]}, "body"),
    "half of a surrogate pair in a text": (COMPLETIONS, {"prompt": "\ud800"}, "body"),
    "two prompts": (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
    "no input": (RESPONSES, {"input": []}, "input"),
    "an item of no kind": (RESPONSES, {"input": [{"type": "x"}]}, "input[0].type"),
    "an output of no call": (
        RESPONSES,
        {"input": [{"type": "function_call_output", "output": "x"}]},
        "input[0].call_id",
    ),
    "a nested tool": (RESPONSES, {"tools": [TOOL]}, "tools[0].function"),
    "an id of another API": (RESPONSES, {"previous_response_id": "chatcmpl-x"}, "previous_response_id"),
    "an id of no answer": (RESPONSES, {"previous_response_id": "resp_x"}, "previous_response_id"),
    "the assistant's message last": (
        MESSAGES,
        {"messages": [*HI, {"role": "assistant", "content": "x"}]},
        "messages",
    ),
    "a block of no kind": (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
        "messages[0].content[0].type",
    ),
    "a schema that is a text": (MESSAGES, {"tools": [{"name": "f", "input_schema": "x"}]}, "tools[0].input_schema"),
    "a tool of the API's own": (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    "a template of its own": (
        CHAT,
        {"chat_template_kwargs": {"chat_template": "{{ 'x' }}"}},
        "chat_template_kwargs.chat_template",
    ),
    "no limit": (MESSAGES, {"max_tokens": None}, "max_tokens"),
    "a message of no answer": (
        MESSAGES,
        {"thread": {"type": "continue", "previous_message_id": "msg_x"}},
        "thread.previous_message_id",
    ),
    "tokens outside the vocabulary": (GENERATE, {"token_ids": [10**6]}, "prompt"),
    "no parameters": (GENERATE, {"sampling_params": None}, "sampling_params"),
    "a stream of tokens": (GENERATE, {"stream": True}, "stream"),
}


async def test_malformed_requests_are_refused_by_the_name_of_the_field(model):
    async def agent(task, http):
        for name, (path, changed, field) in MALFORMED.items():
            kind, message = await error(post(task, http, path, {**body(path), **changed}), 400, path)
            assert (name, kind, message.split(":")[0]) == (name, "invalid_request_error", field), message
        await chat(task, http, HI)

    async with EndpointSystem(model, agent, lambda prompt: "one") as system:
        await made(system)
        assert system.counted() == {"rendered": 1, "refused": len(MALFORMED)}


@pytest.mark.parametrize("depth", [500, 900, 960, 990, 5000])
async def test_arguments_of_any_depth_are_a_text_of_the_conversation(model, depth):
    """What is nested too deep to be read as JSON is passed on as it is written."""
    arguments = '{"a":' * depth + "1" + "}" * depth

    async def agent(task, http):
        made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*HI, {"role": "assistant", "tool_calls": [made]}, *HI]
        await chat(task, http, messages)

    async with EndpointSystem(model, agent, lambda prompt: "one", max_response_tokens=100_000) as system:
        await made(system)
        written = system.tokenizer.hf.decode(list(system.policy.log[0][0]))
        assert written.replace(" ", "").replace("\\", "").count('"a":') == depth


async def test_an_agent_that_floods_ends_at_a_limit_and_the_others_go_on(model):
    async def agent(task, http):
        if task.index == 1:
            statuses.extend(await asyncio.gather(*(one(task, http, i) for i in range(40))))
            while True:
                await chat(task, http, task.messages)
        await chat(task, http, task.messages)

    async def one(task, http, i):
        try:
            for _ in range(25):
                await chat(task, http, [{"role": "user", "content": f"{i}"}])
        except Refused as refused:
            return refused.status

    statuses = []
    async with EndpointSystem(model, agent, lambda prompt: "o", n=3, max_turns=100) as system:
        group = await system.samples()
        assert [s.finish for s in group] == [FinishReason.STOP, FinishReason.TURNS, FinishReason.STOP]
        assert len(group[1].sequences) == 100
        assert set(statuses) <= {409}


async def floods_with_calls_that_are_refused(task, http):
    for _ in range(300):
        with pytest.raises(Refused, match="400"):
            await chat(task, http, [])


async def gives_up(task, http):
    await chat(task, http, HI, max_tokens="x")


MISBEHAVING = {
    "only bad calls": (floods_with_calls_that_are_refused, "no_calls", "without any answer"),
    "its client's error": (gives_up, "agent_error", "Refused: 400"),
}


@pytest.mark.parametrize(("bad", "reason", "message"), MISBEHAVING.values(), ids=MISBEHAVING)
async def test_an_agent_that_misbehaves_costs_its_sample_alone(model, bad, reason, message):
    async def agent(task, http):
        if task.index == 1:
            return await bad(task, http)
        await chat(task, http, task.messages)

    async with EndpointSystem(model, agent, lambda prompt: "one", n=3) as system:
        group = await system.samples()
        assert [type(s) is Sample for s in group] == [True, False, True]
        assert (group[1].reason, message in group[1].message) == (reason, True)


async def test_empty_messages_and_empty_answers_are_a_conversation_as_any(model):
    async def agent(task, http):
        messages = [*task.messages, {"role": "assistant", "content": ""}, {"role": "user", "content": ""}]
        for _ in range(2):
            answer = await chat(task, http, messages)
            assert (answer["content"], "tool_calls" in answer) == ("", False)
            messages += [answer, {"role": "user", "content": ""}]

    async with EndpointSystem(model, agent, lambda prompt: "<|im_end|>") as system:
        sample = await made(system)
        assert [len(tokens) for _, tokens in system.policy.log] == [1, 1]
        assert len(sample.sequences) == 1


async def test_an_agent_that_calls_for_ever_ends_at_its_limit_of_time(model):
    async def agent(task, http):
        while True:
            await asyncio.sleep(0.02)
            await chat(task, http, task.messages)

    async with EndpointSystem(model, agent, lambda prompt: "one", max_sample_s=0.5) as system:
        (sample,) = await system.samples()
        assert sample.finish is FinishReason.TIME
        trained = trained_tokens(sample, system.tokenizer.encode(PROMPT))
        assert set(trained) <= set(sampled_tokens(system.policy.log))  # the last call may have come too late
        assert len(trained) > 4
