"""A call of the endpoint and its answer, independent of the API's dialect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from asyncrl.rollouter.endpoint.token_path import TokenPath
from asyncrl.types.prompts import Message


class BadRequest(ValueError):
    """A call that is refused with status 400: what was expected, what was found. ``param``: the field of its body;
    ``code``: what OpenAI's APIs call this error, if clients look for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class Call:
    """One call that samples. Exactly one of ``messages``, ``text`` and ``tokens`` (ids) is not None.

    ``messages`` and ``tools`` have the form of OpenAI's chat completions: ``content`` is a text or None,
    ``reasoning_content`` may hold an assistant's reasoning, ``tool_calls`` are ``{"id", "type": "function", "function":
    {"name", "arguments"}}`` with the arguments as a JSON text, and a tool's answer has a ``tool_call_id``.

    ``instructions`` is a system message before them. ``previous``: the id of an earlier answer of the session, whose
    conversation, without its instructions, they continue; ``keeps_tools``: with the tools of that answer's call.

    ``sampling``: all that the caller asks for that changes the distribution, by the names of chat completions
    (``temperature``, ``top_p``, ``logit_bias``, ``response_format``, a forced ``tool_choice``, …), without what is
    absent or null. ``max_tokens`` None: as many as fit. ``template_args``: further variables of the chat template."""

    model: str
    messages: list[Message] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    instructions: str | None = None
    previous: str | None = None
    keeps_tools: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    tools_allowed: bool = True  # False: tool_choice none
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    template_args: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    wants_logprobs: bool = False  # in the answer
    wants_token_ids: bool = False  # of prompt and answer, likewise
    options: Mapping[str, Any] = field(default_factory=dict)  # what only the dialect reads again, in its answer


@dataclass(frozen=True)
class ToolCall:
    """``arguments``: a JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """An answer, for the caller. ``text`` is all of it, with what was written for the policy, and without the stop
    token or stop string that ended it; ``content``, ``reasoning`` and ``tool_calls`` are its parts (chat).

    ``finish``: ``stop``, ``length`` or ``tool_calls``. ``prompt``: [P] tokens, with those written for the policy;
    ``tokens``: int32 [C], sampled, with the stop token; ``logprobs`` float32 [C]. ``token_texts``: [C] if
    `Call.wants_logprobs` asked for them."""

    id: str  # unique in the run, such as 5f0c…; a dialect adds its prefix
    model: str
    created_s: int  # Unix time
    text: str
    content: str | None
    reasoning: str | None
    tool_calls: Sequence[ToolCall]
    finish: str
    stop_string: str | None
    prompt: TokenPath
    tokens: np.ndarray
    logprobs: np.ndarray
    token_texts: Sequence[str] = ()


class Dialect(Protocol):
    """One API: pure functions between its JSON and calls. A module of `asyncrl.rollouter.endpoint.dialects`."""

    def call(self, body: Mapping[str, Any]) -> Call:
        """The call of a request's body. Raises BadRequest for a field that is malformed, unknown, or has an effect
        that the endpoint does not offer."""
        ...

    def answer(self, call: Call, answer: Answer) -> dict[str, Any]:
        """The body of a whole answer."""
        ...

    def stream(self, call: Call, answer: Answer) -> Iterator[bytes]:
        """The server-sent events of a streamed answer, as bytes with their blank lines, the last one included."""
        ...

    def error(self, status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
        """The body of an error, in the API's own form."""
        ...
