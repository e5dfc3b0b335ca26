"""The one place where the driver reports to: every sink hears of it, and a sink that fails cannot stop the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from asyncrl.telemetry.recorder import Batch, Sink

log = logging.getLogger(__name__)


@runtime_checkable
class TrajectorySink(Protocol):
    """A sink that also takes sampled trajectories, see `asyncrl.reporting.trajectories`."""

    def trajectories(self, rows: Sequence[Mapping[str, Any]]) -> None: ...


class Hub:
    """Hands metrics, spans and trajectories to its sinks, in order, from the caller's thread::

        hub = Hub([Console(total_steps=100), JsonlSink(run_dir), WandbSink(...)])
        hub.metrics(step, values)
        hub.spans(recorder.drain())
        hub.close()                           # or failed="replica/1 is gone", or stopped="SIGINT"

    A sink that raises is named on stderr once, with its traceback, and gets nothing more but its `close`. The others
    go on, and hear of it: ``reporting/failed_sinks`` joins their metrics. ``failures`` holds the messages by name.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._failed: list[Sink] = []
        self.failures: dict[str, str] = {}

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        for sink in list(self._sinks):
            known = dict(values) | ({"reporting/failed_sinks": len(self._failed)} if self._failed else {})
            self._call(sink, "metrics", step, known)

    def spans(self, batch: Batch) -> None:
        for sink in list(self._sinks):
            self._call(sink, "spans", batch)

    def trajectories(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows as `asyncrl.reporting.trajectories.sampled_rows` makes them."""
        for sink in list(self._sinks):
            if isinstance(sink, TrajectorySink):
                self._call(sink, "trajectories", rows)

    def close(self, failed: str | None = None, stopped: str | None = None) -> None:
        """Close every sink, those switched off included, saying how the run ended (see `Sink`). Idempotent."""
        for sink in self._sinks + self._failed:
            self._call(sink, "close", failed, stopped)
        self._sinks, self._failed = [], []

    def _call(self, sink: Sink, method: str, *args: Any) -> None:
        try:
            getattr(sink, method)(*args)
        except Exception as error:  # whatever a sink does wrong, training must not pay for it
            if sink in self._failed:
                return  # reported already; this is its `close`
            self._sinks = [other for other in self._sinks if other is not sink]
            self._failed.append(sink)
            name = type(sink).__name__
            self.failures[name] = f"{type(error).__name__}: {error}"
            told = self.failures[name]
            log.exception("reporting: %s failed in %s and is switched off (%s); the run goes on", name, method, told)
