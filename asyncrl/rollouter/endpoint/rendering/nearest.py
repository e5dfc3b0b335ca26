"""On which messages the rendering of further ones depends, in every chat template known to us."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from asyncrl.rollouter.endpoint.rendering.tool_formats import PROBE, PROBE_CALL, ReasoningTags, Tool
from asyncrl.types.prompts import Message

Added = Callable[[Sequence[Message], Sequence[Message], Sequence[Tool]], str | None]


def nearest(messages: Sequence[Message], added: Sequence[Message], tags: ReasoningTags | None) -> Sequence[Message]:
    """Those of the ``messages`` before the ``added`` ones, an answer and what follows it: the system's, the user's last
    one, and the last round of an assistant's message and what tools returned.

    All, where a template that knows reasoning, in ``tags``, may drop an earlier one: a user speaks again; and for the
    result of an earlier round's call, whose name a template may look up."""
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return messages
    if tags is not None and any(message["role"] == "user" for message in added):
        said = (message for message in (*messages, added[0]) if message["role"] == "assistant")
        if any(message.get("reasoning_content") or tags[1] in (message.get("content") or "") for message in said):
            return messages
    asked = _last(roles, "user")
    answered = _last(roles, "assistant") if "assistant" in roles[asked:] else len(roles)
    called = {call["id"] for m in (*messages[answered:], *added) for call in m.get("tool_calls") or ()}
    if any(message["role"] == "tool" and message["tool_call_id"] not in called for message in added):
        return messages
    system = messages[:1] if asked and roles[0] == "system" else ()
    return [*system, messages[asked], *messages[answered:]]


def is_local(added: Added, tags: ReasoningTags | None, with_tools: bool) -> bool:
    """True if a template adds the same to the `nearest` messages as to all, for each answer of examples.

    ``added(messages, further ones, tools)``: what the template adds for further messages; None if it refuses them."""
    for messages in _examples(with_tools):
        tools = [PROBE] if any(message["role"] == "tool" for message in messages) else []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                earlier, further = messages[:place], messages[place : place + 2]
                whole = added(earlier, further, tools)
                if whole is not None and whole != added(nearest(earlier, further, tags), further, tools):
                    return False
    return True


def _examples(with_tools: bool) -> Iterator[list[Message]]:
    """Each assistant's message is followed by another."""
    dialogue = ["user", "assistant"] * 4 + ["user"]
    yield _example(*dialogue)
    yield _example("system", *dialogue)
    if with_tools:
        agent = ["user", *["assistant", "tool"] * 4, "assistant", "user", *["assistant", "tool"] * 3]
        for roles in (agent, ["system", *agent]):
            yield _example(*roles)
            yield [
                {**message, "reasoning_content": "thought"} if message["role"] == "assistant" else message
                for message in _example(*roles)
            ]


def _example(*roles: str) -> list[Message]:
    made: list[Message] = []
    for number, role in enumerate(roles):
        message: Message = {"role": role, "content": f"said {number}"}
        if role == "tool":
            message["tool_call_id"] = f"call{number:05}"
            call = {"id": message["tool_call_id"], "type": "function", "function": PROBE_CALL}
            made[-1] |= {"content": "", "tool_calls": [call]}
        made.append(message)
    return made


def _last(roles: Sequence[str], role: str) -> int:
    return len(roles) - 1 - roles[::-1].index(role)
