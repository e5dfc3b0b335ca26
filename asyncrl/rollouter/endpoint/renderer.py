"""Renders conversations to token ids with the checkpoint's own chat template, and parses what the policy wrote.

Only a first call is rendered whole. A later one continues the very tokens that the engine had: earlier prompt, sampled
tokens, then the *bridge*, the tokens of what the template adds after the answer. The bridge is trusted only where the
template renders the earlier conversation as before, and the answer as it was sampled; else the caller gets a reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import xxhash

from asyncrl.rollouter.endpoint.calls import BadRequest
from asyncrl.rollouter.endpoint.tool_formats import (
    PROBE,
    PROBE_ARGUMENTS,
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


@dataclass(frozen=True)
class RenderedText:
    """A prompt as text: its length, a digest, and whether it ends inside an assistant's reasoning."""

    length: int
    digest: int
    opens_reasoning: bool

    @classmethod
    def of(cls, text: str) -> RenderedText:
        return cls(len(text), xxhash.xxh3_64_intdigest(text.encode()), text.rstrip().endswith(THINK))

    def begins(self, text: str) -> bool:
        return len(text) >= self.length and xxhash.xxh3_64_intdigest(text[: self.length].encode()) == self.digest


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

    def encode(self, text: str) -> np.ndarray:
        """int32 [T] ids of a text with its special tokens spelt out."""
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

    def render(self, conversation: Conversation) -> str:
        """The conversation as text, with a generation prompt."""
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
        self, before: RenderedText, sampled: np.ndarray, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> np.ndarray:
        """int32 [B] tokens between the ``sampled`` tokens of an earlier call and the next ones to sample.

        ``before``: the earlier call's prompt. ``text``: the rendered conversation, in which the message that answered
        that call is followed by others and the generation prompt. Raises NoBridge."""
        stop = int(sampled[-1]) if len(sampled) else -1
        if stop not in self._stops:
            raise NoBridge("no_stop_token")
        if not before.begins(text):
            raise NoBridge("history_rewritten")
        # the token that ended the answer ends its message in the template, or begins the next one
        end, opened = self._stops[stop], before.opens_reasoning
        answer, found, rest = text[before.length :].partition(end)
        written = self.text_of(sampled)
        if not found or any(text in answer and text not in written for text in self._special):
            raise NoBridge("no_bridge")  # ``end`` belongs to something behind the answer
        if _meaning(self.parse(answer, opened, tools)) != _meaning(self.parse(written, opened, tools)):
            raise NoBridge("answer_rewritten")  # such as by a template that strips earlier reasoning
        tokens = self.encode(end + rest)
        if not len(tokens) or tokens[0] != stop:
            raise NoBridge("no_bridge")
        return tokens[1:]

    def _find_tool_format(self) -> ToolFormat | None:
        function = {"name": PROBE["function"]["name"], "arguments": json.dumps(PROBE_ARGUMENTS)}
        call = {"id": "call00001", "type": "function", "function": function}
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


def message_key(message: Message) -> str:
    """Equal for messages that say the same, however a client serialises them, and whether or not it keeps reasoning and
    the ids of tool calls."""
    calls = [_call_key(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return f"{message['role']}\0{message.get('content') or ''}\0{calls or ''}\0"


def _call_key(name: str, arguments: str) -> tuple[str, Any]:
    try:
        return name, json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
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
    except ValueError:
        return text
