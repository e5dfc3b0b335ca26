"""How models write tool calls and reasoning: formats that are parsed, and which of them a chat template uses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tool = Mapping[str, Any]


@dataclass(frozen=True)
class WrittenCall:
    """A tool call in a model's text. ``arguments``: a JSON text."""

    name: str
    arguments: str


#: text after the reasoning, and the tools that the caller offered → content before the calls, and the calls; no calls
#: if the text has none that are well-formed, which then stays content
ToolFormat = Callable[[str, Sequence[Tool]], tuple[str, list[WrittenCall]]]

THINK, END_OF_THINKING = "<think>", "</think>"


def split_reasoning(text: str, opened: bool) -> tuple[str | None, str]:
    """Reasoning (None: there is none) and the text after it. ``opened``: the prompt ends with the opening tag."""
    if not opened:
        if not text.lstrip().startswith(THINK):
            return None, text
        text = text.lstrip()[len(THINK) :]
    reasoning, _, rest = text.partition(END_OF_THINKING)
    return reasoning.strip("\n"), rest.lstrip("\n")


def _between(text: str, begin: str, end: str) -> Iterator[tuple[int, str, int]]:
    """What stands between each ``begin`` and the next ``end``, with the places where the pair begins and ends; in
    linear time, whatever the policy writes."""
    at = 0
    while (start := text.find(begin, at)) >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        at = stop + len(end)
        yield start, text[start + len(begin) : stop], at


def _tagged(text: str, parse: Callable[[str], WrittenCall | None]) -> tuple[str, list[WrittenCall]]:
    """Calls between ``<tool_call>`` and ``</tool_call>``, and the text outside. A malformed one makes all of it
    content."""
    calls: list[WrittenCall] = []
    outside, at = [], 0
    for start, inside, end in _between(text, "<tool_call>", "</tool_call>"):
        if (call := parse(inside.strip())) is None:
            return text, []
        calls.append(call)
        outside.append(text[at:start])
        at = end
    outside.append(text[at:])
    return ("\n".join(filter(None, (part.strip("\n") for part in outside))), calls) if calls else (text, [])


def _named_object(text: str) -> WrittenCall | None:
    """``{"name": …, "arguments": {…}}``; Llama says ``parameters``."""
    try:
        found = json.loads(text)
        arguments = found.get("arguments", found.get("parameters"))
    except (ValueError, AttributeError, RecursionError):
        return None
    if not isinstance(found.get("name"), str) or not isinstance(arguments, dict):
        return None
    return WrittenCall(found["name"], json.dumps(arguments, ensure_ascii=False))


def json_in_tags(text: str, tools: Sequence[Tool]) -> tuple[str, list[WrittenCall]]:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen2.5, Qwen3, MiMo."""
    return _tagged(text, _named_object)


def functions_in_tags(text: str, tools: Sequence[Tool]) -> tuple[str, list[WrittenCall]]:
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5."""

    def parse(inside: str) -> WrittenCall | None:
        name, closed, body = inside.removeprefix("<function=").partition(">")
        if not (inside.startswith("<function=") and closed and body.endswith("</function>")):
            return None
        pairs = [found.partition(">") for _, found, _ in _between(body, "<parameter=", "</parameter>")]
        return _typed(name, [(key, v.removeprefix("\n").removesuffix("\n")) for key, _, v in pairs], tools)

    return _tagged(text, parse)


def arguments_in_tags(text: str, tools: Sequence[Tool]) -> tuple[str, list[WrittenCall]]:
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM."""

    def parse(inside: str) -> WrittenCall | None:
        name = inside.partition("<arg_key>")[0].strip()
        pairs = [found.partition("</arg_key>") for _, found, _ in _between(inside, "<arg_key>", "</arg_value>")]
        if not name or not all(value.lstrip().startswith("<arg_value>") for _, _, value in pairs):
            return None
        return _typed(name, [(key, value.lstrip().removeprefix("<arg_value>")) for key, _, value in pairs], tools)

    return _tagged(text, parse)


def bare_json(text: str, tools: Sequence[Tool]) -> tuple[str, list[WrittenCall]]:
    """The whole text is ``{"name": …, "parameters": {…}}`` and names a tool: Llama 3."""
    call = _named_object(text.strip().removeprefix("<|python_tag|>"))
    known = {tool["function"]["name"] for tool in tools}
    return ("", [call]) if call is not None and call.name in known else (text, [])


def json_list(text: str, tools: Sequence[Tool]) -> tuple[str, list[WrittenCall]]:
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``: Mistral."""
    content, marker, rest = text.partition("[TOOL_CALLS]")
    try:
        calls = [_named_object(json.dumps(found)) for found in json.loads(rest)] if marker else []
    except (ValueError, TypeError, RecursionError):
        calls = []
    found = [call for call in calls if call is not None]
    return (content.strip(), found) if found and len(found) == len(calls) else (text, [])


FORMATS: tuple[ToolFormat, ...] = (json_in_tags, functions_in_tags, arguments_in_tags, json_list, bare_json)

PROBE: Tool = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "",
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}, "text": {"type": "string"}}},
    },
}
PROBE_ARGUMENTS = {"count": 3, "text": 'a "quoted" word'}
PROBE_CALL = {"name": "probe_tool", "arguments": json.dumps(PROBE_ARGUMENTS)}


def fitting_format(rendered: str, ends: Sequence[str]) -> ToolFormat | None:
    """The format that finds the call of `PROBE` in an assistant message as a chat template rendered it. ``ends``: texts
    of stop tokens, which may follow the message."""
    for end in filter(None, ends):
        rendered = rendered.partition(end)[0]
    _, rest = split_reasoning(rendered, False)
    for parse in FORMATS:
        _, calls = parse(rest, [PROBE])
        found = [(call.name, json.loads(call.arguments)) for call in calls]
        if found == [(PROBE["function"]["name"], PROBE_ARGUMENTS)]:
            return parse
    return None


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Tool]) -> WrittenCall:
    """Values that the tool's schema does not declare as texts are JSON where they parse as JSON."""
    types = dict(_types(name, tools))
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        arguments[key] = value
        if types.get(key) != "string":
            with contextlib.suppress(ValueError, RecursionError):
                arguments[key] = json.loads(value)
    return WrittenCall(name, json.dumps(arguments, ensure_ascii=False))


def _types(name: str, tools: Sequence[Tool]) -> Iterator[tuple[str, Any]]:
    """Each argument of a tool with the type in its schema, which may have any form."""
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = (tool["function"].get("parameters") or {}).get("properties")
            for key, schema in properties.items() if isinstance(properties, Mapping) else ():
                yield key, schema.get("type") if isinstance(schema, Mapping) else None
