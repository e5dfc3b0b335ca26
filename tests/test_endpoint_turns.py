"""Which tokens belong together: a call continues the very tokens that the engine had, or begins a sequence."""

import asyncio
import gc
import json

import pytest
from aiohttp import web

from tests.support.endpoint import (
    PROMPT,
    WEATHER,
    EndpointSystem,
    Refused,
    chat,
    counting,
    made,
    make_model,
    post,
    sequence_texts,
)

USER = [dict(m) for m in PROMPT.messages]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


async def test_a_conversation_continues_the_very_tokens_of_the_engine(model):
    async def agent(task, http):
        messages = list(task.messages)
        for word in ("more", "again"):
            messages.append(await chat(task, http, messages))
            messages.append({"role": "user", "content": word})
        await chat(task, http, messages)

    async with EndpointSystem(model, agent, counting()) as system:
        sample = await made(system)
        (text,) = sequence_texts(system, sample)
        bridge = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        assert text == "one" + bridge.format("more") + "two" + bridge.format("again") + "three<|im_end|>"
        assert system.counted() == {"rendered": 1, "bridged": 2}


async def test_tokens_that_the_tokenizer_would_not_choose_are_kept(model):
    """The model samples "one" letter by letter; rendering the conversation again would give other tokens."""

    async def agent(task, http):
        answer = await chat(task, http, task.messages)
        await chat(task, http, [*task.messages, answer, {"role": "user", "content": "more"}])

    async with EndpointSystem(model, agent, lambda prompt: [*"Compute"]) as system:
        sample = await made(system)
        assert len(system.renderer.encode("Compute")) < len("Compute")
        assert len(sample.sequences) == 1
        assert system.counted() == {"rendered": 1, "bridged": 1}


async def test_tool_calls_are_parsed_and_their_results_are_only_read(model):
    call = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    texts = iter([call, "Sunny."])

    async def agent(task, http):
        answer = await chat(task, http, task.messages, tools=[WEATHER])
        assert answer["content"] == "Let me see."
        (tool_call,) = answer["tool_calls"]
        assert json.loads(tool_call["function"]["arguments"]) == {"city": "Bern"}
        # harnesses serialise arguments again
        tool_call["function"]["arguments"] = '{"city":"Bern"}'
        result = {"role": "tool", "tool_call_id": tool_call["id"], "content": "sun"}
        answer = await chat(task, http, [*task.messages, answer, result], tools=[WEATHER])
        return float(answer["content"] == "Sunny.")

    async with EndpointSystem(model, agent, lambda prompt: next(texts)) as system:
        sample = await made(system)
        (text,) = sequence_texts(system, sample)
        assert text.endswith(
            "<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\nSunny.<|im_end|>"
        )
        assert sample.reward == 1.0
        assert system.counted() == {"rendered": 1, "bridged": 1}


async def test_a_thread_of_messages_keeps_system_prompt_and_tools(model):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    texts = iter([call, call, "Sunny."])

    async def agent(task, http):
        function = WEATHER["function"]
        tool = {"name": "weather", "description": function["description"], "input_schema": function["parameters"]}
        said = {"model": "m", "max_tokens": 500, "messages": task.messages, "system": "Be brief.", "tools": [tool]}
        found = await post(task, http, "/v1/messages", {**said, "thread": {"type": "create"}})
        while found["stop_reason"] == "tool_use":
            result = {"type": "tool_result", "tool_use_id": found["content"][0]["id"], "content": "sun"}
            said = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": [result]}]}
            thread = {"type": "continue", "previous_message_id": found["id"]}
            found = await post(task, http, "/v1/messages", {**said, "thread": thread})
        with pytest.raises(Refused, match=r"400.*thread\.previous_message_id: this sample has no answer 'x'"):
            await post(task, http, "/v1/messages", {**said, "thread": {**thread, "previous_message_id": "msg_x"}})
        return float(found["content"][0]["text"] == "Sunny.")

    async with EndpointSystem(model, agent, lambda prompt: next(texts)) as system:
        sample = await made(system)
        (text,) = sequence_texts(system, sample)
        assert sample.reward == 1.0
        assert (text.count("Be brief."), text.count("Weather of a city.")) == (1, 1)
        assert system.counted() == {"rendered": 1, "bridged": 2, "refused": 1}


async def test_reasoning_stays_until_the_template_strips_it(model):
    thought = "<think>\nhm\n</think>\n\n"
    call = thought + '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    texts = iter([call, thought + "Sunny.", "Bye."])

    async def agent(task, http):
        messages = list(task.messages)
        answer = await chat(task, http, messages, tools=[WEATHER])
        assert answer["reasoning_content"] == "hm"
        messages += [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "sun"}]
        messages.append(await chat(task, http, messages, tools=[WEATHER]))
        messages.append({"role": "user", "content": "bye"})
        await chat(task, http, messages, tools=[WEATHER])

    async with EndpointSystem(model, agent, lambda prompt: next(texts)) as system:
        sample = await made(system)
        assert system.counted() == {
            "rendered": 1, "bridged": 1, "branched": 1, "branched/history_rewritten": 1,
        }  # fmt: skip
        assert [text.count("<think>") for text in sequence_texts(system, sample)] == [2, 0]


REWRITES = {
    "edited history": lambda m: [{"role": "user", "content": "other"}, *m[1:], {"role": "user", "content": "go"}],
    "summary": lambda m: [{"role": "user", "content": "a summary"}],
    "changed answer": lambda m: [m[0], {**m[1], "content": "ONE"}, {"role": "user", "content": "go"}],
}


@pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES)
async def test_a_rewritten_history_is_a_sequence_of_its_own(model, rewrite):
    async def agent(task, http):
        messages = [*task.messages, await chat(task, http, task.messages)]
        await chat(task, http, rewrite(messages))

    async with EndpointSystem(model, agent, counting()) as system:
        sample = await made(system)
        assert len(sample.sequences) == 2
        assert system.counted() == {"rendered": 1, "branched": 1, "branched/new_conversation": 1}


async def test_an_answer_that_a_limit_ended_continues_only_where_rendering_gives_its_tokens(model):
    async def agent(task, http):
        answer = await chat(task, http, task.messages, max_tokens=4)
        await chat(task, http, [*task.messages, answer, {"role": "user", "content": "go"}])

    expected = {"one two": {"bridged": 1}, ("C", "o", "m", "p"): {"branched": 1, "branched/no_stop_token": 1}}
    for text, counted in expected.items():
        async with EndpointSystem(model, agent, lambda prompt, text=text: text) as system:
            sample = await made(system)
            assert len(sample.sequences) == 1 + ("branched" in counted)
            assert system.counted() == {"rendered": 1} | counted


async def test_sub_agents_at_once(model):
    async def agent(task, http):
        async def helper(i):
            return (await chat(task, http, [{"role": "user", "content": f"helper {i}"}]))["content"]

        found = await asyncio.gather(*map(helper, range(5)))
        await chat(task, http, [*task.messages, {"role": "assistant", "content": " ".join(found)}, USER[0]])

    async with EndpointSystem(model, agent, lambda prompt: prompt[-24:-12]) as system:
        sample = await made(system)
        assert len(sample.sequences) == 6


WEATHER_CALL = 'Compute\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


FLAT_WEATHER = {"type": "function", **WEATHER["function"]}


def differently(text, texts=()):
    """Writes equal texts in different tokens, none of them those of the tokenizer; then the ``texts``."""
    ways = iter([[text[:1], text[1:2], text[2:]], [text[:2], text[2:3], text[3:]], *texts])
    return lambda prompt: next(ways)


@pytest.mark.parametrize("chosen", [0, 1])
async def test_ids_of_tool_calls_say_which_of_two_equal_answers_goes_on(model, chosen):
    async def agent(task, http):
        answers = [await chat(task, http, task.messages, tools=[WEATHER]) for _ in range(2)]
        assert answers[0]["tool_calls"][0]["function"] == answers[1]["tool_calls"][0]["function"]
        answer = answers[chosen]
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "sun"}
        messages = [*task.messages, answer, result]
        messages.append(await chat(task, http, messages, tools=[WEATHER]))
        await chat(task, http, [*messages, USER[0]], tools=[WEATHER])

    async with EndpointSystem(model, agent, differently(WEATHER_CALL, ["Sunny.", "Bye."])) as system:
        sample = await made(system)
        (prompt, answered), (_, other) = system.policy.log[chosen], system.policy.log[1 - chosen]
        assert answered != other
        assert system.policy.log[2][0][: len(prompt) + len(answered)] == prompt + answered
        assert len(sample.sequences) == 2
        assert system.counted() == {"rendered": 2, "bridged": 2}


@pytest.mark.parametrize("chosen", [0, 1])
async def test_earlier_ids_say_it_for_answers_that_have_none(model, chosen):
    """Two branches that say the same: they differ in the ids of the call before."""

    async def agent(task, http):
        branches = []
        for _ in range(2):
            answer = await chat(task, http, task.messages, tools=[WEATHER])
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "sun"}
            branches.append([*task.messages, answer, result])
        for messages in branches:
            messages.append(await chat(task, http, messages, tools=[WEATHER]))
        await chat(task, http, [*branches[chosen], USER[0]], tools=[WEATHER])

    async with EndpointSystem(model, agent, differently(WEATHER_CALL, ["Sunny.", "Sunny.", "Bye."])) as system:
        await made(system)
        prompt, answered = system.policy.log[2 + chosen]
        assert system.policy.log[4][0][: len(prompt) + len(answered)] == prompt + answered
        assert system.counted() == {"rendered": 2, "bridged": 3}


async def test_without_ids_that_decide_a_conversation_is_ambiguous(model):
    async def agent(task, http):
        answers = [await chat(task, http, task.messages) for _ in range(2)]
        await chat(task, http, [*task.messages, answers[1], USER[0]])

    async with EndpointSystem(model, agent, differently("Compute", ["Bye."])) as system:
        assert len((await made(system)).sequences) == 3
        counted = system.counted()
        assert (counted["rendered"], counted["branched/ambiguous_parent"]) == (2, 1)

    async def invents(task, http):
        for _ in range(2):
            answer = await chat(task, http, task.messages, tools=[WEATHER])
        answer["tool_calls"][0]["id"] = "another"
        result = {"role": "tool", "tool_call_id": "another", "content": "sun"}
        await chat(task, http, [*task.messages, answer, result], tools=[WEATHER])

    async with EndpointSystem(model, invents, differently(WEATHER_CALL, ["Bye."])) as system:
        await made(system)
        assert system.counted()["branched/ambiguous_parent"] == 1


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_a_call_continues_the_answer_that_it_names(model, path, chosen):
    async def agent(task, http):
        name, more = {
            "/v1/responses": ("input", {}),
            "/v1/messages": ("messages", {"max_tokens": 500}),
        }[path]
        ids = [(await post(task, http, path, {"model": "m", name: USER, **more}))["id"] for _ in range(2)]
        previous = {
            "/v1/responses": {"previous_response_id": ids[chosen]},
            "/v1/messages": {"thread": {"type": "continue", "previous_message_id": ids[chosen]}},
        }[path]
        await post(task, http, path, {"model": "m", name: USER, **more, **previous})

    async with EndpointSystem(model, agent, differently("Compute", ["Bye."])) as system:
        await made(system)
        prompt, answered = system.policy.log[chosen]
        assert system.policy.log[2][0][: len(prompt) + len(answered)] == prompt + answered
        assert system.counted() == {"rendered": 2, "bridged": 1}


async def test_a_response_continues_another_with_the_results_of_its_calls(model):
    texts = iter([WEATHER_CALL, WEATHER_CALL, "Sunny.", "Bye."])

    async def agent(task, http):
        async def respond(**body):
            return await post(task, http, "/v1/responses", {"model": "m", "tools": [FLAT_WEATHER], **body})

        found = await respond(input=task.messages, instructions="Be brief.")
        while (called := found["output"][-1])["type"] == "function_call":
            output = {"type": "function_call_output", "call_id": called["call_id"], "output": "sun"}
            found = await respond(input=[output], instructions="Be brief.", previous_response_id=found["id"])
        assert found["output"][-1]["content"][0]["text"] == "Sunny."
        with pytest.raises(Refused, match=r"400.*previous_response_id: this sample has no answer 'x'") as refused:
            await respond(input="more", previous_response_id="resp_x")
        assert refused.value.body["error"]["param"] == "previous_response_id"
        # other instructions take the place of those before, so that the history is another one
        await respond(input="more", instructions="Be long.", previous_response_id=found["id"])

    async with EndpointSystem(model, agent, lambda prompt: next(texts)) as system:
        sample = await made(system)
        first, second = sequence_texts(system, sample)
        assert (first.count("Be brief."), first.count("<tool_response>"), first.count("Sunny.")) == (1, 2, 1)
        assert (second.count("Be brief."), second.count("Be long."), second.count("Sunny.")) == (0, 1, 1)
        assert system.counted() == {
            "rendered": 1, "bridged": 2, "refused": 1, "branched": 1, "branched/new_conversation": 1,
        }  # fmt: skip


async def test_calls_that_have_ended_hold_neither_their_request_nor_the_tokens_before_them(model):
    async def agent(task, http):
        messages = [{"role": "user", "content": "x" * 500}]
        ids = None
        for _ in range(3):
            messages += [await chat(task, http, messages), {"role": "user", "content": "y"}]
            asked = {"model": "m", "prompt": ids or "Once", "return_token_ids": True}
            answer = await post(task, http, "/v1/completions", asked)
            (choice,) = answer["choices"]
            ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
        turns = system.endpoint.session(task.api_key).turns.all
        assert all(turn.prompt.tokens.own.base is None for turn in turns)
        assert sum(len(turn.prompt.tokens.own) for turn in turns) < 700
        gc.collect()
        assert sum(type(found) is web.Request for found in gc.get_objects()) <= 1  # the last may not have ended

    async with EndpointSystem(model, agent, lambda prompt: "ok") as system:
        await made(system)


async def test_a_prompt_shorter_than_the_group_s_keeps_its_limit_as_it_goes_on(model):
    """What is sampled goes on as the group's prompt does."""

    async def agent(task, http):
        ids = whole[:-4]
        for limit in (3, 500):
            asked = {"model": "m", "prompt": ids, "return_token_ids": True, "max_tokens": limit}
            (choice,) = (await post(task, http, "/v1/completions", asked))["choices"]
            ids = [*ids, *choice["token_ids"]]

    def writes(prompt):
        return "x" * 200 if prompt.endswith(tuple(rest)) else rest

    async with EndpointSystem(model, agent, writes, max_response_tokens=60) as system:
        whole = system.tokenizer.encode(PROMPT).tolist()
        rest = [system.tokenizer.hf.decode([token]) for token in whole[-4:-1]]
        sample = await made(system)
    assert len(sample.sequences[0].tokens) == 60
