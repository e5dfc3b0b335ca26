"""The form of messages and tools that all dialects share, so that harnesses that write JSON differently agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.rollouter.endpoint.dialects import fields
from asyncrl.types.prompts import Message

ROLES = {"system": "system", "developer": "system", "user": "user"}


def text_of(content: Any, path: str, kinds: Sequence[str] = ("text",)) -> str:
    """A message's text: a string, or parts of the ``kinds``, which are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.wrong(path, "a string or a list of text parts", content)
    return "".join(part_text(part, where, kinds) for where, part in fields.objects(content, path))


def part_text(part: Mapping[str, Any], path: str, kinds: Sequence[str]) -> str:
    if (kind := fields.required(part, "type", str, path)) not in kinds:
        raise fields.wrong(f"{path}.type", f"a part of type {' or '.join(kinds)}", kind)
    return fields.required(part, "text", str, path)


def spoken(message: Mapping[str, Any], path: str, kinds: Sequence[str]) -> Message:
    """A message of neither an assistant nor a tool."""
    if (role := fields.required(message, "role", str, path)) not in ROLES:
        raise fields.wrong(f"{path}.role", "system, developer, user, or another role of this API", role)
    return {"role": ROLES[role], "content": text_of(message.get("content"), f"{path}.content", kinds)}


def assistant(text: str | None, reasoning: str | None, calls: list[dict[str, Any]]) -> Message:
    message: Message = {"role": "assistant", "content": text or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(id: str, text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": id}


def function(
    declared: Mapping[str, Any], path: str, also: Sequence[str], parameters: str = "parameters"
) -> dict[str, Any]:
    """A tool, whose schema the dialect calls ``parameters``. ``also``: the fields that it has beside the usual ones.

    ``strict`` is dropped: arguments are sampled without constraint, and agents send it whether they need it or not."""
    fields.only(declared, ("name", "description", parameters, "strict", *also), path)
    tool: dict[str, Any] = {"name": fields.name_of(declared, path)}
    if (description := fields.optional(declared, "description", str, path)) is not None:
        tool["description"] = description
    if (schema := fields.optional(declared, parameters, dict, path)) is not None:
        tool["parameters"] = schema
    return {"type": "function", "function": tool}


def tool_choice(choice: Any) -> str | dict[str, Any]:
    """OpenAI's choice of tools, in the form of chat completions."""
    choice = choice or "auto"
    if choice in ("auto", "none", "required"):
        return str(choice)
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise fields.wrong("tool_choice", "'auto', 'none', 'required' or a function", choice)
    return named_choice(choice.get("function", choice))


def named_choice(tool: Any) -> dict[str, Any]:
    name = fields.name_of(fields.checked(tool, dict, "tool_choice"), "tool_choice")
    return {"type": "function", "function": {"name": name}}


def forced(choice: str | dict[str, Any]) -> dict[str, Any]:
    """The entry of `Call.sampling` for a choice of tools, if it constrains what is sampled."""
    return {} if choice in ("auto", "none") else {"tool_choice": choice}
