"""Checked reading of the fields of a request. Errors name the field, what was expected, and what was found."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from asyncrl.rollouter.endpoint.calls import BadRequest

T = TypeVar("T")

LARGEST = 2**31 - 1  # of what has no other bound: it fits int32
KINDS: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    object: "a value",
}
#: Numbers that change the distribution: kind, least and largest value.
RANGES: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 2),
    "top_p": (float, 1e-6, 1),  # no engine takes 0
    "top_k": (int, -1, LARGEST),
    "min_p": (float, 0, 1),
    "frequency_penalty": (float, -2, 2),
    "presence_penalty": (float, -2, 2),
    "repetition_penalty": (float, 0, LARGEST),
    "min_tokens": (int, 0, LARGEST),
}
#: What else changes it, by the names of chat completions and of the common engines' extensions to them.
CONSTRAINTS: dict[str, type] = {
    **dict.fromkeys("bad_words allowed_token_ids stop_token_ids guided_choice".split(), list),
    **dict.fromkeys("guided_regex guided_grammar guided_whitespace_pattern grammar regex ebnf".split(), str),
    **dict.fromkeys("guided_json json_schema structural_tag".split(), object),
    **dict.fromkeys("logit_bias structured_outputs".split(), dict),
    "ignore_eos": bool,
}
SAMPLING = frozenset(RANGES) | frozenset(CONSTRAINTS)
#: Accepted in every API, and without effect here.
IGNORED = frozenset(
    "seed user metadata store service_tier parallel_tool_calls prompt_cache_key prompt_cache_options prediction "
    "prompt_cache_retention safety_identifier verbosity reasoning_effort cache_salt priority request_id "
    "guided_decoding_backend skip_special_tokens".split()
)


def at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def wrong(path: str, expected: str, found: object) -> BadRequest:
    return BadRequest(f"{path}: expected {expected}, found {found!r:.80}", path)


def checked(value: Any, kind: type[T], path: str) -> T:
    """The value, which must be of the ``kind``. Integers are numbers; booleans are not."""
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind in (int, float)):
        raise wrong(path, KINDS[kind], value)
    return value  # type: ignore[return-value]  # an integer where a float is due


def required(body: Mapping[str, Any], name: str, kind: type[T], path: str = "") -> T:
    if body.get(name) is None:
        raise wrong(at(path, name), KINDS[kind], None)
    return checked(body[name], kind, at(path, name))


def optional(body: Mapping[str, Any], name: str, kind: type[T], path: str = "") -> T | None:
    """The field's value, or None if it is absent or null."""
    return None if body.get(name) is None else required(body, name, kind, path)


def flag(body: Mapping[str, Any], name: str, path: str = "") -> bool:
    """The field's value; false if it is absent or null."""
    return optional(body, name, bool, path) or False


def name_of(body: Mapping[str, Any], path: str) -> str:
    """The required field ``name``, which must not be empty."""
    if not (name := required(body, "name", str, path)):
        raise wrong(at(path, "name"), "a name", name)
    return name


def number(body: Mapping[str, Any], name: str, kind: type[T], low: float, high: float, path: str = "") -> T | None:
    value: Any = optional(body, name, kind, path)
    if value is not None and not low <= value <= high:
        raise wrong(at(path, name), f"{KINDS[kind]} between {low:g} and {high:.10g}", value)
    return value


def objects(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a list, each with its path."""
    for index, item in enumerate(checked(value, list, path)):
        yield f"{path}[{index}]", checked(item, dict, f"{path}[{index}]")


def only(body: Mapping[str, Any], known: Collection[str], path: str = "") -> None:
    """Refuses any other field that holds something, since ignoring it may be wrong."""
    if not isinstance(body, Mapping):
        raise wrong(path or "body", KINDS[dict], body)
    for name, value in body.items():
        if name not in known and value not in (None, "", [], {}):
            raise wrong(at(path, name), "no such field, as this endpoint does not know it", value)


def fixed(body: Mapping[str, Any], values: Mapping[str, Any], path: str = "") -> None:
    """Refuses fields with other than the only value that the endpoint offers."""
    for name, value in values.items():
        if body.get(name) is not None and body[name] != value:
            raise wrong(at(path, name), f"{value!r}, as this endpoint offers nothing else", body[name])


def max_tokens(body: Mapping[str, Any], name: str, path: str = "") -> int | None:
    return number(body, name, int, 1, LARGEST, path)


def stops(body: Mapping[str, Any], name: str, path: str = "") -> tuple[str, ...]:
    """Stop strings: one, or a list of them."""
    value = body.get(name)
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(stop, str) and stop for stop in found):
        raise wrong(at(path, name), "a string or a list of strings, none of them empty", value)
    return tuple(found)


def token_ids(value: Any, path: str, or_else: str = "") -> list[int]:
    if not isinstance(value, list) or not value or not all(type(t) is int and 0 <= t <= LARGEST for t in value):
        raise wrong(path, f"{or_else}a list of at least one token id", value)
    return value


def stream_options(body: Mapping[str, Any]) -> dict[str, bool]:
    """`Call.options` of OpenAI's completions: ``include_usage``."""
    options = optional(body, "stream_options", dict) or {}
    return {"include_usage": flag(options, "include_usage", "stream_options")}


def sampling(body: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """All that changes the distribution, but for the response's format and a forced choice of tools."""
    values = {name: number(body, name, *bounds, path) for name, bounds in RANGES.items()}
    values |= {name: optional(body, name, kind, path) for name, kind in CONSTRAINTS.items()}
    return {name: value for name, value in values.items() if value is not None}


def response_format(form: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entry of `Call.sampling` for a response's format, unless that is plain text."""
    return {} if form is None or form.get("type") == "text" else {"response_format": form}
