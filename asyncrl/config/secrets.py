"""Secrets in options: ``${secret:NAME}`` names an environment variable, and a `Config` keeps the name.

So config.yaml, the report, wandb, and the arguments of actors hold only names. `revealed` reads the variables, in the
process that passes the values on to the user's code or to an engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError
from omegaconf.resolvers import oc

from asyncrl.config.schema import Config

#: options whose values may name secrets, at any depth
HOLDERS = ("reward.args", "rollout.agent_loop_args", "rollout.agent.args", "rollout.engine.args")
_WHERE = f"values inside {', '.join(HOLDERS[:-1])} and {HOLDERS[-1]}"

_SECRET_LINE = 4  # characters of a line of a value that is hidden by itself, at least

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(rf"\$\{{secret:({_NAME.pattern})\}}")
#: what OmegaConf would resolve, with the backslashes before it; names of secrets stay
_RESOLVED = re.compile(rf"(\\*)\$\{{(?!secret:{_NAME.pattern}\}})")
#: names of variables that hold credentials; not MAX_TOKENS, TOKENIZER or MONKEY
_CREDENTIAL = re.compile(
    r"(?<![a-z])(?:api|access|private)?keys?(?![a-z])|token(?![a-z])|secret|passw(?:or)?d|passphrase|credential",
    re.IGNORECASE,
)


class MissingSecret(ValueError):
    """This process lacks a secret's environment variable; the message is one line that begins with the option."""


def revealed(option: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """The value ``args`` of an option, with each secret's value in place of its name. Raises MissingSecret."""
    for problem in _missing(option, args):
        raise MissingSecret(problem)
    return {key: _revealed(value) for key, value in args.items()}


def hidden(args: Mapping[str, Any]) -> dict[str, str]:
    """Value of each secret that ``args`` name → the text that names it, for `redacted`. Also the forms in which a
    program may print a value: as a Python or JSON string, and line by line, but for lines that are too short to be
    secret, such as a brace."""
    shown: dict[str, str] = {}
    for name in _names(args):
        value = os.environ.get(name, "")
        lines = [line for line in value.splitlines() if len(line) >= _SECRET_LINE]
        forms = {value, repr(value)[1:-1], json.dumps(value)[1:-1], *lines}
        shown |= dict.fromkeys(filter(None, forms), _reference(name))
    return shown


def redacted(text: str, hidden: Mapping[str, str]) -> str:
    """``text`` with each key of ``hidden`` replaced by its value, the longest first, which may contain others."""
    for value in sorted(hidden, key=len, reverse=True):
        text = text.replace(value, hidden[value])
    return text


def escaped(tree: Any) -> Any:
    """A tree that OmegaConf resolves to ``tree``, in which nothing but names of secrets is to be resolved."""
    if isinstance(tree, str):
        return _RESOLVED.sub(lambda match: f"{match[1] * 2}\\${{", tree)
    if isinstance(tree, Mapping):
        return {key: escaped(value) for key, value in tree.items()}
    return [escaped(value) for value in tree] if isinstance(tree, list) else tree


def missing_secrets(config: Config) -> Iterator[str]:
    """One line per secret whose environment variable is not set in this process."""
    for option in HOLDERS:
        yield from _missing(option, attrgetter(option)(config))


def misplaced_secrets(values: Mapping[str, Any]) -> Iterator[str]:
    """One line per option that names a secret and may not. ``values``: a whole configuration as nested plain values."""
    for key, text in _texts(values):
        if _REFERENCE.search(text) and not key.startswith(tuple(f"{option}." for option in HOLDERS)):
            yield f"{key}: expected no secret, found {text}; secrets work only in {_WHERE}"


@contextlib.contextmanager
def secrets_stay_names() -> Iterator[None]:
    """Within it, OmegaConf resolves ``${secret:NAME}`` to itself, and refuses ``${oc.env:NAME}`` for credentials."""
    OmegaConf.register_resolver("secret", _resolve_secret, replace=True)
    OmegaConf.register_resolver("oc.env", _resolve_variable, replace=True)
    try:
        yield
    finally:
        OmegaConf.clear_resolver("secret")
        OmegaConf.register_resolver("oc.env", oc.env, replace=True, annotation_validation="off")


def _resolve_secret(*names: Any) -> str:
    if len(names) == 1 and isinstance(names[0], str) and _NAME.fullmatch(names[0]):
        return _reference(names[0])
    # without what was found, which may be a secret's value
    raise InterpolationResolutionError(
        "${secret:NAME}: expected the name of one environment variable (letters, digits and _), found something else"
    )


def _resolve_variable(name: Any, *default: Any) -> Any:
    if _CREDENTIAL.search(str(name)):
        raise InterpolationResolutionError(
            f"{name} looks like the name of a secret, and ${{oc.env:{name}}} would be written to files with its value; "
            f"use {_reference(name)} in {_WHERE}, or rename the variable"
        )
    return oc.env(name, *default)


def _reference(name: str) -> str:
    return f"${{secret:{name}}}"


def _revealed(value: Any) -> Any:
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: os.environ[match[1]], value)
    if isinstance(value, Mapping):
        return {key: _revealed(item) for key, item in value.items()}
    return [_revealed(item) for item in value] if isinstance(value, list) else value


def _missing(option: str, args: Mapping[str, Any]) -> Iterator[str]:
    for name in _names(args):
        if not os.environ.get(name):
            yield (
                f"{option}: {_reference(name)} needs the environment variable {name}, which is not set on "
                f"{platform.node()}; set it where the run starts, or on a cluster where `ray start` runs"
            )


def _names(args: Mapping[str, Any]) -> list[str]:
    """Names of the secrets in ``args``, each once."""
    return list(dict.fromkeys(name for _, text in _texts(args) for name in _REFERENCE.findall(text)))


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and content of each text in a tree; items of a list have the list's key."""
    if isinstance(tree, str):
        yield key, tree
    elif isinstance(tree, Mapping):
        for part, value in tree.items():
            yield from _texts(value, f"{key}.{part}" if key else str(part))
    elif isinstance(tree, list):
        for value in tree:
            yield from _texts(value, key)
