"""How answers go out: server-sent events, and the forms that OpenAI's APIs share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from asyncrl.rollouter.endpoint.calls import Answer, Call
from asyncrl.rollouter.endpoint.token_path import TokenPath

PIECE = 64  # characters of a delta


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event. Its JSON is ASCII: some clients break lines at U+2028."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def pieces(text: str | None) -> Iterator[str]:
    """The text in the pieces in which it is streamed."""
    text = text or ""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def ids(call: Call, **tokens: np.ndarray | TokenPath) -> dict[str, list[int]]:
    """Token ids as fields of an answer, if the call asked for them."""
    return {name: found.tolist() for name, found in tokens.items()} if call.wants_token_ids else {}


def bare_finish(answer: Answer) -> str:
    """Why an answer that has no tool calls ended."""
    return "length" if answer.finish == "length" else "stop"


def openai_head(prefix: str, kind: str, answer: Answer) -> dict[str, Any]:
    return {"id": prefix + answer.id, "object": kind, "created": answer.created_s, "model": answer.model}


def openai_usage(answer: Answer) -> dict[str, int]:
    prompt, sampled = len(answer.prompt), len(answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def openai_stream(
    call: Call,
    answer: Answer,
    head: Mapping[str, Any],
    choices: Iterable[Mapping[str, Any]],
    first: Mapping[str, Any] | None = None,
) -> Iterator[bytes]:
    """A chunk of each of the ``choices``, the ``first`` of which has more fields; then the usage, and the end."""
    usage: dict[str, Any] = {"usage": None} if call.options.get("include_usage") else {}
    more = first or {}
    for choice in choices:
        yield event({**head, "choices": [{"index": 0, **choice}], **usage, **more})
        more = {}
    if usage:
        yield event({**head, "choices": [], "usage": openai_usage(answer)})
    yield b"data: [DONE]\n\n"


def openai_error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
