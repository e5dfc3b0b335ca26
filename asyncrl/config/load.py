"""From YAML and dotted overrides to a checked `Config`; every problem is one readable line with the key's path.

A file may begin with ``extends: other.yaml`` (relative to itself) and then says only what differs.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from asyncrl.config.schema import Config


class ConfigError(ValueError):
    """The configuration cannot be run. ``problems`` are complete sentences, one per key."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read ``path`` (None: defaults only), apply ``key.path=value`` overrides, resolve interpolations.

    Checks names, types and missing values; `asyncrl.config.checks.check` judges the values. Raises ConfigError."""
    layers = _read_layers(Path(path)) if path is not None else []
    layers += [_parse_override(text) for text in overrides]
    merged = OmegaConf.structured(Config)
    problems: list[str] = []
    for where, tree in layers:
        unknown = [f"{where}: {p}" for p in _unknown_keys(tree, Config)]
        problems += unknown
        if unknown:
            continue
        # leaf by leaf, so that every wrong type is told, with its path
        for key, value in _leaves(tree, Config):
            try:
                OmegaConf.update(merged, key, value, merge=True)
            except OmegaConfBaseException as e:
                problems.append(f"{where}: {key}: expected {_type_name(key)}, found {value!r} ({_first_line(e)})")
    if problems:
        raise ConfigError(problems)
    try:
        OmegaConf.resolve(merged)
    except OmegaConfBaseException as e:
        raise ConfigError([f"{e.full_key or 'config'}: {_first_line(e)}"]) from None
    missing = [str(key) for key in OmegaConf.missing_keys(merged)]
    if missing:
        raise ConfigError(
            [f"{key}: must be given, has no default (expected {_type_name(key)})" for key in sorted(missing)]
        )
    try:
        return typing.cast(Config, OmegaConf.to_object(merged))
    except MissingMandatoryValue as e:
        raise ConfigError([f"{e.full_key}: must be given, has no default"]) from None


def to_yaml(config: Config) -> str:
    """The whole tree as YAML, every default written out; `load_config` reads it back to an equal Config."""
    tree: DictConfig = OmegaConf.structured(config)
    return OmegaConf.to_yaml(tree)


def known_keys(schema: type = Config, prefix: str = "") -> dict[str, Any]:
    """Dotted path of every option → its type."""
    hints = typing.get_type_hints(schema)
    keys: dict[str, Any] = {}
    for f in dataclasses.fields(schema):
        kind = hints[f.name]
        keys[prefix + f.name] = kind
        if dataclasses.is_dataclass(kind):
            keys |= known_keys(typing.cast(type, kind), f"{prefix}{f.name}.")
    return keys


def _read_layers(path: Path, seen: tuple[Path, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    path = path.resolve()
    if path in seen:
        raise ConfigError([f"{path}: extends itself, by way of {' → '.join(p.name for p in seen)}"])
    if not path.is_file():
        raise ConfigError([f"{path}: no such config file"])
    try:
        # OmegaConf's loader takes 1e-6 for a number, as people expect; plain YAML takes it for a string
        tree: Any = OmegaConf.to_container(OmegaConf.create(path.read_text()))
    except (yaml.YAMLError, OmegaConfBaseException) as e:
        raise ConfigError([f"{path}: not valid YAML: {' '.join(str(e).split())}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: expected a mapping of options at the top, found {type(tree).__name__}"])
    parent = tree.pop("extends", None)
    below = _read_layers(path.parent / str(parent), (*seen, path)) if parent else []
    return [*below, (path.name, tree)]


def _parse_override(text: str) -> tuple[str, dict[str, Any]]:
    key, sep, _ = text.partition("=")
    if not sep or not key.strip():
        raise ConfigError([f"override {text!r}: expected key.path=value"])
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([text]))
    except (OmegaConfBaseException, yaml.YAMLError) as e:
        raise ConfigError([f"override {text!r}: {_first_line(e)}"]) from None
    return "override", typing.cast(dict[str, Any], tree)


def _unknown_keys(tree: Mapping[str, Any], schema: type, prefix: str = "") -> list[str]:
    hints, problems = typing.get_type_hints(schema), []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in hints:
            problems.append(f"{path}: unknown key{_nearest(path)}")
        elif dataclasses.is_dataclass(hints[key]):
            if isinstance(value, Mapping):
                problems += _unknown_keys(value, typing.cast(type, hints[key]), f"{path}.")
            else:
                problems.append(f"{path}: expected a group of options, found {value!r}")
    return problems


def _nearest(path: str) -> str:
    known = list(known_keys())
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    if not close:  # perhaps the right name under the wrong parent
        by_leaf = {key.rsplit(".", 1)[-1]: key for key in known}
        close = [by_leaf[leaf] for leaf in difflib.get_close_matches(path.rsplit(".", 1)[-1], by_leaf, n=1)]
    return f"; did you mean {close[0]}?" if close else ""


def _leaves(tree: Mapping[str, Any], schema: type, prefix: str = "") -> list[tuple[str, Any]]:
    hints, out = typing.get_type_hints(schema), []
    for key, value in tree.items():
        if dataclasses.is_dataclass(hints[key]):
            out += _leaves(value, typing.cast(type, hints[key]), f"{prefix}{key}.")
        else:
            out.append((f"{prefix}{key}", value))
    return out


def _type_name(key: str) -> str:
    kind = known_keys().get(key)
    return getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind).replace("typing.", "")


def _first_line(e: Exception) -> str:
    return str(e).strip().splitlines()[0]
