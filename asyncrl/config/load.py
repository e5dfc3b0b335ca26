"""`Config` from YAML files and dotted overrides: OmegaConf merges and resolves, pydantic validates.

A file may begin with ``extends: other.yaml``, relative to itself, and then contains only what differs.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from asyncrl.config.fields import expected, type_name
from asyncrl.config.options import known_keys, options
from asyncrl.config.schema import Config
from asyncrl.config.secrets import escaped, misplaced_secrets, secrets_stay_names
from asyncrl.config.section import OptionProblems

CONFIG_FILE = "config.yaml"  # of a run, in its folder

Tree = Mapping[str, Any]


class ConfigError(ValueError):
    """Invalid configuration. ``problems``: one line each, beginning with the option's key."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads ``path`` (None: only defaults), applies ``key.path=value`` overrides and resolves interpolations,
    except names of secrets (`asyncrl.config.secrets`).

    Validates each section on its own; `asyncrl.run.checks.check` validates sections, parts and files against each
    other. Raises ConfigError."""
    given = _read_layers(Path(path)) if path is not None else []
    given += [("", _parse_override(text)) for text in overrides]
    problems: list[str] = []
    layers = [(name, _well_shaped(tree, name, problems)) for name, tree in given]
    _clear(layers)
    try:
        with secrets_stay_names():
            merged = OmegaConf.merge(dataclasses.asdict(Config()), *(tree for _, tree in layers))
            OmegaConf.resolve(merged)
    except OmegaConfBaseException as e:
        raise ConfigError([f"{e.full_key or 'config'}: {_first_line(e)}"]) from None
    values = typing.cast(Tree, OmegaConf.to_container(merged))
    missing = {*(key for key, value in _leaves(values) if value == "???"), *_left_open(layers)}
    problems += [
        f"{key}: must be given, has no default (expected {type_name(known_keys().get(key))})" for key in sorted(missing)
    ]
    if misplaced := list(misplaced_secrets(values)):
        raise ConfigError([*problems, *misplaced])
    try:
        config = TypeAdapter(Config).validate_python(values)
    except ValidationError as e:
        for error in e.errors(include_url=False):
            cause = error.get("ctx", {}).get("error")
            problems += cause.lines if isinstance(cause, OptionProblems) else [_line(error, values, layers)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config


def _well_shaped(tree: Tree, name: str, problems: list[str], prefix: str = "") -> dict[str, Any]:
    """The layer without values of the wrong shape (a group, list or mapping where another is expected), with which a
    merge would replace lower layers, or fail. Adds one line per such value to ``problems``."""
    shaped = {}
    for part, value in tree.items():
        kind = known_keys().get(key := f"{prefix}{part}")
        if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            shaped[part] = _well_shaped(value, name, problems, f"{key}.")
        elif kind is None or isinstance(value, str) or _shape(value) is _shape_of(kind):  # unknown, or an interpolation
            shaped[part] = value
        else:
            shape = "a group of options" if dataclasses.is_dataclass(kind) else type_name(kind)
            problems.append(f"{key}: expected {shape}, found {value!r}{f' (in {name})' if name else ''}")
    return shaped


def _clear(layers: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Let an empty mapping replace the entries of lower layers, which a merge would keep."""
    for i, (_, tree) in enumerate(layers):
        cleared = [key for key, value in _leaves(tree) if value == {} and _shape_of(known_keys().get(key)) is dict]
        for key, (_, below) in itertools.product(cleared, layers[:i]):
            *groups, option = key.split(".")
            for part in groups:
                below = inner if isinstance(inner := below.get(part), dict) else {}
            below.pop(option, None)


def _left_open(layers: Sequence[tuple[str, Tree]]) -> Iterator[str]:
    """Options that the last layer setting them marks as required (``???``), where a merge would keep a lower value."""
    last = {key: value for _, tree in layers for key, value in _leaves(tree)}
    return (key for key, value in last.items() if value == "???")


def _leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for part, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{part}.")
        else:
            yield f"{prefix}{part}", value


def _shape(value: Any) -> type | None:
    return next((shape for shape in (dict, list) if isinstance(value, shape)), None)


def _shape_of(kind: Any) -> type | None:
    """Shape of an option's values: dict, list or None; for a group ``type``, the shape of no value."""
    if dataclasses.is_dataclass(kind):
        return type
    return origin if (origin := typing.get_origin(kind)) in (dict, list) else None


def to_yaml(config: Config) -> str:
    """The whole tree as YAML, defaults included; `load_config` reads it back to an equal Config."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(dataclasses.asdict(config))))


def _read_layers(path: Path, seen: tuple[Path, ...] = ()) -> list[tuple[str, Tree]]:
    """File name and content of ``path`` and of those that it extends, the base first."""
    path = path.resolve()
    if path in seen:
        raise ConfigError([f"{path}: extends itself through {' → '.join(p.name for p in seen)}"])
    if not os.path.isfile(path):
        raise ConfigError([f"{path}: no such config file"])
    try:
        # OmegaConf's loader reads 1e-6 as a number; plain YAML reads it as a string
        tree: Any = OmegaConf.to_container(OmegaConf.create(path.read_text()))
    except OSError as e:
        raise ConfigError([f"{path}: cannot be read ({e.strerror})"]) from None
    except UnicodeDecodeError as e:
        raise ConfigError([f"{path}: expected text in UTF-8, found byte {e.start} that is none ({e.reason})"]) from None
    except (yaml.YAMLError, OmegaConfBaseException) as e:
        raise ConfigError([f"{path}: not valid YAML: {' '.join(str(e).split())}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: expected a mapping of options at the top, found {type(tree).__name__}"])
    parent = tree.pop("extends", None)
    below = _read_layers(path.parent / str(parent), (*seen, path)) if parent else []
    return [*below, (path.name, tree)]


def _parse_override(text: str) -> Tree:
    key, sep, _ = text.partition("=")
    if not sep or not key.strip():
        raise ConfigError([f"override {text!r}: expected key.path=value"])
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([text]))
    except (OmegaConfBaseException, yaml.YAMLError) as e:
        raise ConfigError([f"override {text!r}: {_first_line(e)}"]) from None
    return typing.cast(Tree, tree)


def _line(error: ErrorDetails, values: Tree, layers: Sequence[tuple[str, Tree]]) -> str:
    """A pydantic error as one line, "key.path: expected …, found …"."""
    path = [str(part) for part in error["loc"]]
    if error["type"] in ("unexpected_keyword_argument", "invalid_key"):
        key = ".".join(path)
        return f"{key}: unknown key{_nearest(key)}{_origin(path, layers)}"
    known = options()
    while ".".join(path) not in known:  # an error inside a list or mapping belongs to its option
        path.pop()
    key = ".".join(path)
    found: Any = functools.reduce(lambda tree, part: tree[part], path, values)
    return f"{key}: {expected(error, known[key], found)}{_origin(path, layers)}"


def _origin(path: Sequence[str], layers: Sequence[tuple[str, Tree]]) -> str:
    """The file that sets a key; empty for overrides."""
    for name, tree in reversed(layers):
        for part in path:
            if not isinstance(tree, Mapping) or part not in tree:
                break
            tree = tree[part]
        else:
            return f" (in {name})" if name else ""
    return ""


def _nearest(path: str) -> str:
    known = list(known_keys())
    by_leaf, leaf = {key.rsplit(".", 1)[-1]: key for key in known}, path.rsplit(".", 1)[-1]
    if leaf in by_leaf:  # the right name in the wrong group
        return f"; did you mean {by_leaf[leaf]}?"
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    close = close or [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1)]
    return f"; did you mean {close[0]}?" if close else ""


def _first_line(e: Exception) -> str:
    return str(e).strip().splitlines()[0]
