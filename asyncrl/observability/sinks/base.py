"""Sinks: interface, declaration and registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Batch
from asyncrl.plugins.registry import Registry


class Sink:
    """Destination of a run's metrics, spans and sampled trajectories.

    A sink overrides what it consumes; the default methods do nothing. All calls come from the driver's event loop, in
    order: a call that blocks delays the run. A sink that raises is switched off, and the run continues."""

    def begin(self, step: int) -> None:
        """Training begins, or a resumed run goes on, after so many steps."""

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Metrics of a train step, or validation results measured at ``step``; steps may repeat or go back."""

    def spans(self, batch: Batch) -> None:
        """What one actor recorded since the last call, about every two seconds: spans, counters, gauges, failed
        samples."""

    def left(self, actor: str) -> None:
        """A replica was removed; its name may come again."""

    def trajectories(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Samples of one train step, see `asyncrl.observability.trajectories.sampled_rows`."""

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        """End of the run. ``failed``: the error that ended it; ``stopped``: the reason why it ended before its last
        step (a signal, the end of the prompts); both None after the last step."""


@dataclass(frozen=True)
class SinkSpec:
    """Declaration of a sink.

    ``open(config, run_dir)`` returns the sink; it raises ConfigError for problems that only opening can detect, such as
    a port in use. ``enabled``: True if the config's own options turn the sink on; a sink named in reporting.sinks is
    always on. ``problems``: one line per problem with the sink's options, each beginning with the option's key; called
    only for sinks that are on."""

    open: Callable[[Config, Path], Sink]
    enabled: Callable[[Config], bool] = lambda config: False
    problems: Callable[[Config], Iterable[str]] = lambda config: ()


SINKS: Registry[SinkSpec] = Registry(
    kind="sink",
    option="reporting.sinks",
    package="asyncrl.observability.sinks",
    attribute="SINK",
    entry_points="asyncrl.sinks",
    interface=SinkSpec,
)
