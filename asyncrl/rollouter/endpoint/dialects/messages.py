"""Anthropic's messages: content as blocks, and tools' results in the user's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.rollouter.endpoint.calls import Answer, BadRequest, Call
from asyncrl.rollouter.endpoint.dialects import conversation, fields, wire
from asyncrl.types.prompts import Message

PREFIX = "msg_"
KNOWN = {
    *fields.SAMPLING,
    *fields.IGNORED,
    *"model messages max_tokens system stop_sequences stream tools tool_choice thinking output_config".split(),
    *"chat_template_kwargs cache_control inference_geo speed thread".split(),
}
THINKING = ("disabled", "enabled", "adaptive")
#: Fields of tools that say how the API runs or caches them.
TOOL = ("type", "cache_control", "eager_input_streaming")
#: By which the API itself hands over arguments that are no JSON object.
INVALID = "INVALID_JSON"
#: How a block's content is streamed: its field, the type of the delta, and the delta's field.
STREAMED = {
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "text": ("text", "text_delta", "text"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}
ERRORS = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def call(body: Mapping[str, Any]) -> Call:
    fields.only(body, KNOWN)
    thinking = fields.optional(body, "thinking", dict) or {"type": "disabled"}
    if thinking.get("type") not in THINKING:
        raise fields.wrong("thinking.type", " or ".join(THINKING), thinking.get("type"))
    if (limit := fields.max_tokens(body, "max_tokens")) is None:
        raise fields.wrong("max_tokens", "an integer", None)
    choice = _tool_choice(fields.optional(body, "tool_choice", dict) or {"type": "auto"})
    output = fields.optional(body, "output_config", dict) or {}
    fields.only(output, ("effort", "format"), "output_config")
    previous = _thread(body, fields.optional(body, "thread", dict) or {"type": "create"})
    return Call(
        model=fields.required(body, "model", str),
        messages=[*_system(body), *_messages(body)],
        previous=previous,
        keeps_tools=previous is not None,
        tools=[_tool(tool, path) for path, tool in fields.objects(body.get("tools") or [], "tools")],
        tools_allowed=choice != "none",
        max_tokens=limit,
        stop=fields.stops(body, "stop_sequences"),
        sampling=fields.sampling(body) | fields.response_format(_format(output)) | conversation.forced(choice),
        template_args=fields.optional(body, "chat_template_kwargs", dict) or {},
        stream=fields.flag(body, "stream"),
    )


def _thread(body: Mapping[str, Any], thread: dict[str, Any]) -> str | None:
    """The id of the answer from which a call goes on, with its system prompt and tools. Answers are all kept, so that
    ``create`` asks for nothing more."""
    fields.only(thread, ("type", "previous_message_id"), "thread")
    if (kind := fields.required(thread, "type", str, "thread")) == "create":
        return None
    if kind != "continue":
        raise fields.wrong("thread.type", "create or continue", kind)
    for name in ("system", "tools"):
        if body.get(name):
            raise fields.wrong(name, "none, as a thread keeps those of its first call", body[name])
    id = fields.required(thread, "previous_message_id", str, "thread")
    if not id.startswith(PREFIX):
        raise fields.wrong("thread.previous_message_id", f"the id of a message, which begins with {PREFIX}", id)
    return id.removeprefix(PREFIX)


def _system(body: Mapping[str, Any]) -> list[Message]:
    text = conversation.text_of(body.get("system") or "", "system")
    return [{"role": "system", "content": text}] if text else []


def _format(output: Mapping[str, Any]) -> dict[str, Any] | None:
    form = fields.optional(output, "format", dict, "output_config")
    return form and {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if (kind := tool.get("type") or "custom") != "custom":
        raise fields.wrong(f"{path}.type", "a tool of type 'custom'", kind)
    return conversation.function(tool, path, TOOL, parameters="input_schema")


def _tool_choice(choice: dict[str, Any]) -> str | dict[str, Any]:
    if (kind := fields.required(choice, "type", str, "tool_choice")) == "tool":
        return conversation.named_choice(choice)
    names = {"auto": "auto", "none": "none", "any": "required"}
    if kind not in names:
        raise fields.wrong("tool_choice.type", "auto, none, any or tool", kind)
    return names[kind]


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = [
        turn
        for path, message in fields.objects(fields.required(body, "messages", list), "messages")
        for turn in _of_message(message, path)
    ]
    if not messages or messages[-1]["role"] == "assistant":
        raise BadRequest("messages: expected a last message of role user; the endpoint continues no other", "messages")
    return messages


def _of_message(message: dict[str, Any], path: str) -> list[Message]:
    fields.only(message, ("role", "content"), path)
    role, content, where = fields.required(message, "role", str, path), message.get("content"), f"{path}.content"
    if role not in ("user", "assistant", "system"):
        raise fields.wrong(f"{path}.role", "user, assistant or system", role)
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise fields.wrong(where, "a string or a list of blocks", content)
    if role == "assistant":
        return [_assistant(blocks, where)]
    results: list[Message] = []
    texts: list[str] = []
    for path, block in fields.objects(blocks, where):
        if role == "user" and block.get("type") == "tool_result":
            results.append(_result(block, path))
        else:
            texts.append(conversation.part_text(block, path, ("text",)))
    return [*results, {"role": role, "content": "".join(texts)}] if texts or not results else results


def _result(block: dict[str, Any], path: str) -> Message:
    text = conversation.text_of(block.get("content") or "", f"{path}.content")
    return conversation.tool_result(fields.required(block, "tool_use_id", str, path), text)


def _assistant(blocks: list[Any], path: str) -> Message:
    found: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    for where, block in fields.objects(blocks, path):
        if (kind := fields.required(block, "type", str, where)) not in found:
            raise fields.wrong(f"{where}.type", "text, thinking or tool_use", kind)
        found[kind].append(_called(block, where) if kind == "tool_use" else fields.required(block, kind, str, where))
    return conversation.assistant("".join(found["text"]), "".join(found["thinking"]), found["tool_use"])


def _called(block: dict[str, Any], path: str) -> dict[str, Any]:
    given = fields.required(block, "input", dict, path)
    invalid = given.get(INVALID) if len(given) == 1 else None
    arguments = invalid if isinstance(invalid, str) else json.dumps(given, ensure_ascii=False)
    return conversation.tool_call(fields.required(block, "id", str, path), fields.name_of(block, path), arguments)


def answer(call: Call, answer: Answer) -> dict[str, Any]:
    return {**_begun(answer), **_end(answer), "content": _blocks(answer), "usage": _usage(answer)}


def stream(call: Call, answer: Answer) -> Iterator[bytes]:
    begun = {**_begun(answer), "usage": {**_usage(answer), "output_tokens": 0}}
    yield _event("message_start", message=begun)
    for index, block in enumerate(_blocks(answer)):
        yield from _block_events(index, block)
    yield _event("message_delta", delta=_end(answer), usage=_usage(answer))
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return wire.event({"type": kind, **fields}, kind)


def _block_events(index: int, block: dict[str, Any]) -> Iterator[bytes]:
    field, delta, delta_field = STREAMED[block["type"]]
    called = block["type"] == "tool_use"
    yield _event("content_block_start", index=index, content_block={**block, field: {} if called else ""})
    for piece in wire.pieces(json.dumps(block[field]) if called else block[field]):
        yield _event("content_block_delta", index=index, delta={"type": delta, delta_field: piece})
    if block["type"] == "thinking":
        signature = {"type": "signature_delta", "signature": block["signature"]}
        yield _event("content_block_delta", index=index, delta=signature)
    yield _event("content_block_stop", index=index)


def _begun(answer: Answer) -> dict[str, Any]:
    """A message that has begun."""
    head = {"id": PREFIX + answer.id, "type": "message", "role": "assistant", "model": answer.model}
    return {**head, "content": [], "stop_reason": None, "stop_sequence": None}


def _end(answer: Answer) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(answer.finish)
    at_string = None if reason else answer.stop_string
    return {
        "stop_reason": reason or ("end_turn" if at_string is None else "stop_sequence"),
        "stop_sequence": at_string,
    }


def _usage(answer: Answer) -> dict[str, int]:
    return {"input_tokens": len(answer.prompt), "output_tokens": len(answer.tokens)}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    calls = ({"type": "tool_use", "id": m.id, "name": m.name, "input": _input(m.arguments)} for m in answer.tool_calls)
    return [*blocks, *calls]


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; what is none is handed over as a text."""
    try:
        given = json.loads(arguments)
        json.dumps(given, allow_nan=False)
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {INVALID: arguments}
