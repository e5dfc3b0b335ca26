"""The dialects of the endpoint: every API's JSON becomes the same calls, and answers read back as they were sampled."""

import copy
import json

import numpy as np
import pytest

from asyncrl.rollouter.endpoint.calls import Answer, BadRequest, Call, ToolCall
from asyncrl.rollouter.endpoint.dialects import DIALECTS, chat, completions, generate, messages, responses
from asyncrl.rollouter.endpoint.token_path import TokenPath

HI = [{"role": "user", "content": "hi"}]
#: The smallest request of each API.
CHAT = {"model": "m", "messages": HI}
COMPLETION = {"model": "m", "prompt": "hi"}
RESPONSE = {"model": "m", "input": "hi"}
MESSAGE = {"model": "m", "messages": HI, "max_tokens": 9}
GENERATE = {"model": "m", "token_ids": [1, 2], "sampling_params": {}}
SMALLEST = [(chat, CHAT), (completions, COMPLETION), (responses, RESPONSE), (messages, MESSAGE), (generate, GENERATE)]
STREAMED = SMALLEST[:4]

CALLS = (ToolCall("c1", "add", '{"a":  1, "s": "' + "x" * 200 + '"}'), ToolCall("c2", "now", "{}"))
LONG = "Grüße 世界\u2028 and 😀. " * 20


def made(**changed) -> Answer:
    given = {
        "id": "5f0c",
        "model": "policy",
        "created_s": 1700000000,
        "text": LONG,
        "content": LONG,
        "reasoning": None,
        "tool_calls": (),
        "finish": "stop",
        "stop_string": None,
        "prompt": TokenPath(np.arange(7)),
        "tokens": np.array([3, 4, 2], np.int32),
        "logprobs": np.array([-0.5, -1e-3, -2.25], np.float32),
        "token_texts": ("ab", "é", ""),
    }
    return Answer(**{**given, **changed})


ANSWERS = {
    "text": made(),
    "nothing": made(text="", content=""),
    "reasoning": made(reasoning="because " * 30),
    "cut in reasoning": made(text="", content=None, reasoning="hm " * 40, finish="length"),
    "calls": made(content=None, tool_calls=CALLS, finish="tool_calls"),
    "all": made(content="I call", reasoning="so", tool_calls=CALLS, finish="tool_calls"),
    "stop string": made(stop_string="END"),
}


def sent(raw) -> list[dict]:
    """The data of a stream's events, without the terminator."""
    blocks = b"".join(raw).decode("ascii").removesuffix("data: [DONE]\n\n").split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.split("data: ", 1)[1]) for block in blocks]


def refused(dialect, body) -> str:
    with pytest.raises(BadRequest) as caught:
        dialect.call(body)
    return str(caught.value)


# calls


@pytest.mark.parametrize(("dialect", "body"), SMALLEST)
def test_the_smallest_request_asks_for_nothing_else(dialect, body):
    prompts = (
        {"text": "hi"} if dialect is completions else {"tokens": [1, 2]} if dialect is generate else {"messages": HI}
    )
    call = dialect.call(body)
    usage = {"include_usage": False} if dialect in (chat, completions) else {}
    limit, ids = 9 if dialect is messages else None, dialect is generate
    assert call == Call("m", **prompts, max_tokens=limit, wants_token_ids=ids, options=usage)


def test_every_path_has_its_dialect():
    paths = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"
    assert dict(zip(paths, (dialect for dialect, _ in SMALLEST), strict=True)) == DIALECTS


@pytest.mark.parametrize(("dialect", "body"), SMALLEST)
def test_what_changes_the_distribution_is_kept_also_if_neutral_and_left_out_if_null(dialect, body):
    asked = {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "min_tokens": 0}
    asked |= {"logit_bias": {"5": -100}, "stop_token_ids": [2], "ignore_eos": False, "guided_json": {"type": "object"}}
    given = {**asked, "presence_penalty": None, "seed": 3, "user": "u", "metadata": {"a": "b"}}
    given = {"sampling_params": given} if dialect is generate else given
    assert dialect.call({**body, **given}).sampling == asked


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}


@pytest.mark.parametrize(
    ("dialect", "body", "expected"),
    [
        (chat, CHAT | {"response_format": FORM}, FORM),
        (chat, CHAT | {"response_format": {"type": "text"}}, None),
        (completions, COMPLETION | {"response_format": {"type": "json_object"}}, {"type": "json_object"}),
        (responses, RESPONSE | {"text": {"format": {"type": "json_schema", **FORM["json_schema"]}}}, FORM),
        (responses, RESPONSE | {"text": {"format": {"type": "text"}, "verbosity": "low"}}, None),
        (
            messages,
            MESSAGE | {"output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "low"}},
            {"type": "json_schema", "json_schema": {"schema": {}}},
        ),
    ],
)
def test_a_response_format_is_sampling_by_its_name_in_chat_completions(dialect, body, expected):
    assert dialect.call(body).sampling == ({} if expected is None else {"response_format": expected})


NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("dialect", "body", "choice", "expected"),
    [
        (dialect, body, choice, expected)
        for dialect, body, choices in [
            (chat, CHAT, {"auto": "auto", "none": "none", "required": "required", "named": NAMED}),
            (
                responses,
                RESPONSE,
                {"auto": "auto", "none": "none", "required": "required", "named": {"type": "function", "name": "add"}},
            ),
            (
                messages,
                MESSAGE,
                {
                    "auto": {"type": "auto", "disable_parallel_tool_use": True},
                    "none": {"type": "none"},
                    "required": {"type": "any"},
                    "named": {"type": "tool", "name": "add"},
                },
            ),
        ]
        for expected, choice in choices.items()
    ],
)
def test_a_forced_choice_of_tools_is_sampling(dialect, body, choice, expected):
    call = dialect.call({**body, "tool_choice": choice})
    forced = {"required": {"tool_choice": "required"}, "named": {"tool_choice": NAMED}}
    assert call.tools_allowed == (expected != "none")
    assert call.sampling == forced.get(expected, {})


def test_tools_have_one_form_without_what_has_no_effect():
    schema = {"type": "object", "properties": {}}
    flat = {"type": "function", "name": "add", "description": "Adds.", "strict": True, "parameters": schema}
    nested = {"type": "function", "function": {key: value for key, value in flat.items() if key != "type"}}
    block = {"name": "add", "description": "Adds.", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    expected = {"name": "add", "description": "Adds.", "parameters": schema}
    for dialect, body, tool in ((chat, CHAT, nested), (responses, RESPONSE, flat), (messages, MESSAGE, block)):
        (found,) = dialect.call({**body, "tools": [tool]}).tools
        assert found == {"type": "function", "function": expected}
        assert list(found["function"]) == list(expected), "templates write tools in this order"
    (bare,) = chat.call({**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": None}}]}).tools
    assert bare == {"type": "function", "function": {"name": "f"}}


def test_limits_stops_and_template_variables():
    call = chat.call({**CHAT, "max_tokens": 9, "max_completion_tokens": 5, "stop": "a", "top_logprobs": 0, "n": 1})
    assert (call.max_tokens, call.stop) == (5, ("a",))
    assert completions.call({**COMPLETION, "max_tokens": 3, "stop": ["a", "b"]}).stop == ("a", "b")
    assert messages.call({**MESSAGE, "stop_sequences": ["a"]}).stop == ("a",)
    assert responses.call({**RESPONSE, "max_output_tokens": 4}).max_tokens == 4
    assert generate.call({**GENERATE, "sampling_params": {"max_tokens": 4, "stop": ["x"]}}).max_tokens == 4
    for dialect, body in ((chat, CHAT), (responses, RESPONSE), (messages, MESSAGE)):
        call = dialect.call({**body, "chat_template_kwargs": {"enable_thinking": False}, "stream": True})
        assert call.template_args == {"enable_thinking": False}
        assert call.stream


def test_what_is_asked_of_the_answer():
    call = chat.call({**CHAT, "logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}})
    assert (call.wants_logprobs, call.wants_token_ids, call.options) == (True, True, {"include_usage": True})
    assert [completions.call({**COMPLETION, "logprobs": n}).wants_logprobs for n in (None, 0, 1)] == [False, True, True]
    assert [generate.call({**GENERATE, "sampling_params": {"logprobs": n}}).wants_logprobs for n in (None, 1)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("prompt", "text", "tokens"),
    [("hi", "hi", None), (["hi"], "hi", None), ([1, 2], None, [1, 2]), ([[1, 2]], None, [1, 2])],
)
def test_a_prompt_of_completions_is_a_text_or_ids(prompt, text, tokens):
    call = completions.call({"model": "m", "prompt": prompt})
    assert (call.text, call.tokens) == (text, tokens)


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {
        "role": "assistant",
        "content": "I call",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "ü": "x"}'}},
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "content": "1", "tool_call_id": "c1"},
    {"role": "tool", "content": "noon", "tool_call_id": "c2"},
    {"role": "user", "content": "more"},
]


def test_all_apis_write_one_conversation_as_the_same_messages():
    turn, parts = CONVERSATION[2], [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    in_chat = [
        {"role": "developer", "content": "be brief", "name": "ops"},
        {"role": "user", "content": parts, "name": None},
        {**turn, "reasoning_content": None, "reasoning": "hm", "refusal": None, "annotations": [], "audio": None},
        *CONVERSATION[3:],
    ]
    called = [
        {"type": "function_call", "id": "fc", "call_id": c["id"], "status": "completed", **c["function"]}
        for c in turn["tool_calls"]
    ]
    in_responses = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{**part, "type": "input_text"} for part in parts]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I call", "logprobs": []}],
        },
        *called,
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "user", "content": "more"},
    ]
    in_messages = [
        {"role": "user", "content": parts},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I call", "citations": None},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "ü": "x"}},
                {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "more"},
                {"type": "tool_result", "tool_use_id": "c1", "content": "1"},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "noon"}]},
            ],
        },
    ]
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    assert chat.call({**CHAT, "messages": in_chat}).messages == CONVERSATION
    assert responses.call({**RESPONSE, "input": in_responses}).messages == CONVERSATION
    assert messages.call({**MESSAGE, "system": system, "messages": in_messages}).messages == CONVERSATION


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"content": None}, {"content": ""}),
        ({"content": []}, {"content": ""}),
        ({"content": "", "tool_calls": []}, {"content": ""}),
        ({"content": "", "tool_calls": CONVERSATION[2]["tool_calls"]}, {"content": None}),
        ({"tool_calls": CONVERSATION[2]["tool_calls"]}, {"content": None}),
        ({"reasoning": "hm"}, {"content": "", "reasoning_content": "hm"}),
    ],
)
def test_an_assistants_content_is_null_only_beside_calls(given, expected):
    (found,) = chat.call({**CHAT, "messages": [{"role": "assistant", **given}]}).messages
    calls = {"tool_calls": given["tool_calls"]} if given.get("tool_calls") else {}
    assert found == {"role": "assistant", **expected, **calls}


def test_a_tools_message_keeps_its_name_and_others_lose_theirs():
    tool = {"role": "tool", "tool_call_id": "c", "content": "1", "name": "add"}
    call = chat.call({**CHAT, "messages": [{**HI[0], "name": "Ann"}, tool]})
    assert call.messages == [*HI, tool]


def test_a_call_leaves_the_body_as_it_was():
    for dialect, body in [(chat, {**CHAT, "messages": CONVERSATION}), *SMALLEST]:
        before = copy.deepcopy(body)
        dialect.call(body)
        assert body == before


def test_a_response_continues_another_with_instructions_of_its_own():
    call = responses.call({**RESPONSE, "previous_response_id": "resp_5f0c", "instructions": "be brief"})
    assert (call.previous, call.instructions, call.messages) == ("5f0c", "be brief", HI)


def test_a_thread_of_messages_continues_an_answer_with_its_tools():
    begun = messages.call({**MESSAGE, "thread": {"type": "create"}})
    assert (begun.previous, begun.keeps_tools) == (None, False)
    body = {**MESSAGE, "thread": {"type": "continue", "previous_message_id": "msg_5f0c"}}
    call = messages.call(body)
    assert (call.previous, call.keeps_tools, call.messages) == ("5f0c", True, HI)
    assert "system: expected none" in refused(messages, {**body, "system": "be brief"})
    assert "tools: expected none" in refused(messages, {**body, "tools": [{"name": "add", "input_schema": {}}]})
    assert "thread.type: expected create or continue" in refused(messages, {**MESSAGE, "thread": {"type": "x"}})
    for bad in ({"type": "continue"}, {"type": "continue", "previous_message_id": "5f0c"}):
        assert "thread.previous_message_id: expected" in refused(messages, {**MESSAGE, "thread": bad})


def test_items_of_one_turn_are_one_message_and_those_of_two_are_two():
    def reasoning(text):
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    said = {"type": "message", "role": "assistant", "content": "a"}
    items = [reasoning("x"), said, said, reasoning("y"), reasoning("z")]
    assert responses.call({**RESPONSE, "input": items}).messages == [
        {"role": "assistant", "content": "a", "reasoning_content": "x"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "y"},
        {"role": "assistant", "content": "", "reasoning_content": "z"},
    ]


def test_a_user_message_of_results_alone_is_those_results():
    content = [{"type": "tool_result", "tool_use_id": "c"}]
    call = messages.call({**MESSAGE, "messages": [{"role": "user", "content": content}]})
    assert call.messages == [{"role": "tool", "content": "", "tool_call_id": "c"}]


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (chat, CHAT | {"modalities": ["text"], "reasoning_effort": "low", "parallel_tool_calls": False, "store": True}),
        (chat, CHAT | {"verbosity": "low", "service_tier": "auto", "functions": None, "web_search_options": None}),
        *((chat, CHAT | {"skip_special_tokens": skip}) for skip in (False, True)),
        (completions, COMPLETION | {"echo": False, "best_of": 1, "suffix": None, "seed": 1}),
        (responses, RESPONSE | {"include": ["reasoning.encrypted_content"], "store": False, "truncation": "disabled"}),
        (responses, RESPONSE | {"reasoning": {"effort": "low"}, "background": False, "conversation": None}),
        *((messages, MESSAGE | {"thinking": {"type": kind}}) for kind in ("disabled", "enabled", "adaptive")),
        (messages, MESSAGE | {"metadata": {"user_id": "u"}, "service_tier": "auto"}),
        (generate, GENERATE | {"sampling_params": {"skip_special_tokens": False, "seed": 1, "n": 1}, "stream": False}),
    ],
)
def test_what_has_no_effect_on_the_sampled_tokens_is_accepted(dialect, body):
    assert dialect.call(body).sampling == {}


def said(**message):
    return CHAT | {"messages": [message]}


def called(**changed):
    return said(role="assistant", tool_calls=[{**CONVERSATION[2]["tool_calls"][0], **changed}])


def block(role="user", **fields):
    return MESSAGE | {"messages": [{"role": role, "content": [fields]}, *HI]}


@pytest.mark.parametrize(
    ("dialect", "body", "message"),
    [
        (chat, {"messages": HI}, "model: expected a string, found None"),
        (chat, CHAT | {"n": 2}, "n: expected 1,"),
        (chat, CHAT | {"top_logprobs": 5}, "top_logprobs: expected 0,"),
        (chat, CHAT | {"temprature": 1}, "temprature: expected no such field"),
        (chat, CHAT | {"functions": [{}]}, "functions: expected no such field"),
        (chat, CHAT | {"temperature": "1"}, "temperature: expected a number, found '1'"),
        (chat, CHAT | {"temperature": True}, "temperature: expected a number, found True"),
        (chat, CHAT | {"temperature": 2.5}, "temperature: expected a number between 0 and 2, found 2.5"),
        (chat, CHAT | {"temperature": float("nan")}, "temperature: expected a number between 0"),
        (chat, CHAT | {"top_p": 1.5}, "top_p: expected a number between 1e-06 and 1, found 1.5"),
        (chat, CHAT | {"top_k": 1.5}, "top_k: expected an integer"),
        (chat, CHAT | {"top_p": 0}, "top_p: expected a number between 1e-06 and 1, found 0"),
        (chat, CHAT | {"max_tokens": 0}, "max_tokens: expected an integer between 1 and 2147483647, found 0"),
        (chat, CHAT | {"stop": [1]}, "stop: expected a string or a list of strings"),
        (chat, CHAT | {"stop": ""}, "stop: expected"),
        (chat, CHAT | {"stream": 1}, "stream: expected true or false, found 1"),
        (chat, CHAT | {"logit_bias": []}, "logit_bias: expected an object"),
        (chat, CHAT | {"messages": []}, "messages: expected at least one message"),
        (chat, CHAT | {"messages": "hi"}, "messages: expected a list, found 'hi'"),
        (chat, CHAT | {"messages": ["hi"]}, "messages[0]: expected an object"),
        (chat, said(content="hi"), "messages[0].role: expected a string, found None"),
        (chat, said(role="function", name="f", content="1"), "messages[0].role: expected system,"),
        (chat, said(role="user"), "messages[0].content: expected a string or a list of text parts, found None"),
        (chat, said(role="user", content=[{"type": "image_url"}]), "messages[0].content[0].type: expected a part of"),
        (chat, said(role="user", content=[{"type": "text"}]), "messages[0].content[0].text: expected a string"),
        (chat, said(role="user", content="", tool_calls=[{}]), "messages[0].tool_calls: expected no such field"),
        (chat, said(role="assistant"), "messages[0]: expected content or tool_calls"),
        (chat, said(role="assistant", function_call={"name": "f"}), "messages[0].function_call: expected no such"),
        (chat, said(role="tool", content="1"), "messages[0].tool_call_id: expected a string, found None"),
        (chat, called(id=None), "messages[0].tool_calls[0].id: expected a string"),
        (chat, called(type="custom"), "messages[0].tool_calls[0].type: expected 'function'"),
        (
            chat,
            called(function={"name": "f", "arguments": {}}),
            "messages[0].tool_calls[0].function.arguments: expected",
        ),
        (
            chat,
            called(function={"name": "", "arguments": ""}),
            "messages[0].tool_calls[0].function.name: expected a name",
        ),
        (chat, CHAT | {"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type: expected 'function'"),
        (chat, CHAT | {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: expected a string"),
        (
            chat,
            CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters: expected an object, found []",
        ),
        (chat, CHAT | {"tool_choice": "any"}, "tool_choice: expected 'auto'"),
        (chat, CHAT | {"tool_choice": {"type": "allowed_tools"}}, "tool_choice: expected 'auto'"),
        (chat, [], "body: expected an object"),
        (completions, COMPLETION | {"prompt": ["a", "b"]}, "prompt: expected one prompt"),
        (completions, COMPLETION | {"prompt": [[1], [2]]}, "prompt: expected one prompt"),
        (completions, COMPLETION | {"prompt": []}, "prompt: expected a string or a list of at least one token id"),
        (completions, COMPLETION | {"prompt": [1, -1]}, "prompt: expected a string or a list"),
        (completions, {"model": "m"}, "prompt: expected a string or a list"),
        (completions, COMPLETION | {"echo": True}, "echo: expected False"),
        (completions, COMPLETION | {"best_of": 2}, "best_of: expected 1"),
        (completions, COMPLETION | {"suffix": "x"}, "suffix: expected ''"),
        (completions, COMPLETION | {"logprobs": 2}, "logprobs: expected an integer between 0 and 1"),
        (responses, RESPONSE | {"input": []}, "input: expected a string or a list of at least one item"),
        (responses, RESPONSE | {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: expected message"),
        (responses, RESPONSE | {"input": [{"role": "tool", "content": ""}]}, "input[0].role: expected system"),
        (
            responses,
            RESPONSE | {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type: expected a part of type input_text",
        ),
        (responses, RESPONSE | {"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id: expected"),
        (responses, RESPONSE | {"input": [{"type": "function_call_output"}]}, "input[0].call_id: expected a string"),
        (responses, RESPONSE | {"tools": [{"type": "web_search"}]}, "tools[0].type: expected 'function'"),
        (responses, RESPONSE | {"truncation": "auto"}, "truncation: expected 'disabled'"),
        (responses, RESPONSE | {"conversation": "conv_1"}, "conversation: expected no such field"),
        (responses, RESPONSE | {"previous_response_id": "5f0c"}, "previous_response_id: expected the id of a response"),
        (responses, RESPONSE | {"include": ["message.output_text.logprobs"]}, "include: expected no logprobs"),
        (messages, {"model": "m", "messages": HI}, "max_tokens: expected an integer"),
        (
            messages,
            MESSAGE | {"messages": [{"role": "assistant", "content": "So"}]},
            "messages: expected a last message",
        ),
        (messages, MESSAGE | {"messages": []}, "messages: expected a last message"),
        (messages, MESSAGE | {"messages": [{"role": "tool", "content": ""}]}, "messages[0].role: expected user"),
        (messages, MESSAGE | {"messages": [{"role": "user"}]}, "messages[0].content: expected a string or a list"),
        (messages, MESSAGE | {"system": [{"type": "image"}]}, "system[0].type: expected a part of type text"),
        (messages, MESSAGE | {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: expected a tool"),
        (messages, MESSAGE | {"tool_choice": {"type": []}}, "tool_choice.type: expected a string"),
        (messages, MESSAGE | {"tool_choice": {"type": "tool"}}, "tool_choice.name: expected a string"),
        (messages, MESSAGE | {"thinking": {"type": "deep"}}, "thinking.type: expected disabled"),
        (messages, MESSAGE | {"context_management": {"edits": [1]}}, "context_management: expected no such field"),
        (messages, block(type="image"), "messages[0].content[0].type: expected a part of type text"),
        (
            messages,
            block(type="tool_use", id="c", name="f", input={}),
            "messages[0].content[0].type: expected a part of",
        ),
        (messages, block(type="tool_result", content="1"), "messages[0].content[0].tool_use_id: expected a string"),
        (
            messages,
            block("assistant", type="redacted_thinking"),
            "messages[0].content[0].type: expected text, thinking",
        ),
        (
            messages,
            block("assistant", type="tool_use", id="c", name="f", input="{}"),
            "messages[0].content[0].input: expec",
        ),
        (generate, GENERATE | {"stream": True}, "stream: expected false"),
        (generate, GENERATE | {"token_ids": []}, "token_ids: expected a list of at least one token id"),
        (generate, GENERATE | {"token_ids": [1.0]}, "token_ids: expected a list"),
        (generate, GENERATE | {"features": {"a": 1}}, "features: expected no such field"),
        (generate, GENERATE | {"sampling_params": {"topp": 1}}, "sampling_params.topp: expected no such field"),
        (
            generate,
            GENERATE | {"sampling_params": {"logprobs": 5}},
            "sampling_params.logprobs: expected an integer bet",
        ),
        (generate, GENERATE | {"sampling_params": {"top_p": 2}}, "sampling_params.top_p: expected a number between"),
    ],
)
def test_a_bad_request_names_the_field_and_what_was_expected(dialect, body, message):
    assert refused(dialect, body).startswith(message)


def test_a_bad_request_has_the_path_of_its_field():
    with pytest.raises(BadRequest) as caught:
        chat.call(said(role="user"))
    assert caught.value.param == "messages[0].content"


# answers


@pytest.mark.parametrize(
    ("answer", "chat_finish", "bare", "anthropic", "status"),
    [
        (made(), "stop", "stop", "end_turn", "completed"),
        (made(stop_string="END"), "stop", "stop", "stop_sequence", "completed"),
        (made(finish="length"), "length", "length", "max_tokens", "incomplete"),
        (made(tool_calls=CALLS, finish="tool_calls"), "tool_calls", "stop", "tool_use", "completed"),
    ],
)
def test_each_api_has_its_own_words_for_how_an_answer_ended(answer, chat_finish, bare, anthropic, status):
    assert chat.answer(chat.call(CHAT), answer)["choices"][0]["finish_reason"] == chat_finish
    assert completions.answer(completions.call(COMPLETION), answer)["choices"][0]["finish_reason"] == bare
    assert generate.answer(generate.call(GENERATE), answer)["choices"][0]["finish_reason"] == bare
    message = messages.answer(messages.call(MESSAGE), answer)
    assert (message["stop_reason"], message["stop_sequence"]) == (anthropic, answer.stop_string)
    response = responses.answer(responses.call(RESPONSE), answer)
    assert (response["status"], response["output"][-1]["status"]) == (status, status)
    assert (response["incomplete_details"] is None) == (status == "completed")


def test_a_chat_answer_in_full():
    call = chat.call({**CHAT, "logprobs": True, "return_token_ids": True})
    answer = chat.answer(call, made(content=None, reasoning="so", tool_calls=CALLS[1:], finish="tool_calls"))
    logprobs = answer["choices"][0].pop("logprobs")["content"]
    assert answer == {
        "id": "chatcmpl-5f0c",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "reasoning_content": "so",
                    "tool_calls": [{"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
                },
                "finish_reason": "tool_calls",
                "token_ids": [3, 4, 2],
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
        "prompt_token_ids": [0, 1, 2, 3, 4, 5, 6],
    }
    assert logprobs[1] == {"token": "é", "logprob": float(np.float32(-1e-3)), "bytes": [195, 169], "top_logprobs": []}
    assert [np.float32(token["logprob"]) for token in logprobs] == made().logprobs.tolist()


def test_token_ids_and_logprobs_come_only_if_asked_for():
    for dialect, body in ((chat, CHAT), (completions, COMPLETION)):
        answer = dialect.answer(dialect.call(body), made(token_texts=()))
        assert answer["choices"][0]["logprobs"] is None
        assert "token_ids" not in json.dumps(answer)


def test_an_answer_of_completions_has_the_legacy_logprobs():
    call = completions.call({**COMPLETION, "logprobs": 1, "return_token_ids": True})
    (choice,) = completions.answer(call, made())["choices"]
    assert choice["logprobs"]["tokens"] == ["ab", "é", ""]
    assert choice["logprobs"]["text_offset"] == [0, 2, 3]
    assert choice["logprobs"]["token_logprobs"] == made().logprobs.tolist()
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == (LONG, [3, 4, 2], list(range(7)))


def test_generate_answers_ids_by_name():
    call = generate.call({**GENERATE, "sampling_params": {"logprobs": 1}})
    answer = generate.answer(call, made(token_texts=()))
    (choice,) = answer["choices"]
    assert answer["request_id"] == "5f0c"
    assert choice["token_ids"] == [3, 4, 2]
    assert choice["logprobs"]["content"][0] == {"token": "token_id:3", "logprob": -0.5}
    with pytest.raises(BadRequest):
        generate.stream(call, made())


def test_a_response_repeats_what_was_asked():
    asked = {"temperature": 0.5, "instructions": "be brief", "metadata": {"a": "b"}, "tool_choice": "none"}
    answer = responses.answer(responses.call({**RESPONSE, **asked}), made())
    assert {name: answer[name] for name in asked} == asked
    assert (answer["id"], answer["parallel_tool_calls"], answer["tools"]) == ("resp_5f0c", True, [])


@pytest.mark.parametrize(
    "arguments",
    ['{"a": ', "[1]", '{"a": NaN}', '{"a": 1e999}', "", "[" * 100_000],
    ids=["cut", "list", "nan", "infinite", "empty", "deep"],
)
def test_arguments_that_are_no_object_pass_through_messages_as_they_are(arguments):
    answer = made(content=None, tool_calls=(ToolCall("c", "f", arguments),), finish="tool_calls")
    content = messages.answer(messages.call(MESSAGE), answer)["content"]
    assert content[0]["input"] == {"INVALID_JSON": arguments}
    back = messages.call({**MESSAGE, "messages": [{"role": "assistant", "content": content}, *HI]})
    assert back.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_comes_back_is_the_same_message_in_every_api(answer):
    expected: dict = {"role": "assistant", "content": answer.content or (None if answer.tool_calls else "")}
    if answer.reasoning:
        expected["reasoning_content"] = answer.reasoning
    arguments = []
    back = [chat.answer(chat.call(CHAT), answer)["choices"][0]["message"]]
    found = [chat.call({**CHAT, "messages": [*HI, *back]}).messages[1:]]
    items = responses.answer(responses.call(RESPONSE), answer)["output"]
    found.append(responses.call({**RESPONSE, "input": [*HI, *items]}).messages[1:])
    content = messages.answer(messages.call(MESSAGE), answer)["content"]
    turns = [{"role": "assistant", "content": content}, *HI]
    found.append(messages.call({**MESSAGE, "messages": [*HI, *turns]}).messages[1:-1])
    for (message,) in found:
        calls = message.pop("tool_calls", [])
        assert message == expected
        arguments.append([(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls])
    assert arguments == [[(c.id, c.name, json.loads(c.arguments)) for c in answer.tool_calls]] * 3


# streams


def added(whole: dict, delta: dict) -> None:
    """Adds a delta of chat completions to the message so far."""
    for key, value in delta.items():
        if key == "tool_calls":
            for part in value:
                calls = whole.setdefault("tool_calls", {})
                call = calls.setdefault(part["index"], {**part, "function": {"name": "", "arguments": ""}})
                for name, text in part["function"].items():
                    call["function"][name] += text
        else:
            whole[key] = (whole.get(key) or "") + value


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_chat_stream_reassembles(answer):
    call = chat.call({**CHAT, "stream": True, "logprobs": True, "return_token_ids": True})
    first, *chunks = sent(chat.stream(call, answer))
    assert first["prompt_token_ids"] == list(range(7))
    assert all("prompt_token_ids" not in chunk and "usage" not in chunk for chunk in chunks)
    message: dict = {}
    for chunk in (first, *chunks):
        assert (chunk["id"], chunk["object"]) == ("chatcmpl-5f0c", "chat.completion.chunk")
        added(message, chunk["choices"][0]["delta"])
    whole = chat.answer(call, answer)["choices"][0]
    calls = [{key: value for key, value in c.items() if key != "index"} for c in message.pop("tool_calls", {}).values()]
    assert calls == whole["message"].get("tool_calls", [])
    assert message["content"] == (answer.content or "")
    assert message.get("reasoning_content") == answer.reasoning
    last = chunks[-1]["choices"][0]
    assert {key: last[key] for key in ("finish_reason", "logprobs", "token_ids")} == {
        key: whole[key] for key in ("finish_reason", "logprobs", "token_ids")
    }
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in (first, *chunks[:-1]))


@pytest.mark.parametrize("answer", [made(), made(text="")])
def test_a_stream_of_completions_reassembles(answer):
    call = completions.call({**COMPLETION, "stream": True, "return_token_ids": True, "logprobs": 0})
    chunks = [chunk["choices"][0] for chunk in sent(completions.stream(call, answer))]
    whole = completions.answer(call, answer)["choices"][0]
    assert "".join(chunk["text"] for chunk in chunks) == answer.text
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [list(range(7))] + [None] * (len(chunks) - 1)
    assert {**chunks[-1], "text": answer.text, "prompt_token_ids": list(range(7))} == whole


@pytest.mark.parametrize(("dialect", "body"), [(chat, CHAT), (completions, COMPLETION)])
def test_usage_is_streamed_last_if_asked_for_before_the_terminator(dialect, body):
    call = dialect.call({**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = sent(dialect.stream(call, made()))
    assert (last["choices"], last["usage"]) == ([], dialect.answer(call, made())["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert list(dialect.stream(call, made()))[-1] == b"data: [DONE]\n\n"


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_response_stream_reassembles(answer):
    call = responses.call({**RESPONSE, "stream": True, "temperature": 1})
    events, whole = sent(responses.stream(call, answer)), responses.answer(call, answer)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    assert events[0]["response"] == events[1]["response"] == begun
    assert events[-1] == {
        "type": f"response.{whole['status']}",
        "sequence_number": len(events) - 1,
        "response": whole,
    }
    items: list[dict] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            items.append(event["item"])
            continue
        item = items[-1]
        if kind == "output_item.done":
            assert event["item"] == {**item, "status": whole["output"][len(items) - 1]["status"]}
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind.endswith("text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == item["arguments"]
        elif kind == "content_part.done":
            assert event["part"] == item["content"][0]
        else:
            assert kind in ("output_text.done", "reasoning_text.done")
            assert event["text"] == item["content"][0]["text"]
    assert [{**item, "status": ""} for item in items] == [{**item, "status": ""} for item in whole["output"]]


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_message_stream_reassembles(answer):
    call = messages.call({**MESSAGE, "stream": True})
    start, *events, delta, stop = sent(messages.stream(call, answer))
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message, texts = start["message"], {}
    assert (message["stop_reason"], message["usage"]) == (None, {"input_tokens": 7, "output_tokens": 0})
    for event in events:
        block = message["content"][-1] if message["content"] else None
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            change = event["delta"]
            if change["type"] == "input_json_delta":
                texts[event["index"]] = texts.get(event["index"], "") + change["partial_json"]
            else:
                key = change.pop("type").removesuffix("_delta")
                block[key] += change[key]
        elif block["type"] == "tool_use":
            block["input"] = json.loads(texts[event["index"]])
    message |= {**delta["delta"], "usage": delta["usage"]}
    assert message == messages.answer(call, answer)


@pytest.mark.parametrize(("dialect", "body"), STREAMED)
def test_events_are_whole_ascii_lines_of_moderate_size(dialect, body):
    events = list(dialect.stream(dialect.call({**body, "stream": True}), made(content="a" * 5000, text="a" * 5000)))
    assert all(event.endswith(b"\n\n") and event.count(b"\n\n") == 1 and event.isascii() for event in events)
    assert sum(b"aa" in event and len(event) < 1000 for event in events) >= 5000 / 100


# errors


def test_errors_have_each_apis_form():
    error = {"message": "no", "type": "invalid_request_error", "param": "n", "code": None}
    for dialect in (chat, completions, responses, generate):
        assert dialect.error(400, "no", "n") == {"error": error}
    error = {"type": "invalid_request_error", "message": "no"}
    assert messages.error(400, "no", "n") == {"type": "error", "error": error}


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "not_found_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
    ],
)
def test_an_errors_type_follows_its_status(status, openai, anthropic):
    assert chat.error(status, "no")["error"]["type"] == openai
    assert messages.error(status, "no")["error"]["type"] == anthropic
