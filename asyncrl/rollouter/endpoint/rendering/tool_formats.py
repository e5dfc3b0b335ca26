"""How models write tool calls and reasoning: formats that are parsed, and which of them a chat template uses."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Tool = Mapping[str, Any]


@dataclass(frozen=True)
class WrittenCall:
    """A tool call in a model's text. ``arguments``: a JSON text. ``id``: only some models write one."""

    name: str
    arguments: str
    id: str | None = None


#: texts before and after reasoning; the end may hold the beginning of the answer proper
ReasoningTags = tuple[str, str]

REASONING_TAGS: tuple[ReasoningTags, ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),  # gpt-oss
)


def split_reasoning(text: str, opened: bool, tags: ReasoningTags) -> tuple[str | None, str]:
    """Reasoning (None: there is none) and the text after it. ``opened``: the prompt ends with the opening tag."""
    begin, end = tags
    if not opened:
        if text.lstrip().startswith(end):  # reasoning is off, as some models say
            return None, text.lstrip()[len(end) :].lstrip("\n")
        if not text.lstrip().startswith(begin):
            return None, text
        text = text.lstrip()[len(begin) :]
    reasoning, _, rest = text.partition(end)
    return reasoning.strip("\n"), rest.lstrip("\n")


@dataclass(frozen=True)
class ToolFormat:
    """Calls between ``begin`` and ``end``: a name up to ``name_end`` and its arguments as JSON or, with ``keys``, as
    texts; without ``name_end`` a JSON object, several, or a list of them. ``begin`` empty: the whole text is calls of
    known tools.

    ``keys``: text before a key, pattern between it and its value, and text after that. ``around``: texts beside the
    calls that are not content. ``quote``: stands for JSON's quotes, and keys are bare. ``most``: calls of a message."""

    begin: str
    end: str = ""
    name_end: str = ""
    keys: tuple[str, str, str] | None = None
    around: tuple[str, ...] = ()
    quote: str = ""
    most: int = 1000

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[WrittenCall]]:
        """Content beside the calls, and the calls. If one is malformed, all of the text is content.

        ``text`` follows the reasoning; ``tools`` are on offer. Takes linear time, whatever the policy writes."""
        try:
            outside, calls = self._read(text, tools)
        except (ValueError, RecursionError):
            return text, []
        if not 0 < len(calls) <= self.most:
            return text, []
        if len({call.id for call in calls}) < len(calls):
            calls = [replace(call, id=None) for call in calls]
        for mark in self.around:
            outside = [part.replace(mark, "") for part in outside]
        return "\n".join(part.strip("\n") for part in outside if part.strip()), calls

    def _read(self, text: str, tools: Sequence[Tool]) -> tuple[list[str], list[WrittenCall]]:
        if not self.begin:
            for mark in self.around:
                text = text.strip().removeprefix(mark)
        outside: list[str] = []
        calls: list[WrittenCall] = []
        at = 0
        while at < len(text) and (start := text.find(self.begin, at)) >= 0:
            outside.append(text[at:start])
            inside = start + len(self.begin)
            found, at = self._keyed(text, inside, tools) if self.keys else self._json(text, inside)
            calls += found
        if not self.begin and not {call.name for call in calls} <= {tool["function"]["name"] for tool in tools}:
            raise ValueError("not a call")
        return [*outside, text[at:]], calls

    def _keyed(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[list[WrittenCall], int]:
        """The call at ``at``, and where the text goes on. Raises ValueError, as `_json`."""
        assert self.keys is not None
        begin, between, end = self.keys
        stop = text.index(self.end, at)
        head, *written = text[at:stop].split(begin)
        name = head.strip().removesuffix(self.name_end)
        if not name or not head.strip().endswith(self.name_end) or re.search(r"[\s<>{]", name):
            raise ValueError("no name")
        pairs = []
        for pair in written:
            key, rest = re.split(between, pair, maxsplit=1)
            value, ended, left = rest.rpartition(end)
            if not ended or left.strip():
                raise ValueError("no end of a value")
            if value[:1] == value[-1:] == "\n":
                value = value[1:-1]
            pairs.append((key.strip(), value))
        return [_typed(name, pairs, tools)], stop + len(self.end)

    def _json(self, text: str, at: int) -> tuple[list[WrittenCall], int]:
        if self.name_end:
            stop = text.index(self.name_end, at)
            name, identity = _head(text[at:stop].strip())
            at = stop + len(self.name_end)
            if self.quote:
                stop = text.index(self.end, at)
                arguments, at = json.loads(_quoted("{" + text[at:stop], self.quote)), stop
            else:
                arguments, at = _value(text, at)
            calls = [_call(name, arguments, identity)]
        else:
            objects, at = _value(text, at)
            objects = objects if isinstance(objects, list) else [objects]
            while text.startswith("{", at):
                found, at = _value(text, at)
                objects.append(found)
            calls = [_named(found) for found in objects]
        if not text.startswith(self.end, at):
            raise ValueError("no end")
        return calls, at + len(self.end)


#: the first that fits a template is used
FORMATS = (
    ToolFormat("<tool_call>", "</tool_call>"),  # Hermes, Qwen2.5, Qwen3, MiMo, Granite 4
    ToolFormat(  # Qwen3-Coder, Qwen3.5, Nemotron 3, Seed-OSS
        "<function=", "</function>", ">", ("<parameter=", ">", "</parameter>"),
        ("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
    ToolFormat("<tool_call>", "</tool_call>", "", ("<arg_key>", r"</arg_key>\s*<arg_value>", "</arg_value>")),  # GLM
    ToolFormat(  # MiniMax-M2
        '<invoke name="', "</invoke>", '">', ('<parameter name="', '">', "</parameter>"),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    ToolFormat('<function name="', "</function>", '">', ('<param name="', '">', "</param>")),  # MiniCPM5
    ToolFormat(  # DeepSeek V3.2, V4
        '<｜DSML｜invoke name="', "</｜DSML｜invoke>", '">',
        ('<｜DSML｜parameter name="', '"[^<>]{0,40}>', "</｜DSML｜parameter>"),
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ),
    ToolFormat("[TOOL_CALLS]", "", "[ARGS]"),  # Mistral since Small 3.2
    ToolFormat("[TOOL_CALLS]"),  # Mistral before
    ToolFormat(  # DeepSeek V3, R1
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "```<｜tool▁call▁end｜>", "```json", None,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolFormat(  # DeepSeek V3.1
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", None,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolFormat(  # Kimi K2
        "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", None,
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    ToolFormat(  # gpt-oss
        "to=functions.", "", "<|message|>", None,
        ("<|channel|>commentary ", "<|channel|>commentary", "<|message|>", "<|end|><|start|>assistant"),
    ),
    ToolFormat("<|tool_call>call:", "<tool_call|>", "{", quote='<|"|>'),  # Gemma 4
    ToolFormat("<function=", "</function>", ">"),  # Functionary
    ToolFormat("<|START_ACTION|>", "<|END_ACTION|>"),  # Command R7B, A
    ToolFormat("<TOOLCALL>", "</TOOLCALL>"),  # Nemotron Nano 2
    ToolFormat("<tool_calls>", "</tool_calls>"),  # MiniMax-M1, Apriel, Hunyuan
    ToolFormat("<|tool_call|>"),  # Granite 3
    ToolFormat("", around=("<|python_tag|>", "functools")),  # Llama 3, Phi-4-mini, xLAM
)  # fmt: skip

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


def fitting_format(rendered: str, calls: int) -> ToolFormat | None:
    """The format that finds ``calls`` calls of `PROBE` in a text that a chat template rendered."""
    for format in FORMATS:
        _, written = format.parse(rendered, [PROBE])
        found = [(call.name, json.loads(call.arguments)) for call in written]
        if found == [(PROBE["function"]["name"], PROBE_ARGUMENTS)] * calls:
            return format
    return None


def _value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at ``at``, and where the text goes on, without spaces and separators."""
    value, at = _JSON.raw_decode(text, _SPACE.match(text, at).end())  # type: ignore[union-attr]
    return value, _SPACE.match(text, at).end()  # type: ignore[union-attr]


_JSON, _SPACE = json.JSONDecoder(), re.compile(r"[\s,;]*")
_ID = "[A-Za-z0-9]{9}"  # Mistral's templates refuse others
_HEAD = re.compile(r"(functions\.)?([^\s<>{}\[\]:\"]+)(:\d+)?(?:\[CALL_ID\](\S*))?(?:\s*<\|.*)?")


def _head(text: str) -> tuple[str, str | None]:
    """Name and id: ``name``, Kimi's ``functions.name:0``, Mistral's ``name[CALL_ID]…``, and gpt-oss's ``name
    <|constrain|>json``."""
    if (found := _HEAD.fullmatch(text)) is None:
        raise ValueError("no name")
    prefix, name, number, identity = found.groups()
    if prefix and number:
        return name, text
    return name, identity if re.fullmatch(_ID, identity or "") else None


def _named(found: Any) -> WrittenCall:
    """The call of a JSON object with the name: ``{"name": …, "arguments": {…}}``. Llama says ``parameters``, Command
    also ``tool_name``."""
    if not isinstance(found, dict):
        raise ValueError("no object")
    name, arguments = found.get("name", found.get("tool_name")), found.get("arguments", found.get("parameters"))
    identity = str(found.get("id"))
    return _call(name, arguments, identity if re.fullmatch(_ID, identity) else None)


def _call(name: Any, arguments: Any, identity: str | None = None) -> WrittenCall:
    if not name or not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no name or no arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # UnicodeEncodeError is a ValueError: half of a surrogate pair
    return WrittenCall(name, text, identity)


def _quoted(text: str, quote: str) -> str:
    """Gemma's notation as JSON."""
    parts = text.split(quote)
    parts[::2] = [re.sub(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:', r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return "".join(parts)


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Tool]) -> WrittenCall:
    """Values that the tool's schema does not declare as texts are JSON, where they parse."""
    schemas = dict(_schemas(name, tools))
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        types, value = _types(schemas.get(key)), _PYTHON.get(text.strip(), text)
        arguments[key] = text
        if "string" not in types or ("null" in types and value == "null"):
            with contextlib.suppress(ValueError, RecursionError):
                arguments[key] = json.loads(value)
    return _call(name, arguments)


_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as some templates write them


def _schemas(name: str, tools: Sequence[Tool]) -> Iterator[tuple[str, Any]]:
    """Each argument of a tool with its schema, which may have any form."""
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = (tool["function"].get("parameters") or {}).get("properties")
            yield from properties.items() if isinstance(properties, Mapping) else ()


def _types(schema: Any) -> set[str]:
    """JSON types that a schema allows, as far as it says."""
    if not isinstance(schema, Mapping):
        return set()
    types, values = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else [])
    found = {str(one) for one in (types if isinstance(types, list) else [types])}
    if isinstance(values, list):
        found |= {"string" for value in values if isinstance(value, str)}
    choices = [schema.get("anyOf"), schema.get("oneOf"), schema.get("allOf")]
    return found.union(*(_types(one) for some in choices if isinstance(some, list) for one in some))
