"""Renders conversations to token ids with the checkpoint's own chat template, and parses what the policy wrote.

Only a first call is rendered whole. A later one continues the very tokens that the engine had: earlier prompt, sampled
tokens, then the *bridge*, the tokens of what the template adds after the answer. The bridge is trusted only where the
template renders the earlier conversation as before, and the answer as it was sampled; else the caller gets a reason.

What a template adds depends on a few messages before it, in all that are known to us. So a bridge is rendered with
these alone, in a time that does not grow with the conversation, where probes show that the whole gives the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from asyncrl.rollouter.endpoint.calls import BadRequest
from asyncrl.rollouter.endpoint.tool_formats import (
    END_OF_THINKING,
    PROBE,
    PROBE_CALL,
    THINK,
    ToolFormat,
    WrittenCall,
    fitting_format,
    split_reasoning,
)
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.types.prompts import Message


@dataclass(frozen=True)
class Conversation:
    """What a chat template renders."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    template_args: Mapping[str, Any]


class Rendered(NamedTuple):
    """int32 [T] tokens, and whether they end inside an assistant's reasoning."""

    tokens: np.ndarray
    opens_reasoning: bool


@dataclass(frozen=True)
class Written:
    """An assistant's message in parts. ``tool_calls`` lack ids, which no model writes."""

    content: str
    reasoning: str | None
    tool_calls: tuple[WrittenCall, ...]


class NoBridge(Exception):
    """The new messages cannot continue the sampled tokens; the message is the reason, a metric's name."""


class ChatRenderer:
    """Raises BadRequest for conversations that the chat template refuses, and for tools if no format is known that
    parses the template's tool calls."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer, self._hf = tokenizer, tokenizer.hf
        self._stops = {token: str(self._hf.decode([token])) for token in tokenizer.stop_token_ids}
        added = [token.content for token in self._hf.added_tokens_decoder.values() if token.special]
        self._special = list(dict.fromkeys([*added, *self._stops.values()]))  # texts
        self._reasons = THINK in str(self._hf.chat_template or "")
        self._tool_format = self._find_tool_format()
        self._is_local = all(self._agrees_on(messages) for messages in _probes(self._tool_format is not None))

    def encode(self, text: str) -> np.ndarray:
        """int32 [T] ids of a text with its special tokens spelt out. Raises UnicodeEncodeError."""
        text.encode()  # a tokenizer has no name for half of a surrogate pair
        return np.asarray(self._hf.encode(text, add_special_tokens=False), np.int32)

    def given(self, text: str | None, tokens: Sequence[int] | None) -> np.ndarray:
        """int32 [P] ids of a prompt that is no conversation: of a text, with the special tokens that the tokenizer adds
        to it, such as BOS; or as they are. Raises BadRequest."""
        ids = self._hf.encode(text, add_special_tokens=True) if tokens is None else tokens
        if not ids:
            raise BadRequest("prompt: expected at least one token, found none", "prompt")
        found = np.asarray(ids, np.int64)
        if not self._tokenizer.in_vocabulary(found):
            raise BadRequest("prompt: expected token ids of the model's vocabulary, found others", "prompt")
        return found.astype(np.int32)

    def text_of(self, tokens: np.ndarray) -> str:
        """Sampled tokens as text, special ones included, without the stop token at their end."""
        ids = tokens.tolist()
        if ids and ids[-1] in self._stops:
            ids = ids[:-1]
        return str(self._hf.decode(ids, skip_special_tokens=False))

    def token_texts(self, tokens: np.ndarray) -> list[str]:
        return [str(text) for text in self._hf.batch_decode([[token] for token in tokens.tolist()])]

    def render(self, conversation: Conversation) -> Rendered:
        """The whole conversation, with a generation prompt."""
        text = self._text(conversation)
        return Rendered(self.encode(text), _opens_reasoning(text))

    def _text(self, conversation: Conversation) -> str:
        messages = [_for_template(message) for message in conversation.messages]
        calls_tools = any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        if (conversation.tools or calls_tools) and self._tool_format is None:
            raise BadRequest(
                "tools: nothing parses the tool calls of this model's chat template; expected messages without tools",
                "tools",
            )
        try:
            return str(
                self._hf.apply_chat_template(
                    messages,
                    tools=list(conversation.tools) or None,
                    tokenize=False,
                    add_generation_prompt=True,
                    **conversation.template_args,
                )
            )
        except Exception as e:  # templates raise what they like
            raise BadRequest(f"messages: the model's chat template refuses them ({e})", "messages") from None

    def parse(self, text: str, opened: bool, tools: Sequence[Mapping[str, Any]]) -> Written:
        """The parts of an assistant's text. ``opened``: its prompt ended inside the reasoning."""
        reasoning = None
        if self._reasons:
            reasoning, text = split_reasoning(text, opened)
        calls: list[WrittenCall] = []
        if tools and self._tool_format is not None:
            text, calls = self._tool_format(text, tools)
        return Written(text, reasoning, tuple(calls))

    def bridge(
        self, conversation: Conversation, place: int, sampled: np.ndarray, before: Sequence[Message] | None = None
    ) -> Rendered:
        """The tokens between the ``sampled`` ones of an earlier call and the next ones to sample.

        ``place``: of the message that answered that call; others follow it. ``before``: the messages of that call, if
        they are not the very ones before ``place``. Raises NoBridge."""
        stop = int(sampled[-1]) if len(sampled) else -1
        if stop not in self._stops:
            raise NoBridge("no_stop_token")
        earlier = conversation.messages[:place]
        if before is None and self._is_local and not _may_strip(earlier, conversation.messages[place:]):
            earlier = _nearest(earlier)
        prompt = self._text(replace(conversation, messages=earlier if before is None else before))
        text = self._text(replace(conversation, messages=[*earlier, *conversation.messages[place:]]))
        if not text.startswith(prompt):
            raise NoBridge("history_rewritten")
        # the token that ended the answer ends its message in the template, or begins the next one
        end, opened = self._stops[stop], _opens_reasoning(prompt)
        answer, found, rest = text[len(prompt) :].partition(end)
        written = self.text_of(sampled)
        if not found or any(special in answer and special not in written for special in self._special):
            raise NoBridge("no_bridge")  # ``end`` belongs to something behind the answer
        if answer != written:
            of_answer, of_written = (self.parse(found, opened, conversation.tools) for found in (answer, written))
            if _meaning(of_answer) != _meaning(of_written):
                raise NoBridge("answer_rewritten")  # such as by a template that strips earlier reasoning
        tokens = self.encode(end + rest)
        if not len(tokens) or tokens[0] != stop:
            raise NoBridge("no_bridge")
        return Rendered(tokens[1:], _opens_reasoning(text))

    def _agrees_on(self, messages: Sequence[Message]) -> bool:
        """True if the template adds the same to the `_nearest` of the messages as to all, for each answer of them."""
        tools = [PROBE] if any(message["role"] == "tool" for message in messages) else []
        for place, message in enumerate(messages):
            if message["role"] != "assistant" or _may_strip(messages[:place], messages[place:][:2]):
                continue
            added: list[str | bool | None] = []
            for earlier in (messages[:place], _nearest(messages[:place])):
                try:
                    prompt = self._text(Conversation(earlier, tools, {}))
                    text = self._text(Conversation([*earlier, *messages[place:][:2]], tools, {}))
                    added.append(text.startswith(prompt) and text[len(prompt) :])
                except BadRequest:  # the template knows no such conversation
                    added.append(None)
            if added[0] is not None and added[0] != added[1]:
                return False
        return True

    def _find_tool_format(self) -> ToolFormat | None:
        call = {"id": "call00001", "type": "function", "function": PROBE_CALL}
        messages: list[Message] = [{"role": "user", "content": "probe"}]
        answer: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
        try:
            rendered = [
                self._hf.apply_chat_template(
                    [_for_template(m) for m in turns], tools=[PROBE], tokenize=False, add_generation_prompt=prompts
                )
                for turns, prompts in ((messages, True), (messages, False), ([*messages, answer], False))
            ]
        except Exception:  # the template knows no tools
            return None
        *prompts, whole = map(str, rendered)
        for prompt in prompts:  # a generation prompt may begin with what the answer lacks, such as <think>
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole)))
            if (found := fitting_format(whole[equal:], list(self._stops.values()))) is not None:
                return found
        return None


def _opens_reasoning(prompt: str) -> bool:
    return prompt.rstrip().endswith(THINK)


def _nearest(messages: Sequence[Message]) -> list[Message]:
    """What the rendering of further messages may depend on: the system's, the user's last one, and the last round of
    an assistant's message and what tools returned."""
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return list(messages)
    asked = len(roles) - 1 - roles[::-1].index("user")
    answered = len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles[asked:] else len(roles)
    return [*messages[: min(asked, roles[0] in ("system", "developer"))], messages[asked], *messages[answered:]]


def _may_strip(earlier: Sequence[Message], added: Sequence[Message]) -> bool:
    """True if a template may drop earlier reasoning because a user speaks again."""
    return any(m["role"] == "user" for m in added) and any(
        m.get("reasoning_content") or END_OF_THINKING in (m.get("content") or "") for m in earlier
    )


def _probes(with_tools: bool) -> Iterator[list[Message]]:
    """Conversations on which a template shows what it depends on."""

    def turns(*roles: str) -> list[Message]:
        made: list[Message] = []
        for number, role in enumerate(roles):
            message: Message = {"role": role, "content": f"said {number}"}
            if role == "tool":
                call = {"id": f"call{number:05}", "type": "function", "function": PROBE_CALL}
                made[-1] |= {"content": "", "tool_calls": [call]}
                message["tool_call_id"] = call["id"]
            made.append(message)
        return made

    dialogue = ["user", "assistant"] * 4 + ["user"]
    yield turns(*dialogue)
    yield turns("system", *dialogue)
    if with_tools:
        agent = ["user", *["assistant", "tool"] * 4, "assistant", "user", *["assistant", "tool"] * 3]
        for roles in (agent, ["system", *agent]):
            yield turns(*roles)
            yield [m | {"reasoning_content": "thought"} if m["role"] == "assistant" else m for m in turns(*roles)]


def message_keys(message: Message) -> tuple[str, str]:
    """Equal for messages that say the same, however a client serialises them: the first whether or not it keeps
    reasoning and the ids of tool calls, and the other what the first leaves out."""
    calls = message.get("tool_calls") or ()
    called = [_call_key(c["function"]["name"], c["function"]["arguments"]) for c in calls]
    ids = [c["id"] for c in calls] or message.get("tool_call_id") or ""
    return (
        f"{message['role']}\0{message.get('content') or ''}\0{called or ''}\0",
        f"{message.get('reasoning_content') or ''}\0{ids}\0",
    )


def _call_key(name: str, arguments: str) -> tuple[str, Any]:
    try:
        return name, json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return name, arguments


def _meaning(written: Written) -> tuple[Any, ...]:
    calls = tuple(_call_key(call.name, call.arguments) for call in written.tool_calls)
    return written.content.strip(), (written.reasoning or "").strip(), calls


def _for_template(message: Message) -> Message:
    """As templates expect a message: a text as content, and arguments of tool calls as objects."""
    made = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
            for call in calls
        ]
    return made


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
