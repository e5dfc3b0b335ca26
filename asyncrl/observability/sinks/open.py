"""Opens the sinks of a run: the built-in ones that the config turns on, then those that reporting.sinks names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.observability.sinks.base import SINKS, Sink
from asyncrl.observability.sinks.hub import Hub
from asyncrl.plugins.registry import UnknownPart


def open_hub(config: Config, run_dir: Path) -> Hub:
    """Raises ConfigError."""
    if problems := list(sink_problems(config)):
        raise ConfigError(problems)
    sinks: list[Sink] = []
    try:
        sinks.extend(SINKS.checked(SINKS.find(name).open(config, run_dir), Sink, name) for name in _names(config))
    except Exception as e:
        Hub(sinks).close(failed=str(e))
        if isinstance(e, UnknownPart):
            raise ConfigError([str(e)]) from None
        raise
    return Hub(sinks)


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
