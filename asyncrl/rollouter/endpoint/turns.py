"""The calls of one sample, and which of their tokens belong together: decided by tokens, not by messages.

A call's prompt continues an earlier call if it begins with that call's prompt and sampled tokens. Prompts of messages
are made so where the renderer finds a bridge; else they are rendered whole, and begin a sequence of their own, in which
earlier answers are only read. Each path from a first call to a last one is a sequence of the sample.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import xxhash

from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.provenance import tokens_digest
from asyncrl.rollouter.endpoint.calls import Answer, Call
from asyncrl.rollouter.endpoint.rendering.renderer import ChatRenderer, Conversation, NoBridge, message_keys
from asyncrl.rollouter.endpoint.token_path import TokenPath
from asyncrl.types.prompts import Message


class Spoken(NamedTuple):
    """A conversation: that of an earlier turn with its answer, of which no copy is kept, then ``messages``.

    ``said``: digest of its tools, template arguments and messages, but for reasoning and the ids of tool calls;
    ``rest``: of these."""

    before: Turn | None
    messages: Sequence[Message]
    said: xxhash.xxh3_64
    rest: int


class CallPrompt(NamedTuple):
    """Prompt of a call: ``tokens`` (those of ``parent`` and its answer, then others, or whole), ``how`` it was made
    (``bridged``, ``rendered``: whole, ``branched``: whole though the conversation goes on, ``given``: token ids or raw
    text), and why it is branched. For messages: what was ``spoken``, whether the tokens end inside reasoning, and the
    text ``begun`` at their end, see `Rendered`."""

    tokens: TokenPath
    parent: Turn | None
    how: str
    reason: str = ""
    spoken: Spoken | None = None
    opens_reasoning: bool = False
    begun: str = ""


@dataclass(eq=False)
class Turn:
    """A call that was answered. ``number`` counts the sample's calls. ``trained``: its tokens may be trained;
    ``delivered``: the client has got the answer; ``repeated``: it had given up, made the call again, and got that
    answer. ``call`` has no prompt of its own any more."""

    number: int
    call: Call
    prompt: CallPrompt
    completion: Completion
    answer: Answer
    trained: bool
    delivered: bool = False
    repeated: bool = False
    children: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = TokenPath(self.completion.tokens, self.prompt.tokens)  # prompt and answer
        call = replace(self.call, messages=None, text=None, tokens=None, options={})
        if self.prompt.parent is not None:  # whose texts are shared
            earlier = self.prompt.parent.call
            call = replace(
                call,
                tools=earlier.tools if earlier.tools == call.tools else call.tools,
                instructions=earlier.instructions if earlier.instructions == call.instructions else call.instructions,
            )
        self.call = call

    def conversation(self) -> list[Message]:
        """Its messages and its answer; empty for a call without messages."""
        path: list[Turn] = [self]
        while (spoken := path[-1].prompt.spoken) is not None and spoken.before is not None:
            path.append(spoken.before)
        found: list[Message] = []
        for turn in reversed(path):
            if turn.prompt.spoken is not None:
                found += [*turn.prompt.spoken.messages, as_message(turn.answer)]
        return found


#: One sequence of a sample: numbers of calls, whose sampled tokens it has, and int32 [T] tokens that it reads.
SequencePlan = list[int | np.ndarray]


class Turns:
    """Turns of a sample. ``prompt_of`` a call, then ``add`` its turn once it is answered."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self.all: list[Turn] = []
        self._by_messages: dict[int, list[Turn]] = {}  # by digest of tools, messages and answer
        self._by_end: dict[int, dict[int, Turn]] = {}  # the first, by length and digest of prompt and answer
        self._by_prompt: dict[int, CallPrompt] = {}  # likewise of prompts, by their digest
        self._by_id: dict[str, Turn] = {}

    def with_tools(self, call: Call) -> Call:
        """The call with the tools that it keeps. Raises KeyError as `prompt_of`."""
        if call.previous is None or not call.keeps_tools:
            return call
        return replace(call, tools=self._by_id[call.previous].call.tools)

    def prompt_of(self, call: Call, plain: bool = False) -> CallPrompt:
        """``plain``: the answer is content alone, whatever the policy would write. Raises BadRequest for a prompt that
        is empty or outside the vocabulary, for messages or tools that the chat template refuses, and for tool calls
        that cannot be forced; KeyError for a ``previous`` answer that this sample does not have."""
        if call.messages is None:
            whole = self._renderer.given(call.text, call.tokens)
            return CallPrompt(*self._placed(whole), "given")
        messages = self._messages(call)
        conversation = Conversation(messages, call.tools, call.template_args)
        said, saids, rests = _digests(conversation)
        place, parents = self._parents(messages, saids, call.previous)
        bridged: dict[int, CallPrompt] = {}
        reason = "new_conversation"
        for parent in parents:
            assert parent.prompt.spoken is not None
            before = None if parent.prompt.spoken.rest == rests[place - 1] else parent.conversation()[:-1]
            try:
                sampled, begun = parent.completion.tokens, parent.prompt.begun
                bridge = self._renderer.bridge(conversation, place, sampled, before, begun)
            except NoBridge as e:
                reason = str(e)
                continue
            bridge = self._renderer.begin(bridge, call, plain)
            tokens = TokenPath(bridge.tokens, parent.end)
            spoken = Spoken(parent, messages[place + 1 :], said, rests[-1])
            prompt = CallPrompt(tokens, parent, "bridged", "", spoken, *bridge[1:])
            bridged.setdefault(tokens.digest, prompt)
        if len(bridged) == 1:
            return next(iter(bridged.values()))
        rendered = self._renderer.begin(self._renderer.render(conversation), call, plain)
        tokens, whole_parent = self._placed(rendered.tokens)
        how = "branched"
        if whole_parent is not None:  # rendered again, it is what the engine had
            how, reason = "bridged", ""
        elif (same := self._by_prompt.get(tokens.digest)) is not None:  # such as one of the best of n
            how, reason = same.how, same.reason
        elif all(turn.prompt.spoken is None for turn in self.all):
            how, reason = "rendered", ""
        elif bridged:
            reason = "ambiguous_parent"
        spoken = Spoken(None, messages, said, rests[-1])
        return CallPrompt(tokens, whole_parent, how, reason, spoken, *rendered[1:])

    def add(self, turn: Turn) -> None:
        if turn.prompt.parent is not None:
            turn.prompt.parent.children.append(turn)
        self.all.append(turn)
        self._by_id[turn.answer.id] = turn
        self._by_end.setdefault(len(turn.end), {}).setdefault(turn.end.digest, turn)
        self._by_prompt.setdefault(turn.prompt.tokens.digest, turn.prompt)
        if turn.prompt.spoken is not None:
            said = turn.prompt.spoken.said.copy()
            said.update(message_keys(as_message(turn.answer))[0].encode())
            self._by_messages.setdefault(said.intdigest(), []).append(turn)

    def phantoms(self) -> list[Turn]:
        """Answers that never reached their client, which made the call again and went on with that answer."""
        return [turn for turn in self.all if turn.repeated and not (turn.delivered or turn.children)]

    def last(self, delivered: bool) -> Turn | None:
        """The last answer; with ``delivered`` of those that the agent has got, if there are any: others that it had
        given up may have come later."""
        kept = self._kept()
        got = [turn for turn in kept if turn.delivered] if delivered else []
        return next(reversed(got or kept), None)

    def sequences(self, last: Turn | None) -> list[SequencePlan]:
        """In an order that does not depend on timing, except that the one with the ``last`` answer comes last."""
        kept = self._kept()
        ids = set(map(id, kept))
        leaves = [turn for turn in kept if not any(id(child) in ids for child in turn.children)]
        leaves.sort(key=lambda leaf: (last in _path(leaf), [_place(turn) for turn in _path(leaf)]))
        return [_parts(_path(leaf)) for leaf in leaves]

    def _kept(self) -> list[Turn]:
        phantoms = set(map(id, self.phantoms()))
        return [turn for turn in self.all if id(turn) not in phantoms]

    def _messages(self, call: Call) -> list[Message]:
        assert call.messages is not None
        earlier: list[Message] = []
        if call.previous is not None:
            turn = self._by_id[call.previous]
            earlier = turn.conversation()
            if turn.call.instructions is not None:
                earlier = earlier[1:]
        instructions: list[Message] = []
        if call.instructions is not None:
            instructions = [{"role": "system", "content": call.instructions}]
        return [*instructions, *earlier, *call.messages]

    def _parents(
        self, messages: Sequence[Message], saids: dict[int, int], previous: str | None
    ) -> tuple[int, list[Turn]]:
        """Turns whose messages and answer the conversation begins with, as many messages as possible, and the place of
        that answer. Of equal ones those that the caller names, if there are any: by the id of the answer, or by those
        of tool calls."""
        for place, said in reversed(saids.items()):
            if place < len(messages) - 1 and (found := self._by_messages.get(said)):
                named = [turn for turn in found if turn.answer.id == previous]
                if len(found) > 1 and not named:
                    ids = _call_ids(messages[: place + 1])
                    named = [turn for turn in found if _call_ids(turn.conversation()) == ids]
                return place, named or found
        return -1, []

    def _placed(self, tokens: np.ndarray) -> tuple[TokenPath, Turn | None]:
        """A whole prompt after the turn with the longest prompt and answer that it begins with."""
        digest, at = xxhash.xxh3_64(), 0
        parent: Turn | None = None
        for length in sorted(self._by_end):
            if length > len(tokens):
                break
            digest.update(tokens[at:length].data)
            at = length
            parent = self._by_end[length].get(digest.intdigest(), parent)
        if parent is None or not np.array_equal(tokens[: len(parent.end)], parent.end.array()):
            return TokenPath(tokens), None
        return TokenPath(tokens[len(parent.end) :].copy(), parent.end), parent  # a view would hold all of them


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


def _call_ids(messages: Sequence[Message]) -> list[str]:
    return [call["id"] for message in messages for call in message.get("tool_calls") or ()]


def _digests(conversation: Conversation) -> tuple[xxhash.xxh3_64, dict[int, int], list[int]]:
    """`Spoken.said`, its value after each assistant's message, by place, and that of `Spoken.rest` after each
    message."""
    said = xxhash.xxh3_64(json.dumps([conversation.tools, conversation.template_args], sort_keys=True).encode())
    rest = xxhash.xxh3_64()
    saids, rests, value = {}, [], 0
    for place, message in enumerate(conversation.messages):
        text, other = message_keys(message)
        said.update(text.encode())
        if message["role"] == "assistant":
            saids[place] = said.intdigest()
        if other:
            rest.update(f"{place}\0{other}\0".encode())
            value = rest.intdigest()
        rests.append(value)
    return said, saids, rests


def _path(leaf: Turn) -> list[Turn]:
    """From the first turn of its sequence to the leaf."""
    path = [leaf]
    while (parent := path[-1].prompt.parent) is not None:
        path.append(parent)
    return path[::-1]


def _place(turn: Turn) -> tuple[int, int]:
    """Orders turns by their tokens, not by time."""
    return turn.prompt.tokens.digest, tokens_digest(turn.answer.tokens)


def _parts(path: Sequence[Turn]) -> SequencePlan:
    parts: SequencePlan = []
    for turn in path:
        parts.append(turn.prompt.tokens.own)
        parts.append(turn.number if turn.trained else turn.answer.tokens)
    return parts
