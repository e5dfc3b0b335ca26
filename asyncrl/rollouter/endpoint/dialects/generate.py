"""Token ids in, token ids out: for harnesses that render and parse themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.rollouter.endpoint.calls import Answer, BadRequest, Call
from asyncrl.rollouter.endpoint.dialects import fields, wire

KNOWN = {"model", "token_ids", "sampling_params", "stream", "request_id", "cache_salt", "priority"}
FIXED = {"n": 1}
#: Of texts, which no answer of this API has.
OF_TEXTS = {"spaces_between_special_tokens", "include_stop_str_in_output", "detokenize"}
PARAMS = {*fields.SAMPLING, *fields.IGNORED, *FIXED, *OF_TEXTS, "max_tokens", "stop", "logprobs"}

error = wire.openai_error


def call(body: Mapping[str, Any]) -> Call:
    fields.only(body, KNOWN)
    if body.get("stream"):
        raise _unstreamed()
    params, path = fields.required(body, "sampling_params", dict), "sampling_params"
    fields.only(params, PARAMS, path)
    fields.fixed(params, FIXED, path)
    return Call(
        model=fields.required(body, "model", str),
        tokens=fields.token_ids(body.get("token_ids"), "token_ids"),
        max_tokens=fields.max_tokens(params, "max_tokens", path),
        stop=fields.stops(params, "stop", path),
        sampling=fields.sampling(params, path),
        wants_logprobs=fields.number(params, "logprobs", int, 0, 1, path) is not None,
        wants_token_ids=True,
    )


def answer(call: Call, answer: Answer) -> dict[str, Any]:
    tokens = answer.tokens.tolist()
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": wire.bare_finish(answer),
        "logprobs": None,
    }
    if call.wants_logprobs:
        pairs = zip(tokens, answer.logprobs.tolist(), strict=True)
        choice["logprobs"] = {"content": [{"token": f"token_id:{t}", "logprob": logprob} for t, logprob in pairs]}
    return {"request_id": answer.id, "choices": [choice], "usage": wire.openai_usage(answer)}


def stream(call: Call, answer: Answer) -> Iterator[bytes]:
    raise _unstreamed()


def _unstreamed() -> BadRequest:
    return BadRequest("stream: expected false, as this API has no streamed form", "stream")
