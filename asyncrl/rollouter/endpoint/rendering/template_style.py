"""How a checkpoint's chat template takes an assistant's messages and writes them, found by rendering examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile
from typing import Any

from asyncrl.rollouter.endpoint.rendering.tool_formats import (
    PROBE,
    PROBE_CALL,
    REASONING_TAGS,
    ReasoningTags,
    ToolFormat,
    fitting_format,
    split_reasoning,
)
from asyncrl.rollouter.tokenizer import chat_text
from asyncrl.types.prompts import Message

USER: Message = {"role": "user", "content": "probe"}
CONTENT, REASONING = "probed answer", "probed reasoning"
#: Two of each form: as Mistral's templates demand, and as Kimi's write.
IDS = (("call00001", "made00002"), ("functions.{name}:0", "functions.{name}:1"))


@dataclass(frozen=True)
class TemplateStyle:
    """``tool_format`` None: no known format parses the template's tool calls. ``tags`` None: it knows no reasoning.
    ``before`` and ``after`` surround the content of a plain answer. ``ids``: two of a call of the tool ``{name}``.

    Messages must have: ``arguments_as_text``, else as objects; ``no_content``, where there are only tool calls; their
    reasoning as ``reasoning_key``, which may be ``content``: before the content, in tags; and not ``both`` reasoning
    and content, where there are tool calls, if it is False."""

    tool_format: ToolFormat | None = None
    tags: ReasoningTags | None = None
    before: str = ""
    after: str = ""
    ids: tuple[str, str] = IDS[0]
    arguments_as_text: bool = False
    no_content: str | None = ""
    reasoning_key: str = "reasoning_content"
    both: bool = True

    def message(self, message: Message) -> Message:
        """A message of a call in the template's form."""
        made = {**message, "content": message.get("content") or ""}
        if calls := message.get("tool_calls"):
            keeps = self.both or not made.get("reasoning_content")
            made["content"] = (made["content"] if keeps else "") or self.no_content
            if not self.arguments_as_text:
                made["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
                    for call in calls
                ]
        if (reasoning := made.pop("reasoning_content", None)) and self.tags and self.reasoning_key == "content":
            made["content"] = f"{self.tags[0]}\n{reasoning}\n{self.tags[1]}\n\n{made['content'] or ''}"
        elif reasoning:
            made[self.reasoning_key] = reasoning
        return made


def style_of(hf: Any, stops: Sequence[str]) -> TemplateStyle:
    """The style of a tokenizer's chat template. ``stops``: texts of the tokens that end an answer."""
    template = str(hf.chat_template or "")
    style = TemplateStyle(tags=next((tags for tags in REASONING_TAGS if tags[0] in template), None))
    style = _with_tool_format(hf, stops, style)
    style = replace(style, reasoning_key=_reasoning_key(hf, style))
    before, after = _around_content(hf, stops, style)
    said = {**_calling(1), "content": CONTENT, "reasoning_content": REASONING}
    both = bool(rendered(hf, style, [USER, said], [PROBE]))
    return replace(style, before=before, after=after, both=both)


def _with_tool_format(hf: Any, stops: Sequence[str], style: TemplateStyle) -> TemplateStyle:
    """Of the forms of a message in which its calls are found, that which the template renders with the least beside."""
    prompts = [rendered(hf, style, [USER], [PROBE], prompts) for prompts in (True, False)]
    for count in (2, 1):
        fitting: list[tuple[int, TemplateStyle]] = []
        for as_text, no_content, ids in product((False, True), ("", None), IDS):
            tried = replace(style, arguments_as_text=as_text, no_content=no_content, ids=ids)
            whole = rendered(hf, tried, [USER, _calling(count, ids)], [PROBE])
            for prompt in prompts:  # a generation prompt may begin with what the answer lacks, such as <think>
                equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole)))
                answer = until(whole[equal:], stops)
                _, answer = split_reasoning(answer, False, style.tags) if style.tags else (None, answer)
                if (found := fitting_format(answer, count)) is not None:
                    found = replace(found, most=found.most if count > 1 else 1)
                    fitting.append((len(whole), replace(tried, tool_format=found)))
                    break
        if fitting:
            return min(fitting, key=lambda pair: pair[0])[1]
    return style


def _reasoning_key(hf: Any, style: TemplateStyle) -> str:
    """Where the template looks for reasoning, in a message with or without tool calls."""
    plain: Message = {"role": "assistant", "content": CONTENT}
    answers = [(plain, []), *([(_calling(1), [PROBE])] if style.tool_format else [])]
    for key, (answer, tools) in product(("reasoning_content", "reasoning", "thinking"), answers):
        tried = replace(style, reasoning_key=key)
        if REASONING in _written(hf, tried, [{**answer, "reasoning_content": REASONING}], tools):
            return key
    if style.tags is not None and style.tags[0] not in _written(hf, style, [plain]):
        tried = replace(style, reasoning_key="content")
        kept = REASONING in _written(hf, tried, [{**plain, "reasoning_content": REASONING}])
        return "content" if kept else style.reasoning_key
    return style.reasoning_key


def _around_content(hf: Any, stops: Sequence[str], style: TemplateStyle) -> tuple[str, str]:
    """What an earlier answer has before and after its content, beside reasoning: gpt-oss's channel, Command's marks."""
    without, prompt = (rendered(hf, style, [USER], prompts=prompts) for prompts in (False, True))
    written = _written(hf, style, [{"role": "assistant", "content": CONTENT}, USER])
    before, _, rest = written.partition(CONTENT)
    opening, after = prompt[len(without) :], until(rest, stops)
    if style.tags:
        opening = opening.partition(style.tags[0])[0]
    if style.tags and style.tags[1] in before:
        before = before.rpartition(style.tags[1])[2]
    else:
        before = before[len(opening) :] if before.startswith(opening) else ""
    return before if before.strip() else "", after if after.strip() and after != rest else ""


def _written(hf: Any, style: TemplateStyle, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
    """What the template renders of messages after `USER`."""
    prompt, whole = rendered(hf, style, [USER], tools), rendered(hf, style, [USER, *messages], tools)
    return whole[len(prompt) :] if whole.startswith(prompt) else ""


def _calling(count: int, ids: tuple[str, str] = IDS[0]) -> Message:
    call = {"id": ids[0].format(name=PROBE_CALL["name"]), "type": "function", "function": PROBE_CALL}
    return {"role": "assistant", "content": None, "tool_calls": [call] * count}


def rendered(
    hf: Any, style: TemplateStyle, messages: Sequence[Message], tools: Sequence[Any] = (), prompts: bool = False
) -> str:
    """Empty if the template refuses them."""
    try:
        return chat_text(hf, [style.message(message) for message in messages], tools, prompts)
    except Exception:  # templates raise what they like
        return ""


def until(text: str, ends: Sequence[str]) -> str:
    for end in filter(None, ends):
        text = text.partition(end)[0]
    return text


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
