"""How an answer begins that must call a tool: found by rendering calls with the checkpoint's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product, takewhile
from typing import Any

from asyncrl.rollouter.endpoint.calls import BadRequest
from asyncrl.rollouter.endpoint.rendering.template_style import USER, TemplateStyle, rendered, until
from asyncrl.rollouter.endpoint.rendering.tool_formats import PROBE, ToolFormat, split_reasoning
from asyncrl.types.prompts import Message

NAMES = ("one_tool", "yet_another")  # with no common beginning, as the rest of what calls differ in
ARGUMENTS: tuple[dict[str, Any], ...] = ({"count": 3}, {"text": "x"}, {})


def forced_tools(choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the tools of which a choice (``required`` or a function) demands a call. Raises BadRequest."""
    offered = tuple(tool["function"]["name"] for tool in tools)
    if not offered:
        raise BadRequest(f"tool_choice: expected tools to choose from, found none beside {choice!r:.80}", "tool_choice")
    if isinstance(choice, str):
        return offered
    if (name := choice["function"]["name"]) not in offered:
        raise BadRequest(f"tool_choice: expected one of {', '.join(offered):.200}, found {name!r:.80}", "tool_choice")
    return (name,)


def beginning(hf: Any, style: TemplateStyle, stops: Sequence[str], names: Sequence[str]) -> str | None:
    """Text with which an answer begins that calls one of the tools ``names``: up to the arguments if there is one, up
    to the name if there are several. None: the template's calls have no such beginning."""
    if style.tool_format is None:
        return None
    called = names if len(set(names)) == 1 else NAMES
    texts: list[str] = []
    for name, arguments, id in product(dict.fromkeys(called), ARGUMENTS, style.ids):
        text, tool = _call_text(hf, style, stops, name, arguments, id.format(name=name))
        _, written = style.tool_format.parse(text, [tool])
        if [(call.name, json.loads(call.arguments)) for call in written] == [(name, arguments)]:
            texts.append(text)
        elif arguments:  # some templates leave out empty ones
            return None
    found = _before_arguments(_common(texts), style.tool_format)
    if called is not NAMES:
        other, _ = _call_text(hf, style, stops, next(name for name in NAMES if name not in called), {}, style.ids[0])
        if other.startswith(found):
            return None  # the arguments come before the name
    return found.rstrip(" ") or None  # tokens begin with spaces


def _call_text(
    hf: Any, style: TemplateStyle, stops: Sequence[str], name: str, arguments: Mapping[str, Any], id: str
) -> tuple[str, Mapping[str, Any]]:
    """An answer that calls a tool, without reasoning, and the tool. Empty if its beginning is not found."""
    tool = {"type": "function", "function": {**PROBE["function"], "name": name}}
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    answer: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    before, prompt = (rendered(hf, style, [USER], [tool], prompts) for prompts in (False, True))
    opening = prompt[len(before) :]
    if style.tags is not None:
        opening = opening.partition(style.tags[0])[0]
    whole = rendered(hf, style, [USER, answer], [tool])
    if not before or not whole.startswith(before + opening):
        return "", tool
    text = until(whole[len(before + opening) :], stops)
    return split_reasoning(text, False, style.tags)[1] if style.tags else text, tool


def _before_arguments(text: str, format: ToolFormat) -> str:
    """Without that with which arguments begin, unless it ends the name."""
    begins = format.keys[0] if format.keys else '{"'
    if format.name_end == begins[:1]:
        return text
    ends = (begins[:length] for length in range(len(begins), 0, -1))
    return text.removesuffix(next((end for end in ends if text.endswith(end)), ""))


def _common(texts: Sequence[str]) -> str:
    """What all of them begin with."""
    pairs = zip(min(texts), max(texts), strict=False)
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
