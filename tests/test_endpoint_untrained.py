"""Calls that change the distribution, with rollout.agent.untrained=mask: what reaches the engine, what a forced tool
call is made of, and that nothing of it is trained."""

import asyncio
import json

import pytest

from asyncrl.processes.tasks import cancelled
from asyncrl.rollouter.endpoint.dialects import DIALECTS
from asyncrl.rollouter.engines.base import Grammar
from asyncrl.rollouter.partial import PartialSample
from asyncrl.types.samples import FinishReason
from tests.support.endpoint import (
    PROMPT,
    TEMPLATE,
    WEATHER,
    EndpointSystem,
    Policy,
    Refused,
    chat,
    made,
    make_model,
    post,
    sampled_tokens,
    sequence_texts,
    trained_tokens,
    writing,
)

CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = DIALECTS
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}}
SCHEMA_TEXT = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}}'
OF_SCHEMA, OF_OBJECT = Grammar("json_schema", SCHEMA_TEXT), Grammar("json_schema", '{"type": "object"}')
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
TIME = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
RESULT_AND_ANSWER = "<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\nSunny.<|im_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory):
    """Prompts open reasoning, and the template renders an empty one, as Qwen3.5's."""
    opened = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    rendered = opened.replace("{% if m.reasoning_content and loop", '{% if m.role == "assistant" and loop')
    rendered = rendered.replace("{{ m.reasoning_content }}", "{{ m.reasoning_content or '' }}")
    return make_model(tmp_path_factory.mktemp("thinking"), rendered)


def body(path, **more):
    prompt = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        COMPLETIONS: {"prompt": "hi"},
        RESPONSES: {"input": "hi"},
        MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500},
        GENERATE: {"token_ids": [5, 6]},
    }
    more = {"sampling_params": more} if path == GENERATE else more
    return {"model": "m", **prompt[path], **more}


def trains_only(system, sample, *numbers):
    """True if what the engine sampled for these calls is trained, and nothing else."""
    log = [system.policy.log[number] for number in numbers]
    trained = trained_tokens(sample, system.tokenizer.encode(PROMPT))
    return sorted(trained) == sorted(sampled_tokens(log))


GRAMMARS = [
    *((path, {"response_format": {"type": "json_object"}}, OF_OBJECT) for path in (CHAT, COMPLETIONS)),
    *((path, {"response_format": FORM}, OF_SCHEMA) for path in (CHAT, COMPLETIONS)),
    (RESPONSES, {"text": {"format": {"type": "json_schema", **FORM["json_schema"]}}}, OF_SCHEMA),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, OF_OBJECT),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, OF_SCHEMA),
    *((path, {"structured_outputs": {"regex": "a+", "json": None}}, Grammar("regex", "a+")) for path in DIALECTS),
    (CHAT, {"structured_outputs": {"json": SCHEMA_TEXT, "json_object": False}}, OF_SCHEMA),
    (CHAT, {"structured_outputs": {"json_object": True}}, OF_OBJECT),
    (CHAT, {"structured_outputs": {"choice": ["a", "b"]}}, Grammar("regex", "(a)|(b)")),
    (CHAT, {"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("gbnf", 'root ::= "a"')),
    (CHAT, {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, OF_SCHEMA),
    (CHAT, {"guided_json": SCHEMA_TEXT}, OF_SCHEMA),
    (GENERATE, {"json_schema": SCHEMA_TEXT}, OF_SCHEMA),
    (CHAT, {"guided_regex": "a|b"}, Grammar("regex", "a|b")),
    (COMPLETIONS, {"regex": "[ab]"}, Grammar("regex", "[ab]")),
    (CHAT, {"guided_choice": ["1.5 (a)", "\\n"]}, Grammar("regex", r"(1\.5 \(a\))|(\\n)")),
    *((CHAT, {name: "root ::= x"}, Grammar("gbnf", "root ::= x")) for name in ("guided_grammar", "grammar", "ebnf")),
]


async def test_grammars_of_all_apis_reach_the_engine(model):
    async def agent(task, http):
        await chat(task, http, task.messages)
        for path, more, _ in GRAMMARS:
            await post(task, http, path, body(path, **more))

    async with EndpointSystem(model, agent, writing(), untrained="mask") as system:
        (sample,) = await system.samples()
        _, *requests = system.policy.requests.values()
        assert [request.sampling.grammar for request in requests] == [grammar for *_, grammar in GRAMMARS]
        assert trains_only(system, sample, 0)
        untrained = sum(len(tokens) for _, tokens in system.policy.log[1:])
        assert system.counted()["untrained_tokens/other_distribution"] == untrained


async def test_a_masked_last_answer_is_scored_with_its_sequence(model):
    async def agent(task, http):
        thought = await chat(task, http, task.messages)
        await chat(task, http, [*task.messages, thought, {"role": "user", "content": "go"}], response_format=FORM)

    async with EndpointSystem(model, agent, writing("Sunny.", '{"city": "Bern"}'), untrained="mask") as system:
        (sample,) = await system.samples()
        (text,) = sequence_texts(system, sample)
        assert '{"city": "Bern"}' in text
        assert trains_only(system, sample, 0)


async def test_a_masked_last_answer_is_scored_where_an_earlier_one_follows_the_same_turns(model):
    async def agent(task, http):
        thought = await chat(task, http, task.messages)
        asked = [*task.messages, thought, {"role": "user", "content": "go"}]
        await chat(task, http, asked)
        await chat(task, http, asked, response_format=FORM)

    async with EndpointSystem(model, agent, writing("Sunny.", "Rain.", '{"city": "Bern"}'), untrained="mask") as system:
        (sample,) = await system.samples()
        first, last = sequence_texts(system, sample)
        assert "Rain." in first
        assert '{"city": "Bern"}' in last
        assert trains_only(system, sample, 0, 1)


async def test_biases_reach_the_engine_beside_others(model):
    async def agent(task, http):
        await chat(task, http, task.messages)
        for path in DIALECTS:
            more = {"logit_bias": {"12": -100, "5": 0.5}, "temperature": 0.5, "guided_regex": "a"}
            await post(task, http, path, body(path, **more))

    async with EndpointSystem(model, agent, writing(), untrained="mask") as system:
        await system.samples()
        first, *requests = (request.sampling for request in system.policy.requests.values())
        assert (first.logit_bias, first.grammar) == ((), None)
        for found in requests:
            assert found.logit_bias == ((5, 0.5), (12, -100.0))
            assert (found.temperature, found.top_p, found.grammar) == (0.5, 1.0, Grammar("regex", "a"))


NEVER = {
    "frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True,
    "bad_words": ["a"], "allowed_token_ids": [5], "stop_token_ids": [5], "structural_tag": "{}",
    "guided_whitespace_pattern": " ",
}  # fmt: skip


async def test_a_call_may_name_the_stop_tokens_of_the_run(model):
    async def agent(task, http):
        for path in DIALECTS:
            await post(task, http, path, body(path, stop_token_ids=[2]))
            with pytest.raises(Refused, match="stop_token_ids: expected none"):
                await post(task, http, path, body(path, stop_token_ids=[2, 5]))

    async with EndpointSystem(model, agent, writing(), stop_token_ids=[2]) as system:
        await made(system)  # all that was sampled is trained


@pytest.mark.parametrize("untrained", ["refuse", "mask"])
async def test_what_is_never_served_is_refused_by_name(model, untrained):
    async def agent(task, http):
        await chat(task, http, task.messages)
        for path in DIALECTS:
            for name, value in NEVER.items():
                with pytest.raises(Refused, match=f"{name}: expected .*; it is never served"):
                    await post(task, http, path, body(path, **{name: value}, temperature=0, regex="a"))

    async with EndpointSystem(model, agent, writing(), untrained=untrained) as system:
        await system.samples()
        assert len(system.policy.log) == 1


async def test_what_mask_would_serve_is_refused_with_that_hint(model):
    async def agent(task, http):
        await chat(task, http, task.messages)
        for path, more, _ in GRAMMARS:
            with pytest.raises(Refused, match="untrained=mask serves it"):
                await post(task, http, path, body(path, **more))

    async with EndpointSystem(model, agent, writing()) as system:
        await system.samples()
        assert len(system.policy.log) == 1


async def test_what_the_engine_does_not_serve_is_refused(model):
    async def agent(task, http):
        await chat(task, http, task.messages, temperature=0, tools=[WEATHER], tool_choice="required")
        for asked in ({"logit_bias": {"5": 1}}, {"regex": "a"}, {"min_p": 0.1}):
            with pytest.raises(Refused, match=f"{next(iter(asked))}: expected .*; the engine does not serve it"):
                await chat(task, http, task.messages, **asked)

    served = {"served": frozenset({"temperature"})}
    async with EndpointSystem(model, agent, writing(), untrained="mask", **served) as system:
        await system.samples()
        assert len(system.policy.log) == 1


MALFORMED = [
    ({"logit_bias": {"x": 1}}, "logit_bias: expected token ids"),
    ({"logit_bias": {"05": 1}}, "logit_bias: expected token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias: expected token ids"),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias: expected token ids"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias: expected token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5: expected a number between -100 and 100"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5: expected a number"),
    ({"logit_bias": {"5": True}}, "logit_bias.5: expected a number"),
    ({"logit_bias": {"5": None}}, "logit_bias.5: expected a number"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias.5: expected a number"),
    ({"guided_json": "{"}, "guided_json: expected a JSON schema"),
    ({"guided_json": [1]}, "guided_json: expected an object"),
    ({"guided_json": {"const": float("inf")}}, "guided_json: expected a JSON schema"),
    ({"guided_json": {"const": "\ud800"}}, "expected texts of valid Unicode"),
    ({"guided_regex": ""}, "guided_regex: expected a text"),
    ({"guided_choice": []}, "guided_choice: expected a list"),
    ({"guided_choice": ["a", 1]}, "guided_choice: expected a list"),
    ({"structured_outputs": {"json": None}}, "structured_outputs: expected one of"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs: expected one of"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex: expected a string"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "whitespace_pattern: it is never served"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type: expected text, json_object or"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: expected an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "json_schema.schema: expected an object"),
    ({"response_format": FORM, "regex": "a"}, "expected one form of the answer"),
    ({"regex": "a", "tool_choice": "required", "tools": [WEATHER]}, "expected one form of the answer"),
    ({"tool_choice": "required"}, "tool_choice: expected tools to choose from"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "clock"}}, "tools": [WEATHER]},
        "tool_choice: expected one of weather, found 'clock'",
    ),
]


async def test_malformed_requests_are_refused_by_the_name_of_the_field(model):
    async def agent(task, http):
        await chat(task, http, task.messages)
        for more, message in MALFORMED:
            with pytest.raises(Refused) as refused:
                await post(task, http, CHAT, body(CHAT, **more))
            assert refused.value.status == 400, more
            assert message in refused.value.body["error"]["message"], more

    async with EndpointSystem(model, agent, writing(), untrained="mask") as system:
        await system.samples()
        assert system.counted()["refused"] == len(MALFORMED)


class Refuses(Policy):
    """Cannot compile one grammar, as an engine reports it."""

    async def _answer(self, request):
        if request.sampling.grammar == Grammar("regex", "(?=a)b"):
            self.emit(request.id, [], FinishReason.ERROR, error="the grammar (regex) is refused: no lookahead")
        else:
            await super()._answer(request)


async def test_a_grammar_that_the_engine_cannot_serve_costs_its_call_and_no_more(model):
    async def agent(task, http):
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                await post(task, http, CHAT, body(CHAT, guided_regex="(?=a)b"))
            assert refused.value.status == 400
            assert "refused: no lookahead" in refused.value.body["error"]["message"]
        await chat(task, http, task.messages)

    system = EndpointSystem(model, agent, writing(), untrained="mask")
    system.policy = Refuses(system.tokenizer, writing())
    async with system:
        (sample,) = await system.samples()
        assert len(system.policy.requests) == 2  # it is asked for the grammar once
        assert trains_only(system, sample, 0)


async def test_temperatures_next_to_zero_are_greedy(model):
    async def agent(task, http):
        await chat(task, http, task.messages)
        await post(task, http, CHAT, body(CHAT, temperature=1e-46))

    async with EndpointSystem(model, agent, writing(), untrained="mask") as system:
        await system.samples()
        assert [request.sampling.temperature for request in system.policy.requests.values()] == [1.0, 0.0]


async def test_reasoning_is_closed_before_what_must_have_a_form(thinking_model):
    """Answers with a grammar or a forced call have none, and trained ones go on from there."""

    async def agent(task, http):
        messages, tools = list(task.messages), [WEATHER]
        answer = await chat(task, http, messages, tools=tools, response_format={"type": "json_object"})
        assert (answer["content"], answer.get("reasoning_content")) == ('{"a": 1}', "")
        messages += [answer, {"role": "user", "content": "go"}]
        answer = await chat(task, http, messages, tools=tools, tool_choice="required")
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "sun"}
        answer = await chat(task, http, [*messages, answer, result], tools=tools)
        assert (answer["content"], answer["reasoning_content"]) == ("Sunny.", "hm")

    texts = writing('{"a": 1}', '{"city": "Bern"}}\n</tool_call>', "hm\n</think>\n\nSunny.")
    async with EndpointSystem(thinking_model, agent, texts, untrained="mask") as system:
        (sample,) = await system.samples()
        first, forced, _ = (system.tokenizer.hf.decode(tokens) for tokens, _ in system.policy.log)
        assert first.endswith("<think>\n\n</think>\n\n")
        assert forced.endswith('<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments":')
        assert trains_only(system, sample, 2)
        counted = system.counted()
        assert (counted["rendered"], counted["bridged"], counted["branched/history_rewritten"]) == (1, 1, 1)


# -- forced tools ------------------------------------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "weather"}}
CHOICES = {
    "the only tool": ([WEATHER], "required", ' {"city": "Bern"}}\n</tool_call>', "tool_calls"),
    "one of two": ([WEATHER, TIME], "required", 'weather", "arguments": {"city": "Bern"}}\n</tool_call>', "tool_calls"),
    "a named one": ([TIME, WEATHER], NAMED, ' {"city": "Bern"}}\n</tool_call>', "stop"),
}


@pytest.mark.parametrize(("tools", "choice", "rest", "finish"), CHOICES.values(), ids=CHOICES)
async def test_a_forced_call_is_begun_for_the_policy_and_a_trained_turn_goes_on(model, tools, choice, rest, finish):
    async def agent(task, http):
        asked = {"model": "m", "messages": task.messages, "tools": tools, "return_token_ids": True}
        found = await post(task, http, CHAT, asked | {"tool_choice": choice})
        answer = found["choices"][0]
        assert answer["finish_reason"] == finish
        assert found["usage"]["prompt_tokens"] == len(found["prompt_token_ids"]) == len(system.policy.log[0][0])
        assert found["usage"]["completion_tokens"] == len(answer["token_ids"]) == len(system.policy.log[0][1])
        (call,) = answer["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sun"}
        messages = [*task.messages, answer["message"], result]
        assert (await chat(task, http, messages, tools=tools))["content"] == "Sunny."

    async with EndpointSystem(model, agent, writing(rest, "Sunny."), untrained="mask") as system:
        (sample,) = await system.samples()
        (first, sampled), (second, _) = system.policy.log
        assert system.tokenizer.hf.decode(first).endswith("<|im_start|>assistant\n" + CALL.removesuffix(rest))
        assert second[: len(first) + len(sampled)] == first + sampled
        assert trains_only(system, sample, 1)
        (text,) = sequence_texts(system, sample)
        assert text.endswith(f"{CALL}<|im_end|>\n<|im_start|>user\n{RESULT_AND_ANSWER}")
        counted = {"rendered": 1, "bridged": 1, "untrained_tokens/other_distribution": len(sampled)}
        assert system.counted() == counted


NAMED_TOOL = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}
INPUT_TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
OF_APIS = [
    (RESPONSES, NAMED_TOOL, "required"),
    (RESPONSES, NAMED_TOOL, {"type": "function", "name": "weather"}),
    (MESSAGES, INPUT_TOOL, {"type": "any"}),
    (MESSAGES, INPUT_TOOL, {"type": "tool", "name": "weather"}),
]


@pytest.mark.parametrize(("path", "tool", "choice"), OF_APIS)
async def test_tools_are_forced_in_other_apis(model, path, tool, choice):
    async def agent(task, http):
        found = await post(task, http, path, body(path, tools=[tool], tool_choice=choice))
        if path == RESPONSES:
            (item,) = found["output"]
            assert (found["status"], item["type"], item["arguments"]) == (
                "completed",
                "function_call",
                '{"city": "Bern"}',
            )
        else:
            (block,) = found["content"]
            assert (found["stop_reason"], block["type"], block["input"]) == ("tool_use", "tool_use", {"city": "Bern"})
        await post(task, http, path, body(path))

    async with EndpointSystem(model, agent, writing('{"city": "Bern"}}\n</tool_call>'), untrained="mask") as system:
        (sample,) = await system.samples()
        assert trains_only(system, sample, 1)


async def test_a_forced_call_that_the_policy_does_not_complete_is_content(model):
    async def agent(task, http):
        answer = await chat(task, http, task.messages, tools=[WEATHER], tool_choice="required", stop=["tool_call"])
        assert "tool_calls" not in answer
        assert answer["content"] == '<tool_call>\n{"name": "weather", "arguments":none'
        messages = [*task.messages, answer, {"role": "user", "content": "again"}]
        await chat(task, http, messages, tools=[WEATHER])

    async with EndpointSystem(model, agent, writing("none"), untrained="mask") as system:
        (sample,) = await system.samples()
        assert trains_only(system, sample, 1)
        assert len(sample.sequences) == 1


async def test_equal_forced_calls_are_different_samples_and_retries_are_not(model):
    async def agent(task, http):
        asked = body(CHAT, tools=[WEATHER], tool_choice="required")
        first, second = [await post(task, http, CHAT, asked, {"Idempotency-Key": key}) for key in "ab"]
        again = await post(task, http, CHAT, asked, {"Idempotency-Key": "a"})
        assert again == first
        assert first["id"] != second["id"]
        await chat(task, http, task.messages)

    async with EndpointSystem(model, agent, writing(), untrained="mask") as system:
        (sample,) = await system.samples()
        assert trains_only(system, sample, 2)
        counted = system.counted()
        assert (counted["rendered"], counted["repeated_calls"], counted["branched/new_conversation"]) == (2, 1, 1)


async def test_another_rollouter_continues_forced_and_constrained_calls(model):
    asked, attached = asyncio.Event(), asyncio.Event()

    async def agent(task, http):
        tools, messages = [WEATHER], list(task.messages)
        answer = await chat(task, http, messages, tools=tools, tool_choice="required")
        messages += [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "sun"}]
        system.policy.held.clear()
        under_way = [
            asyncio.create_task(chat(task, http, messages, tools=tools, **more))
            for more in ({"guided_json": SCHEMA, "logit_bias": {"7": 1}}, {"tool_choice": NAMED}, {})
        ]
        asked.set()
        await attached.wait()
        *_, answer = await asyncio.gather(*under_way)
        await chat(task, http, [*messages, answer, {"role": "user", "content": "thanks"}], tools=tools)

    texts = writing('{"city": "Bern"}}\n</tool_call>')
    async with EndpointSystem(model, agent, texts, untrained="mask") as system:
        first = asyncio.create_task(system.samples())
        await asked.wait()
        await system.policy.has_requests(4)
        await cancelled(system._tasks)
        await cancelled([first])
        system.policy.answered_to_the_dead()
        for task in list(system.policy._tasks):
            task.cancel()
        system.policy.requests.clear()
        system.partials = [PartialSample()]
        await system.attach()
        second = asyncio.create_task(system.samples())
        await system.policy.has_requests(3)
        requests = list(system.policy.requests.values())
        system.policy.held.set()
        attached.set()
        (sample,) = await second
        assert [r.sampling.grammar for r in requests] == [OF_SCHEMA, None, None]
        assert requests[1].tokens.tolist() == [
            *requests[2].tokens.tolist(),
            *system.renderer.encode('<tool_call>\n{"name": "weather", "arguments":'),
        ]
        assert trains_only(system, sample, 3, 4)
