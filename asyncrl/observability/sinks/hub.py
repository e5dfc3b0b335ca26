"""Fan-out of metrics, spans and trajectories to all sinks; a failing sink never stops the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.observability.sinks.base import Sink
from asyncrl.observability.telemetry.recorder import Batch

log = logging.getLogger(__name__)


class Hub:
    """Calls its sinks in order, in the caller's thread::

        hub = Hub([ConsoleSink(total_steps=100), JsonlSink(run_dir)])
        hub.begin(0)
        hub.metrics(step, values)
        hub.spans(recorder.drain())
        hub.trajectories(rows)
        hub.close()                           # or failed="replica/1 is gone", or stopped="SIGINT"

    A sink that raises is logged once, with its traceback, and switched off: only its `close` is still called. From then
    on the metrics of the other sinks include ``reporting/failed_sinks``. ``failures``: class name → error message.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._failed: list[Sink] = []
        self.failures: dict[str, str] = {}

    def begin(self, step: int) -> None:
        for sink in list(self._sinks):
            self._call(sink, "begin", step)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        for sink in list(self._sinks):
            failed = {"reporting/failed_sinks": len(self._failed)} if self._failed else {}
            self._call(sink, "metrics", step, {**values, **failed})

    def spans(self, batch: Batch) -> None:
        for sink in list(self._sinks):
            self._call(sink, "spans", batch)

    def left(self, actor: str) -> None:
        for sink in list(self._sinks):
            self._call(sink, "left", actor)

    def trajectories(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for sink in list(self._sinks):
            self._call(sink, "trajectories", rows)

    def close(self, failed: str | None = None, stopped: str | None = None) -> None:
        """Closes every sink, including those switched off; see `Sink.close`. Idempotent."""
        for sink in self._sinks + self._failed:
            self._call(sink, "close", failed, stopped)
        self._sinks, self._failed = [], []

    def _call(self, sink: Sink, method: str, *args: Any) -> None:
        try:
            getattr(sink, method)(*args)
        except Exception as error:
            if sink in self._failed:
                return  # logged already; this is its `close`
            self._sinks = [other for other in self._sinks if other is not sink]
            self._failed.append(sink)
            name = type(sink).__name__
            message = self.failures[name] = f"{type(error).__name__}: {error}"
            log.exception("reporting: %s failed in %s and is switched off (%s)", name, method, message)
