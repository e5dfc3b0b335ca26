"""The calls of one sample, and which of their tokens belong together: decided by tokens, not by messages.

A call's prompt continues an earlier call if it begins with that call's prompt and sampled tokens. Prompts of messages
are made so where the renderer finds a bridge; else they are rendered whole, and begin a sequence of their own, in which
earlier answers are only read. Each path from a first call to a last one is a sequence of the sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import xxhash

from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.provenance import tokens_digest
from asyncrl.rollouter.endpoint.calls import Answer, Call
from asyncrl.rollouter.endpoint.renderer import ChatRenderer, Conversation, NoBridge, RenderedText, message_key
from asyncrl.types.prompts import Message


class CallPrompt(NamedTuple):
    """Prompt of a call: ``tokens`` int32 [P], how it was made (``bridged``, ``rendered``: whole, ``branched``: whole
    though the conversation goes on, ``given``: token ids or raw text), and why it is branched. ``rendered``: its text,
    for messages."""

    tokens: np.ndarray
    how: str
    reason: str = ""
    rendered: RenderedText | None = None
    messages: Sequence[Message] = ()


@dataclass(eq=False)
class Turn:
    """A call that was answered. ``number`` counts the sample's calls. ``trained``: its tokens may be trained;
    ``delivered``: the client has got the answer; ``repeated``: it had given up, made the call again, and got that
    answer."""

    number: int
    call: Call
    prompt: CallPrompt
    completion: Completion
    answer: Answer
    trained: bool
    delivered: bool = False
    repeated: bool = False
    parent: Turn | None = None
    children: list[Turn] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt.tokens) + len(self.answer.tokens)


#: One sequence of a sample: numbers of calls, whose sampled tokens it has, and int32 [T] tokens that it reads.
SequencePlan = list[int | np.ndarray]


class Turns:
    """Turns of a sample. ``prompt_of`` a call, then ``add`` its turn once it is answered."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self.all: list[Turn] = []
        self._by_messages: dict[int, list[Turn]] = {}  # by digest of tools, messages and answer
        self._by_id: dict[str, Turn] = {}

    def with_tools(self, call: Call) -> Call:
        """The call with the tools that it keeps. Raises KeyError as `prompt_of`."""
        if call.previous is None or not call.keeps_tools:
            return call
        return replace(call, tools=self._by_id[call.previous].call.tools)

    def prompt_of(self, call: Call) -> CallPrompt:
        """Raises BadRequest for a prompt that is empty or outside the vocabulary, and for messages or tools that the
        chat template refuses; KeyError for a ``previous`` answer that this sample does not have."""
        if call.messages is None:
            return CallPrompt(self._renderer.given(call.text, call.tokens), "given")
        messages = self._messages(call)
        conversation = Conversation(messages, call.tools, call.template_args)
        text = self._renderer.render(conversation)
        rendered = RenderedText.of(text)
        bridged: dict[int, np.ndarray] = {}
        reason = "new_conversation"
        for parent in self._parents(conversation):
            assert parent.prompt.rendered is not None
            earlier = parent.prompt.tokens, parent.answer.tokens
            try:
                bridge = self._renderer.bridge(parent.prompt.rendered, earlier[1], text, conversation.tools)
            except NoBridge as e:
                reason = str(e)
                continue
            tokens = np.concatenate([*earlier, bridge])
            bridged[tokens_digest(tokens)] = tokens
        if len(bridged) == 1:
            return CallPrompt(next(iter(bridged.values())), "bridged", "", rendered, messages)
        whole = self._renderer.encode(text)
        if self._token_parent(whole) is not None:  # rendered again, it is what the engine had
            return CallPrompt(whole, "bridged", "", rendered, messages)
        same = next((turn.prompt for turn in self.all if np.array_equal(turn.prompt.tokens, whole)), None)
        if same is not None:  # such as one of the best of n
            return CallPrompt(whole, same.how, same.reason, rendered, messages)
        if all(turn.call.messages is None for turn in self.all):
            return CallPrompt(whole, "rendered", "", rendered, messages)
        return CallPrompt(whole, "branched", "ambiguous_parent" if bridged else reason, rendered, messages)

    def add(self, turn: Turn) -> None:
        turn.parent = self._token_parent(turn.prompt.tokens)
        if turn.parent is not None:
            turn.parent.children.append(turn)
        self.all.append(turn)
        self._by_id[turn.answer.id] = turn
        if turn.prompt.rendered is not None:
            messages, call = [*turn.prompt.messages, as_message(turn.answer)], turn.call
            *_, digest = _digests(Conversation(messages, call.tools, call.template_args))
            self._by_messages.setdefault(digest, []).append(turn)

    def phantoms(self) -> list[Turn]:
        """Answers that never reached their client, which made the call again and went on with that answer."""
        return [turn for turn in self.all if turn.repeated and not (turn.delivered or turn.children)]

    def sequences(self) -> list[SequencePlan]:
        """In an order that does not depend on timing, except that the one with the last answer comes last."""
        phantoms = {id(turn) for turn in self.phantoms()}
        kept = [turn for turn in self.all if id(turn) not in phantoms]
        if not kept:
            return []
        last = kept[-1]
        leaves = [turn for turn in kept if not any(id(child) not in phantoms for child in turn.children)]
        leaves.sort(key=lambda leaf: (last in _path(leaf), [_place(turn) for turn in _path(leaf)]))
        return [_parts(_path(leaf)) for leaf in leaves]

    def _messages(self, call: Call) -> list[Message]:
        assert call.messages is not None
        earlier: list[Message] = []
        if call.previous is not None:
            turn = self._by_id[call.previous]
            earlier = [*turn.prompt.messages, as_message(turn.answer)]
            if turn.call.instructions is not None:
                earlier = earlier[1:]
        instructions: list[Message] = []
        if call.instructions is not None:
            instructions = [{"role": "system", "content": call.instructions}]
        return [*instructions, *earlier, *call.messages]

    def _parents(self, conversation: Conversation) -> list[Turn]:
        """Turns whose messages and answer the conversation begins with, as many messages as possible."""
        digests = list(_digests(conversation))
        for place in range(len(digests) - 2, -1, -1):  # something follows the answer
            if conversation.messages[place]["role"] == "assistant" and (found := self._by_messages.get(digests[place])):
                return found
        return []

    def _token_parent(self, tokens: np.ndarray) -> Turn | None:
        """The turn with the longest prompt and answer that ``tokens`` begin with."""
        for turn in sorted(self.all, key=lambda turn: (-turn.end, turn.number)):
            start = len(turn.prompt.tokens)
            if (
                turn.end <= len(tokens)
                and np.array_equal(tokens[start : turn.end], turn.answer.tokens)
                and np.array_equal(tokens[:start], turn.prompt.tokens)
            ):
                return turn
        return None


def as_message(answer: Answer) -> Message:
    """The assistant's message in a conversation that goes on."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message


def _digests(conversation: Conversation) -> Iterator[int]:
    """Of tools, template arguments and messages up to each of them."""
    digest = xxhash.xxh3_64(repr((list(conversation.tools), dict(conversation.template_args))).encode())
    for message in conversation.messages:
        digest.update(message_key(message).encode())
        yield digest.intdigest()


def _path(leaf: Turn) -> list[Turn]:
    """From the first turn of its sequence to the leaf."""
    path = [leaf]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _place(turn: Turn) -> tuple[int, int]:
    """Orders turns by their tokens, not by time."""
    return tokens_digest(turn.prompt.tokens), tokens_digest(turn.answer.tokens)


def _parts(path: Sequence[Turn]) -> SequencePlan:
    parts: SequencePlan = []
    at = 0
    for turn in path:
        parts.append(turn.prompt.tokens[at:])
        parts.append(turn.number if turn.trained else turn.answer.tokens)
        at = turn.end
    return parts
