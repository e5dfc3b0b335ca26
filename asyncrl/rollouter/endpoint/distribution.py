"""What a call asks for beside the distribution that is trained: the parameters of an untrained call, or a refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.rollouter.endpoint.calls import BadRequest
from asyncrl.rollouter.endpoint.dialects import fields
from asyncrl.rollouter.engines.base import LEAST_TEMPERATURE, Grammar

InVocabulary = Callable[[np.ndarray], bool]

MAX_BIAS = 100  # of a token's logit, up or down

#: parameters that change nothing at this value
NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "ignore_eos": (False,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
}


@dataclass(frozen=True)
class TrainedDistribution:
    """What the run samples from, at this ``temperature``, up to one of ``stop_token_ids``, some of which a call may
    name. ``served``: those of `SamplingParams` that the engine lets a request replace; ``mask``: calls that do so are
    answered, and never trained."""

    temperature: float
    stop_token_ids: tuple[int, ...]
    served: Set[str]
    mask: bool

    def replaced_by(self, asked: Mapping[str, Any], in_vocabulary: InVocabulary) -> Mapping[str, Any] | None:
        """None if a call samples as the run does; else those of `SamplingParams` that it replaces, which are none where
        a tool call is only begun for the policy. ``asked``: see `Call.sampling`. Raises BadRequest."""
        neutral = {**NEUTRAL, "temperature": (self.temperature,)}
        changes = {name: value for name, value in asked.items() if value not in neutral.get(name, ())}
        if all(token in self.stop_token_ids for token in changes.get("stop_token_ids", ())):
            changes.pop("stop_token_ids", None)
        if not changes:
            return None
        known = {name for name, field in FIELDS.items() if field is None or field in self.served}
        if not self.mask or not changes.keys() <= known:
            name, value = min(changes.items(), key=lambda item: (item[0] in known, item[0]))
            expected = f"{neutral[name][0]!r}" if name in neutral else "none"
            if name in known:
                why = "rollout.agent.untrained=mask serves it without training"
            else:
                why = "the engine does not serve it" if name in FIELDS else "it is never served"
            raise BadRequest(
                f"{name}: expected {expected}, the distribution that is trained, found {value!r:.80}; {why}", name
            )
        if len(forms := [name for name in changes if name in GRAMMARS or name == "tool_choice"]) > 1:
            raise BadRequest(f"{forms[1]}: expected one form of the answer, found {forms[0]} beside it", forms[1])
        found: dict[str, Any] = {}
        for name, value in changes.items():
            if name in NUMBERS:
                found[name] = NUMBERS[name](value)
                if name == "temperature" and found[name] < LEAST_TEMPERATURE:
                    found[name] = 0.0
            elif name in GRAMMARS:
                found["grammar"] = GRAMMARS[name](value, name)
            elif name == "logit_bias":
                found[name] = _bias(value, in_vocabulary)
        return found


def _bias(value: Mapping[str, Any], in_vocabulary: InVocabulary) -> tuple[tuple[int, float], ...]:
    """Ascending tokens, each with its bias."""
    for key, bias in value.items():
        if not re.fullmatch("0|[1-9][0-9]{0,9}", key) or not in_vocabulary(np.asarray([int(key)])):
            raise fields.wrong("logit_bias", "token ids of the model's vocabulary", key)
        fields.number(value, key, float, -MAX_BIAS, MAX_BIAS, "logit_bias")
        if bias is None:
            raise fields.wrong(f"logit_bias.{key}", "a number", None)
    return tuple(sorted((int(key), float(bias)) for key, bias in value.items()))


def _schema(value: Any, path: str) -> Grammar:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(fields.checked(schema, dict, path), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as e:
        raise e if isinstance(e, BadRequest) else fields.wrong(path, "a JSON schema", value) from None
    return Grammar("json_schema", text)


def _any_object(value: bool, path: str) -> Grammar:
    return Grammar("json_schema", '{"type": "object"}')


def _regex(value: Any, path: str) -> Grammar:
    return Grammar("regex", _text(value, path))


def _gbnf(value: Any, path: str) -> Grammar:
    return Grammar("gbnf", _text(value, path))


def _text(value: Any, path: str) -> str:
    if not fields.checked(value, str, path):
        raise fields.wrong(path, "a text that is not empty", value)
    return str(value)


def _choice(value: Any, path: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise fields.wrong(path, "a list of texts, none of them empty", value)
    return Grammar("regex", "|".join(f"({re.sub(_SYNTAX, _ESCAPED, one)})" for one in value))


_SYNTAX, _ESCAPED = r"[\\^$.|?*+()\[\]{}]", r"\\\g<0>"


def _response_format(value: Mapping[str, Any], path: str) -> Grammar:
    if (kind := value.get("type")) == "json_object":
        return _any_object(True, path)
    if kind != "json_schema":
        raise fields.wrong(f"{path}.type", "text, json_object or json_schema, as nothing else is served", kind)
    form = fields.required(value, "json_schema", dict, path)
    return _schema(form.get("schema"), f"{path}.json_schema.schema")


def _structured(value: Mapping[str, Any], path: str) -> Grammar:
    asked = {name: form for name, form in value.items() if form is not None and form is not False}
    if unknown := sorted(asked.keys() - STRUCTURED):
        raise BadRequest(f"{path}.{unknown[0]}: it is never served; expected {', '.join(STRUCTURED)}", path)
    if len(asked) != 1:
        raise fields.wrong(path, f"one of {', '.join(STRUCTURED)}", value)
    ((name, form),) = asked.items()
    return STRUCTURED[name](form, f"{path}.{name}")


#: forms of ``structured_outputs``
STRUCTURED: dict[str, Callable[[Any, str], Grammar]] = {
    "json": _schema,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _gbnf,
}
#: by the names of chat completions, vLLM and SGLang
GRAMMARS: dict[str, Callable[[Any, str], Grammar]] = {
    "response_format": _response_format,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _gbnf,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _gbnf,
    "grammar": _gbnf,
}
NUMBERS: dict[str, type] = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}
#: what may be served, and as which of `SamplingParams`; a forced call is only begun
FIELDS: dict[str, str | None] = {
    **{name: name for name in (*NUMBERS, "logit_bias")},
    **dict.fromkeys(GRAMMARS, "grammar"),
    "tool_choice": None,
}
