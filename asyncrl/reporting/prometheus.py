"""``/metrics`` and ``/health`` over HTTP: what Prometheus scrapes, and what asks whether the run is alive."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web

from asyncrl.reporting.jsonl import is_number, json_number
from asyncrl.telemetry.recorder import Batch, now_s

PREFIX = "asyncrl_"
SILENT_S = 60.0  # after which a driver that drained no actor is not well


class PrometheusSink:
    """Serves from a thread of its own: a driver that hangs is told by ``/health`` with status 503.

    ``/metrics``: the last value of each metric (``fully_async/queue/depth`` → ``asyncrl_fully_async_queue_depth``),
    counters as ``…_total``, and when each actor was heard of, all labelled with the run's name. ``port`` is the one
    that was found, if 0 was asked for."""

    def __init__(self, run: str, host: str, port: int) -> None:
        """Raises OSError if it cannot listen there."""
        self._run = run
        self._lock = threading.Lock()
        self._gauges: dict[str, float] = {}
        self._counters: Counter[str] = Counter()
        self._heard_s: dict[str, float] = {}  # actor → when
        self._step = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="prometheus", daemon=True)
        self._thread.start()
        try:
            listening = asyncio.run_coroutine_threadsafe(self._listen(host, port), self._loop)
            self._runner, self.port = listening.result()
        except OSError:
            self._end()
            raise

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: json_number(value) for name, value in values.items() if is_number(value)}
        with self._lock:
            self._step = step
            self._gauges |= {name: float("nan") if value is None else value for name, value in numbers.items()}

    def spans(self, batch: Batch) -> None:
        with self._lock:
            self._heard_s[batch.actor] = now_s()
            self._gauges |= batch.gauges
            self._counters.update(batch.counters)

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self, host: str, port: int) -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics), web.get("/health", self._health)])
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError:
            await runner.cleanup()
            raise
        return runner, runner.addresses[0][1]

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text="\n".join([*self._lines(), ""]), content_type="text/plain")

    async def _health(self, request: web.Request) -> web.Response:
        with self._lock:
            silent_s = {actor: round(now_s() - heard_s, 1) for actor, heard_s in self._heard_s.items()}
            step = self._step
        well = not silent_s or min(silent_s.values()) < SILENT_S
        status = {"status": "ok" if well else "the driver is stuck", "step": step, "seconds_since_heard": silent_s}
        return web.json_response(status, status=200 if well else 503)

    def _lines(self) -> Iterator[str]:
        """The text format of Prometheus."""
        run = f'run="{_label(self._run)}"'
        with self._lock:
            gauges = {_name(name): value for name, value in self._gauges.items()} | {PREFIX + "step": self._step}
            counters = {f"{_name(name)}_total": value for name, value in self._counters.items()}
            heard_s = dict(self._heard_s)
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in sorted(values.items()):
                yield f"# TYPE {name} {kind}"
                yield f"{name}{{{run}}} {float(value)!r}"
        yield f"# TYPE {PREFIX}seconds_since_heard gauge"
        for actor, at_s in sorted(heard_s.items()):
            yield f'{PREFIX}seconds_since_heard{{{run},actor="{_label(actor)}"}} {now_s() - at_s:.1f}'


def _name(metric: str) -> str:
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
