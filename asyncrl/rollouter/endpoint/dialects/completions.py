"""OpenAI's completions: text or token ids in, text out, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from asyncrl.rollouter.endpoint.calls import Answer, Call
from asyncrl.rollouter.endpoint.dialects import fields, wire

PREFIX, OBJECT = "cmpl-", "text_completion"
FIXED = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "include_stop_str_in_output": False,
}
KNOWN = {
    *fields.SAMPLING,
    *fields.IGNORED,
    *FIXED,
    *"model prompt stop max_tokens logprobs return_token_ids stream stream_options response_format".split(),
}

error = wire.openai_error


def call(body: Mapping[str, Any]) -> Call:
    fields.only(body, KNOWN)
    fields.fixed(body, FIXED)
    text, tokens = _prompt(body.get("prompt"))
    return Call(
        model=fields.required(body, "model", str),
        text=text,
        tokens=tokens,
        max_tokens=fields.max_tokens(body, "max_tokens"),
        stop=fields.stops(body, "stop"),
        sampling=fields.sampling(body) | fields.response_format(fields.optional(body, "response_format", dict)),
        stream=fields.flag(body, "stream"),
        wants_logprobs=fields.number(body, "logprobs", int, 0, 1) is not None,
        wants_token_ids=fields.flag(body, "return_token_ids"),
        options=fields.stream_options(body),
    )


def _prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """The text or the token ids of a prompt; a list of one prompt is that prompt."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise fields.wrong("prompt", "one prompt", prompt)
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, None
    return None, fields.token_ids(prompt, "prompt", "a string or ")


def answer(call: Call, answer: Answer) -> dict[str, Any]:
    choice = {"index": 0, "text": answer.text, **_end(call, answer), **_prompt_ids(call, answer)}
    return {
        **wire.openai_head(PREFIX, OBJECT, answer),
        "choices": [choice],
        "usage": wire.openai_usage(answer),
    }


def stream(call: Call, answer: Answer) -> Iterator[bytes]:
    going: dict[str, Any] = {"logprobs": None, "finish_reason": None}
    choices = [{"text": piece, **going} for piece in wire.pieces(answer.text)]
    choices.append({"text": "", **_end(call, answer)})
    choices[0] |= _prompt_ids(call, answer)
    return wire.openai_stream(call, answer, wire.openai_head(PREFIX, OBJECT, answer), choices)


def _prompt_ids(call: Call, answer: Answer) -> dict[str, Any]:
    return wire.ids(call, prompt_token_ids=answer.prompt)


def _end(call: Call, answer: Answer) -> dict[str, Any]:
    """What a choice has at its end, streamed or not."""
    logprobs = _logprobs(answer) if call.wants_logprobs else None
    return {"logprobs": logprobs, "finish_reason": wire.bare_finish(answer), **wire.ids(call, token_ids=answer.tokens)}


def _logprobs(answer: Answer) -> dict[str, Any]:
    """``top_logprobs`` is null also for ``logprobs: 1``, as only the sampled token's logprob is known."""
    texts, logprobs = list(answer.token_texts), answer.logprobs.tolist()
    offsets = list(accumulate(map(len, texts), initial=0))[: len(texts)]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
