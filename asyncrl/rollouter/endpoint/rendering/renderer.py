"""Renders conversations to token ids with the checkpoint's own chat template, and parses what the policy wrote.

Only a first call is rendered whole. A later one continues the very tokens that the engine had: earlier prompt, sampled
tokens, then the *bridge*, the tokens of what the template adds after the answer. The bridge is trusted only where the
template renders the earlier conversation as before, and the answer as it was sampled; else the caller gets a reason.

What a template adds depends on a few messages before it, in all that are known to us. So a bridge is rendered with
these alone, in a time that does not grow with the conversation, where probes show that the whole gives the same.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from asyncrl.rollouter.endpoint.calls import BadRequest, Call
from asyncrl.rollouter.endpoint.rendering.forced_calls import beginning, forced_tools
from asyncrl.rollouter.endpoint.rendering.nearest import is_local, nearest
from asyncrl.rollouter.endpoint.rendering.template_style import style_of
from asyncrl.rollouter.endpoint.rendering.tool_formats import WrittenCall, split_reasoning
from asyncrl.rollouter.tokenizer import PromptTokenizer, chat_text
from asyncrl.types.prompts import Message


@dataclass(frozen=True)
class Conversation:
    """What a chat template renders."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    template_args: Mapping[str, Any]


class Rendered(NamedTuple):
    """int32 [T] tokens, and whether they end inside an assistant's reasoning, but for the text ``begun`` at their end:
    the beginning of the answer, which was written for the policy."""

    tokens: np.ndarray
    opens_reasoning: bool
    begun: str = ""


@dataclass(frozen=True)
class Written:
    """An assistant's message in parts."""

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
        # of the rendering itself: an agent's own template could take for ever, or all memory
        self._reserved = inspect.signature(self._hf.apply_chat_template).parameters.keys() - {"documents"}
        self._stops = {token: str(self._hf.decode([token])) for token in tokenizer.stop_token_ids}
        added = [token.content for token in self._hf.added_tokens_decoder.values() if token.special]
        self._special = list(dict.fromkeys([*added, *self._stops.values()]))  # texts
        self._style = style_of(self._hf, list(self._stops.values()))
        self._beginning = lru_cache(256)(partial(beginning, self._hf, self._style, list(self._stops.values())))
        self._is_local = is_local(self._added, self._style.tags, self._style.tool_format is not None)

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
        if not self.in_vocabulary(found):
            raise BadRequest("prompt: expected token ids of the model's vocabulary, found others", "prompt")
        return found.astype(np.int32)

    def in_vocabulary(self, tokens: np.ndarray) -> bool:
        return self._tokenizer.in_vocabulary(tokens)

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
        return Rendered(self.encode(text), self._opens_reasoning(text))

    def begin(self, prompt: Rendered, call: Call, plain: bool) -> Rendered:
        """The prompt of a call, with the beginning of its answer where the policy has no choice of that: a tool call
        that is forced, or the content of a ``plain`` answer. Reasoning is closed before. Raises BadRequest."""
        choice, tags, begun = call.sampling.get("tool_choice"), self._style.tags, ""
        if choice is not None:
            found = self._beginning(forced_tools(choice, call.tools))
            if found is None:
                raise BadRequest(
                    "tool_choice: expected auto; no beginning is known that all tool calls of this model's chat "
                    f"template have, found {choice!r:.80}",
                    "tool_choice",
                )
            begun = found
        elif plain:
            begun = self._style.before
        if (choice or plain) and prompt.opens_reasoning and tags is not None:
            begun = f"\n{tags[1]}\n\n{begun}"
        return Rendered(np.concatenate([prompt.tokens, self.encode(begun)]), prompt.opens_reasoning, begun)

    def _text(self, conversation: Conversation) -> str:
        messages = [self._style.message(message) for message in conversation.messages]
        calls_tools = any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        if (conversation.tools or calls_tools) and self._style.tool_format is None:
            raise BadRequest(
                "tools: nothing parses the tool calls of this model's chat template; expected messages without tools",
                "tools",
            )
        if taken := sorted(self._reserved & conversation.template_args.keys()):
            where = f"chat_template_kwargs.{taken[0]}"
            raise BadRequest(f"{where}: expected a variable of the chat template, found an option of rendering", where)
        try:
            return chat_text(self._hf, messages, conversation.tools, variables=conversation.template_args)
        except Exception as e:  # templates raise what they like
            raise BadRequest(f"messages: the model's chat template refuses them ({e})", "messages") from None

    def parse(self, text: str, opened: bool, tools: Sequence[Mapping[str, Any]]) -> Written:
        """The parts of an assistant's text. ``opened``: its prompt ended inside the reasoning."""
        style, reasoning = self._style, None
        if style.tags is not None:
            reasoning, text = split_reasoning(text, opened, style.tags)
        text = text.removeprefix(style.before).removesuffix(style.after)
        calls: list[WrittenCall] = []
        if tools and style.tool_format is not None:
            text, calls = style.tool_format.parse(text, tools)
        return Written(text, reasoning, tuple(calls))

    def bridge(
        self,
        conversation: Conversation,
        place: int,
        sampled: np.ndarray,
        before: Sequence[Message] | None = None,
        begun: str = "",
    ) -> Rendered:
        """The tokens between the ``sampled`` ones of an earlier call and the next ones to sample.

        ``place``: of the message that answered that call; others follow it. ``before``: the messages of that call, if
        they are not the very ones before ``place``. ``begun``: of its `Rendered`. Raises NoBridge."""
        stop = int(sampled[-1]) if len(sampled) else -1
        if stop not in self._stops:
            raise NoBridge("no_stop_token")
        prompt, text = self._prompt_and_text(conversation, place, before)
        if not text.startswith(prompt):  # some templates write empty reasoning only for the answer that is due
            prompt = self._without_empty_reasoning(prompt)
        if not text.startswith(prompt):
            raise NoBridge("history_rewritten")
        # the token that ended the answer ends its message in the template, or begins the next one
        end, opened = self._stops[stop], self._opens_reasoning(prompt)
        if not end:
            raise NoBridge("no_bridge")
        answer, found, rest = text[len(prompt) :].partition(end)
        written = begun + self.text_of(sampled)
        if not found or any(special in answer and special not in written for special in self._special):
            raise NoBridge("no_bridge")  # ``end`` belongs to something behind the answer
        if answer != written:
            of_answer, of_written = (self.parse(found, opened, conversation.tools) for found in (answer, written))
            if _meaning(of_answer) != _meaning(of_written):
                raise NoBridge("answer_rewritten")  # such as by a template that strips earlier reasoning
        tokens = self.encode(end + rest)
        if not len(tokens) or tokens[0] != stop:
            raise NoBridge("no_bridge")
        return Rendered(tokens[1:], self._opens_reasoning(text))

    def _prompt_and_text(
        self, conversation: Conversation, place: int, before: Sequence[Message] | None
    ) -> tuple[str, str]:
        """Two texts that show what follows the prompt of ``before``, see `bridge`."""
        earlier, added = conversation.messages[:place], conversation.messages[place:]
        if before is None and self._is_local:
            near = nearest(earlier, added, self._style.tags)
            with contextlib.suppress(BadRequest):  # in a conversation of another kind than the examples
                prompt, text = (self._text(replace(conversation, messages=m)) for m in (near, [*near, *added]))
                return prompt, text
        return self._text(replace(conversation, messages=before or earlier)), self._text(conversation)

    def _added(
        self, earlier: Sequence[Message], added: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> str | None:
        """What the template adds for further messages; None if it refuses them, "" if it rewrites the earlier ones."""
        try:
            prompt, text = (self._text(Conversation(m, tools, {})) for m in (earlier, [*earlier, *added]))
        except BadRequest:
            return None
        return text[len(prompt) :] if text.startswith(prompt) else ""

    def _opens_reasoning(self, prompt: str) -> bool:
        return self._style.tags is not None and prompt.rstrip().endswith(self._style.tags[0])

    def _without_empty_reasoning(self, prompt: str) -> str:
        if self._style.tags is None:
            return prompt
        begin, end = self._style.tags
        before, _, reasoning = prompt.rpartition(begin)
        return before if reasoning.strip() == end else prompt


def message_keys(message: Message) -> tuple[str, str]:
    """Equal for messages that say the same, however a client serialises them: the first whether or not it keeps
    reasoning and the ids of tool calls, and the other what the first leaves out."""
    content, left_out = message.get("content") or "", message.get("reasoning_content") or ""
    said = f"{message['role']} {len(content)} {content}"  # no content looks like the next message
    if calls := message.get("tool_calls"):
        said += f"{[_call_key(call['function']['name'], call['function']['arguments']) for call in calls]}"
        left_out += f"\0{[call['id'] for call in calls]}"
    if identity := message.get("tool_call_id"):
        left_out += f"\0{identity}\0{message.get('name')}"
    return said, left_out


def _call_key(name: str, arguments: str) -> tuple[str, Any]:
    try:
        return name, json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return name, arguments


def _meaning(written: Written) -> tuple[Any, ...]:
    calls = tuple(_call_key(call.name, call.arguments) for call in written.tool_calls)
    return written.content.strip(), (written.reasoning or "").strip(), calls
