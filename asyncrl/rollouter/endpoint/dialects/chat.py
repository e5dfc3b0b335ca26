"""OpenAI's chat completions, with the extensions of the common engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.rollouter.endpoint.calls import Answer, Call
from asyncrl.rollouter.endpoint.dialects import conversation, fields, wire
from asyncrl.types.prompts import Message

PREFIX = "chatcmpl-"
FIXED = {
    "n": 1,
    "top_logprobs": 0,
    "modalities": ["text"],
    "add_generation_prompt": True,
    "continue_final_message": False,
    "include_stop_str_in_output": False,
    "include_reasoning": True,
    "separate_reasoning": True,
}
KNOWN = {
    *fields.SAMPLING,
    *fields.IGNORED,
    *FIXED,
    *"model messages tools tool_choice stop max_tokens max_completion_tokens logprobs return_token_ids stream".split(),
    *"stream_options chat_template_kwargs response_format".split(),
}
MESSAGE = {"role", "content", "name", "cache_control"}
ASSISTANT = MESSAGE | {"tool_calls", "reasoning_content", "reasoning", "annotations", "provider_specific_fields", "id"}

error = wire.openai_error


def call(body: Mapping[str, Any]) -> Call:
    fields.only(body, KNOWN)
    fields.fixed(body, FIXED)
    limits = [fields.max_tokens(body, name) for name in ("max_tokens", "max_completion_tokens")]
    listed = fields.objects(fields.required(body, "messages", list), "messages")
    if not (messages := [_message(message, path) for path, message in listed]):
        raise fields.wrong("messages", "at least one message", messages)
    form = fields.optional(body, "response_format", dict)
    choice = conversation.tool_choice(body.get("tool_choice"))
    return Call(
        model=fields.required(body, "model", str),
        messages=messages,
        tools=[_tool(tool, path) for path, tool in fields.objects(body.get("tools") or [], "tools")],
        tools_allowed=choice != "none",
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stop=fields.stops(body, "stop"),
        sampling=fields.sampling(body) | fields.response_format(form) | conversation.forced(choice),
        template_args=fields.optional(body, "chat_template_kwargs", dict) or {},
        stream=fields.flag(body, "stream"),
        wants_logprobs=fields.flag(body, "logprobs"),
        wants_token_ids=fields.flag(body, "return_token_ids"),
        options=fields.stream_options(body),
    )


def _message(message: dict[str, Any], path: str) -> Message:
    role = fields.required(message, "role", str, path)
    if role == "assistant":
        return _assistant(message, path)
    if role != "tool":
        fields.only(message, MESSAGE, path)
        return conversation.spoken(message, path, ("text",))
    fields.only(message, MESSAGE | {"tool_call_id"}, path)
    text = conversation.text_of(message.get("content"), f"{path}.content")
    result = conversation.tool_result(fields.required(message, "tool_call_id", str, path), text)
    name = fields.optional(message, "name", str, path)  # some templates show it
    return {**result, "name": name} if name else result


def _assistant(message: dict[str, Any], path: str) -> Message:
    fields.only(message, ASSISTANT, path)
    reasoning = [fields.optional(message, name, str, path) for name in ("reasoning_content", "reasoning")]
    listed = fields.objects(message.get("tool_calls") or [], f"{path}.tool_calls")
    calls = [_tool_call(made, where) for where, made in listed]
    if "content" not in message and not calls and not any(reasoning):
        raise fields.wrong(path, "content or tool_calls", message)
    text = conversation.text_of(message.get("content") or "", f"{path}.content")
    return conversation.assistant(text, reasoning[0] or reasoning[1], calls)


def _tool_call(made: dict[str, Any], path: str) -> dict[str, Any]:
    fields.only(made, ("id", "type", "function", "index"), path)
    fields.fixed(made, {"type": "function"}, path)
    called, where = fields.required(made, "function", dict, path), f"{path}.function"
    name, arguments = fields.name_of(called, where), fields.required(called, "arguments", str, where)
    return conversation.tool_call(fields.required(made, "id", str, path), name, arguments)


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    fields.fixed(tool, {"type": "function"}, path)
    fields.only(tool, ("type", "function", "cache_control"), path)
    return conversation.function(fields.required(tool, "function", dict, path), f"{path}.function", ())


def answer(call: Call, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            conversation.tool_call(made.id, made.name, made.arguments) for made in answer.tool_calls
        ]
    return {
        **wire.openai_head(PREFIX, "chat.completion", answer),
        "choices": [{"index": 0, "message": message, **_end(call, answer)}],
        "usage": wire.openai_usage(answer),
        **wire.ids(call, prompt_token_ids=answer.prompt),
    }


def stream(call: Call, answer: Answer) -> Iterator[bytes]:
    head = wire.openai_head(PREFIX, "chat.completion.chunk", answer)
    going: dict[str, Any] = {"logprobs": None, "finish_reason": None}
    choices = [{"delta": delta, **going} for delta in ({"role": "assistant", "content": ""}, *_deltas(answer))]
    choices.append({"delta": {}, **_end(call, answer)})
    return wire.openai_stream(call, answer, head, choices, wire.ids(call, prompt_token_ids=answer.prompt))


def _deltas(answer: Answer) -> Iterator[dict[str, Any]]:
    yield from ({"reasoning_content": piece} for piece in wire.pieces(answer.reasoning))
    yield from ({"content": piece} for piece in wire.pieces(answer.content))
    for index, made in enumerate(answer.tool_calls):
        yield {"tool_calls": [{"index": index, **conversation.tool_call(made.id, made.name, "")}]}
        for piece in wire.pieces(made.arguments):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _end(call: Call, answer: Answer) -> dict[str, Any]:
    """What a choice has at its end, streamed or not."""
    ids = wire.ids(call, token_ids=answer.tokens)
    named = isinstance(call.sampling.get("tool_choice"), dict)  # a forced function ends with stop
    finish = wire.bare_finish(answer) if named else answer.finish
    return {"logprobs": _logprobs(answer) if call.wants_logprobs else None, "finish_reason": finish, **ids}


def _logprobs(answer: Answer) -> dict[str, Any]:
    tokens = zip(answer.token_texts, answer.logprobs.tolist(), strict=True)
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
        for text, logprob in tokens
    ]
    return {"content": content, "refusal": None}
