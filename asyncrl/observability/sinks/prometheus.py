"""HTTP endpoint of the driver: ``/metrics`` for Prometheus, ``/health`` for liveness probes."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.observability.number_format import json_numbers
from asyncrl.observability.sinks.base import Sink, SinkSpec
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Batch

PREFIX = "asyncrl_"
SILENT_S = 60.0  # without an answer from any actor: all hang, or the driver does


class PrometheusSink(Sink):
    """Serves from its own threads, so that ``/health`` answers 503 when the driver hangs.

    ``/metrics``: the last value of each metric (``fully_async/queue/depth`` → ``asyncrl_fully_async_queue_depth``),
    counters as ``…_total``, and the seconds since each actor last answered the driver, all labelled with the run's
    name. ``port``: the bound port, also if 0 was given."""

    def __init__(self, run: str, host: str, port: int) -> None:
        """Raises OSError if it cannot listen there."""
        self._run = run
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = {}
        self._counters: Counter[str] = Counter()
        self._heard_s: dict[str, float] = {}  # actor, other than the driver → time of its last answer
        self._step = 0
        registry = CollectorRegistry()
        registry.register(self)
        self._metrics_app = make_wsgi_app(registry)
        self._server, self._thread = start_http_server(port, host, registry)
        self._server.set_app(self._answer)
        self.port = self._server.server_port

    def begin(self, step: int) -> None:
        with self._lock:
            self._step = step

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = json_numbers(values)
        with self._lock:
            if "perf/step_s" in values:  # else of a validation, which may end long after its step
                self._step = step
            self._gauges |= {name: float("nan") if value is None else value for name, value in numbers.items()}

    def spans(self, batch: Batch) -> None:
        with self._lock:
            if batch.at_s and batch.actor != "driver":
                self._heard_s[batch.actor] = now_s()
            self._gauges |= batch.gauges
            self._counters.update(batch.counters)

    def left(self, actor: str) -> None:
        with self._lock:
            self._heard_s.pop(actor, None)

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            gauges = {**self._gauges, "step": self._step}
            counters = dict(self._counters)
            heard_s = dict(self._heard_s)
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            by_name = {PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", metric): metric for metric in values}
            for name, metric in sorted(by_name.items()):
                family = kind(name, metric, labels=["run"])
                family.add_metric([self._run], values[metric])
                yield family
        silence = GaugeMetricFamily(
            PREFIX + "seconds_since_heard", "seconds since the actor's last answer", labels=["run", "actor"]
        )
        for actor, at_s in sorted(heard_s.items()):
            silence.add_metric([self._run, actor], round(now_s() - at_s, 1))
        yield silence

    def _answer(self, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """WSGI application."""
        match request["PATH_INFO"]:
            case "/metrics":
                # Without Accept the library answers in the plain format. Scrapers prefer OpenMetrics, but that forbids
                # a gauge and a counter of one name.
                return self._metrics_app({**request, "HTTP_ACCEPT": ""}, start)
            case "/health":
                with self._lock:
                    silent_s = {actor: round(now_s() - heard_s, 1) for actor, heard_s in self._heard_s.items()}
                    step = self._step
                healthy = not silent_s or min(silent_s.values()) < SILENT_S
                status = "ok" if healthy else f"no actor has answered the driver for {SILENT_S:g} s"
                start("200 OK" if healthy else "503 Service Unavailable", [("Content-Type", "application/json")])
                return [json.dumps({"status": status, "step": step, "seconds_since_heard": silent_s}).encode()]
            case _:
                start("404 Not Found", [("Content-Type", "text/plain")])
                return [b"expected /metrics or /health"]


def _open(config: Config, run_dir: Path) -> PrometheusSink:
    host, port = config.reporting.prometheus.host, config.reporting.prometheus.port
    try:
        return PrometheusSink(config.name, host, port)
    except OSError as e:
        raise ConfigError([f"reporting.prometheus.port: {port} cannot be served: {e}"]) from None


def _problems(config: Config) -> Iterator[str]:
    if not config.reporting.prometheus.port:
        yield "reporting.prometheus.port: expected a port to serve, found 0, but reporting.sinks names prometheus"


SINK = SinkSpec(open=_open, enabled=lambda config: bool(config.reporting.prometheus.port), problems=_problems)
