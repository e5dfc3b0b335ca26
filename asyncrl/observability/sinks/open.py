"""Opens the sinks of a run: the built-in ones that the config turns on, then those that reporting.sinks names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.observability.sinks.base import SINKS, Sink
from asyncrl.observability.sinks.hub import Hub
from asyncrl.plugins.registry import UnknownPart

_METHODS = ("metrics", "spans", "trajectories", "close")


def open_hub(config: Config, run_dir: Path) -> Hub:
    """Raises ConfigError."""
    if problems := list(sink_problems(config)):
        raise ConfigError(problems)
    return Hub([_open(name, config, run_dir) for name in _names(config)])


def sink_problems(config: Config) -> Iterator[str]:
    """Unknown sinks and invalid sink options, one line each."""
    for name in _names(config):
        try:
            yield from SINKS.find(name).problems(config)
        except UnknownPart as e:
            yield str(e)


def _names(config: Config) -> list[str]:
    enabled = [name for name in SINKS.built_in() if SINKS.find(name).enabled(config)]
    return list(dict.fromkeys([*enabled, *config.reporting.sinks]))


def _open(name: str, config: Config, run_dir: Path) -> Sink:
    sink = SINKS.find(name).open(config, run_dir)
    if missing := [method for method in _METHODS if not callable(getattr(sink, method, None))]:
        raise ConfigError(
            [
                f"{SINKS.option}: {name} opened {type(sink).__name__}, which lacks {', '.join(missing)}; subclass "
                f"{Sink.__module__}.Sink"
            ]
        )
    return sink
