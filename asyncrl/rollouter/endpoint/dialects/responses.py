"""OpenAI's responses: a conversation as a list of items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from asyncrl.rollouter.endpoint.calls import Answer, Call
from asyncrl.rollouter.endpoint.dialects import conversation, fields, wire
from asyncrl.types.prompts import Message

PREFIX = "resp_"
FIXED = {"top_logprobs": 0, "truncation": "disabled", "background": False}
KNOWN = {
    *fields.SAMPLING,
    *fields.IGNORED,
    *FIXED,
    *"model input instructions previous_response_id tools tool_choice max_output_tokens text include stream".split(),
    *"stream_options chat_template_kwargs reasoning max_tool_calls".split(),
}
#: Fields of the request that its answer repeats.
REPEATED = (
    "instructions max_output_tokens metadata parallel_tool_calls previous_response_id reasoning store temperature text "
    "tool_choice tools top_p truncation user"
).split()
TEXTS = ("input_text", "output_text", "text")
ITEM = ("type", "id", "status", "phase")
MESSAGE = (*ITEM, "role", "content")
REASONING, TEXT, CALL = range(3)  # parts of an assistant's turn, in their order

error = wire.openai_error


def call(body: Mapping[str, Any]) -> Call:
    fields.only(body, KNOWN)
    fields.fixed(body, FIXED)
    if "message.output_text.logprobs" in (fields.optional(body, "include", list) or []):
        raise fields.wrong("include", "no logprobs: use chat completions for them", body["include"])
    choice = conversation.tool_choice(body.get("tool_choice"))
    text = fields.optional(body, "text", dict) or {}
    return Call(
        model=fields.required(body, "model", str),
        messages=_messages(body.get("input")),
        instructions=fields.optional(body, "instructions", str),
        previous=_previous(fields.optional(body, "previous_response_id", str)),
        tools=[_tool(tool, path) for path, tool in fields.objects(body.get("tools") or [], "tools")],
        tools_allowed=choice != "none",
        max_tokens=fields.max_tokens(body, "max_output_tokens"),
        sampling=fields.sampling(body)
        | fields.response_format(_format(fields.optional(text, "format", dict, "text")))
        | conversation.forced(choice),
        template_args=fields.optional(body, "chat_template_kwargs", dict) or {},
        stream=fields.flag(body, "stream"),
        options={name: body[name] for name in REPEATED if body.get(name) is not None},
    )


def _previous(id: str | None) -> str | None:
    if id is not None and not id.startswith(PREFIX):
        raise fields.wrong("previous_response_id", f"the id of a response, which begins with {PREFIX}", id)
    return id and id.removeprefix(PREFIX)


def _format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """The form of chat completions, where a schema's name and options are one level deeper."""
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    fields.fixed(tool, {"type": "function"}, path)
    return conversation.function(tool, path, ("type",))


def _messages(items: Any) -> list[Message]:
    """The messages of a request's input. Reasoning, text and calls that follow each other in this order are one
    assistant's message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise fields.wrong("input", "a string or a list of at least one item", items)
    messages: list[Message] = []
    turn: list[tuple[int, Any]] = []
    for path, item in fields.objects(items, "input"):
        part = _assistant_part(item, path)
        if turn and (part is None or part[0] < turn[-1][0] or part[0] == turn[-1][0] != CALL):
            messages.append(_turn(turn))
            turn = []
        if part is None:
            messages.append(_message(item, path))
        else:
            turn.append(part)
    return [*messages, _turn(turn)] if turn else messages


def _turn(parts: list[tuple[int, Any]]) -> Message:
    one = dict(parts)
    return conversation.assistant(one.get(TEXT), one.get(REASONING), [value for kind, value in parts if kind == CALL])


def _assistant_part(item: dict[str, Any], path: str) -> tuple[int, Any] | None:
    """What an item adds to an assistant's turn; None if it is another's."""
    kind = item.get("type") or "message"
    if kind == "message" and item.get("role") == "assistant":
        fields.only(item, MESSAGE, path)
        return TEXT, conversation.text_of(item.get("content"), f"{path}.content", TEXTS)
    if kind == "reasoning":
        fields.only(item, (*ITEM, "summary", "content", "encrypted_content"), path)
        said = [(name, form) for name, form in (("content", "reasoning_text"), ("summary", "summary_text"))]
        texts = [conversation.text_of(item.get(name) or [], fields.at(path, name), (form,)) for name, form in said]
        return REASONING, texts[0] or texts[1]
    if kind == "function_call":
        fields.only(item, (*ITEM, "call_id", "name", "arguments"), path)
        id, arguments = (fields.required(item, name, str, path) for name in ("call_id", "arguments"))
        return CALL, conversation.tool_call(id, fields.name_of(item, path), arguments)
    return None


def _message(item: dict[str, Any], path: str) -> Message:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        fields.only(item, (*ITEM, "call_id", "output"), path)
        return conversation.tool_result(
            fields.required(item, "call_id", str, path),
            conversation.text_of(item.get("output"), f"{path}.output", TEXTS),
        )
    if kind != "message":
        raise fields.wrong(f"{path}.type", "message, reasoning, function_call or function_call_output", kind)
    fields.only(item, MESSAGE, path)
    return conversation.spoken(item, path, TEXTS)


def answer(call: Call, answer: Answer) -> dict[str, Any]:
    return _ended(call, answer)


def _ended(call: Call, answer: Answer) -> dict[str, Any]:
    cut = answer.finish == "length"
    prompt, sampled = len(answer.prompt), len(answer.tokens)
    return {
        **_begun(call, answer),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(answer),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def _begun(call: Call, answer: Answer) -> dict[str, Any]:
    """A response that has begun."""
    defaults = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "instructions": None, "metadata": {}}
    return {
        "id": PREFIX + answer.id,
        "object": "response",
        "created_at": answer.created_s,
        "model": answer.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **defaults,
        **call.options,
    }


def _items(answer: Answer) -> list[dict[str, Any]]:
    """The items of an answer; one at least, and the last is incomplete if the answer is."""
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        content = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": content})
    if answer.content or not (answer.reasoning or answer.tool_calls):
        text = {"type": "output_text", "text": answer.content or "", "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "content": [text]})
    for index, made in enumerate(answer.tool_calls):
        called = {"call_id": made.id, "name": made.name, "arguments": made.arguments}
        items.append({"id": f"fc_{answer.id}_{index}", "type": "function_call", **called})
    for item in items:
        item["status"] = "completed"
    if answer.finish == "length":
        items[-1]["status"] = "incomplete"
    return items


def stream(call: Call, answer: Answer) -> Iterator[bytes]:
    numbers = count()

    def send(kind: str, **more: Any) -> bytes:
        return wire.event({"type": f"response.{kind}", "sequence_number": next(numbers), **more}, f"response.{kind}")

    begun, whole = _begun(call, answer), _ended(call, answer)
    yield send("created", response=begun)
    yield send("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        where = {"output_index": index}
        yield send("output_item.added", item={**item, "status": "in_progress", **_emptied(item)}, **where)
        for kind, more in _item_events(item):
            yield send(kind, item_id=item["id"], **where, **more)
        yield send("output_item.done", item=item, **where)
    yield send(whole["status"], response=whole)


def _emptied(item: dict[str, Any]) -> dict[str, Any]:
    return {"arguments": ""} if item["type"] == "function_call" else {"content": []}


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events between an item's first and last."""
    if item["type"] == "function_call":
        yield from (("function_call_arguments.delta", {"delta": piece}) for piece in wire.pieces(item["arguments"]))
        yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    (part,) = item["content"]
    where = {"content_index": 0}
    logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "content_part.added", {**where, "part": {**part, "text": ""}}
    yield from ((f"{part['type']}.delta", {**where, "delta": piece, **logprobs}) for piece in wire.pieces(part["text"]))
    yield f"{part['type']}.done", {**where, "text": part["text"], **logprobs}
    yield "content_part.done", {**where, "part": part}
