"""Console output: one aligned line per train step, and a progress line on a terminal or status lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TextIO

from asyncrl.config.schema import DeadlinesConfig
from asyncrl.observability.number_format import json_numbers, short_number, short_seconds
from asyncrl.observability.sinks.base import Sink, SinkSpec
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Batch
from asyncrl.sample_queue.messages import DROPPED_METRICS

_HEADER_EVERY = 25  # lines
_PACE_STEPS = 20  # window of the ETA
_MAX_ACTORS = 4  # in a status
_SHOW_EVERY_S = 1.0  # the progress line, while batches of many actors arrive at once
_NONE = "–"
_SYNC_METRICS = ("param_sync/", "fully_async/version")

#: metrics of a sync session's phases, in order; each phase has a deadline of the same name
SYNC_PHASES = tuple(f"param_sync/{field.name}" for field in fields(DeadlinesConfig))


class ConsoleSink(Sink):
    """Prints to ``stream``, by default stdout: a line for each train step, and one for validation results.

    On a terminal, a progress line below them shows steps, time, ETA and the longest open span of each actor. Elsewhere,
    and with NO_COLOR, output is plain text, with a status line after ``every_s`` without other output. The columns
    version and sync show the last parameter sync."""

    def __init__(
        self,
        total_steps: int,
        every_s: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._total, self._every_s, self._clock = total_steps, every_s, clock
        self._stream = stream or sys.stdout
        self._terminal = None
        if self._stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
            from asyncrl.observability.sinks.terminal import Terminal  # rich is slow to import

            self._terminal = Terminal(self._stream, total_steps)
        self._began_s = self._printed_s = clock()
        self._shown_s = -math.inf  # on the progress line
        self._rows = 0
        self._step = 0
        self._steps: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)  # (step, time of its report)
        self._synced: dict[str, float] = {}  # metrics of the last parameter sync; not every step has one
        self._gauges: dict[str, float] = {}
        self._open_spans: dict[str, str] = {}  # actor → its longest open span

    def begin(self, step: int) -> None:
        self._step = step

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in json_numbers(values).items() if not name.startswith("reporting/")}
        known = {name: value for name, value in numbers.items() if value is not None}
        self._synced |= {name: value for name, value in known.items() if name.startswith(_SYNC_METRICS)}
        trained = any(not name.startswith(("validation/", *_SYNC_METRICS)) for name in numbers)
        if trained and (not self._steps or step != self._steps[-1][0]):
            if step < self._step:  # rolled back to a checkpoint
                self._steps.clear()
            self._step = step
            self._steps.append((step, self._clock()))
            columns = self._columns(step, self._synced | known)
            if self._rows % _HEADER_EVERY == 0:
                self._print("  ".join(f"{name:>{width}}" for name, width, _ in columns), "dim")
            self._print("  ".join(f"{text:>{width}}" for _, width, text in columns))
            self._rows += 1
        if validation := {name: value for name, value in known.items() if name.startswith("validation/")}:
            version = [validation.pop(f"validation/{part}", None) for part in ("lineage", "version")]
            of = f" of version {version[0]:.0f}.{version[1]:.0f}" if None not in version else ""
            figures = ", ".join(
                f"{k.split('/', 1)[1].replace('_', ' ')} {short_number(v)}" for k, v in validation.items()
            )
            self._print(f"{_of(step, self._total):>{self._step_width()}}  validation{of}: {figures}", "bold")
        self._show_progress()

    def spans(self, batch: Batch) -> None:
        self._gauges |= batch.gauges
        self._open_spans.pop(batch.actor, None)
        if batch.open_spans:
            longest = min(batch.open_spans, key=lambda span: span.start_s)
            seconds = short_seconds(longest.end_s - longest.start_s)
            self._open_spans[batch.actor] = f"{batch.actor}: {longest.name} {seconds}"
        if self._clock() - self._shown_s >= _SHOW_EVERY_S:
            self._show_progress()
        if self._terminal is None and self._clock() - self._printed_s >= self._every_s:
            self._print(f"{'…':>{self._step_width()}}  {self._status()}")

    def left(self, actor: str) -> None:
        self._open_spans.pop(actor, None)

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        if self._terminal:
            self._terminal.close()
        took = short_seconds(self._clock() - self._began_s)
        done = _of(self._step, self._total)
        if failed is not None:
            self._print(f"FAILED after step {done}, {took}: {failed}", "bold")
        elif stopped is not None:
            self._print(f"stopped after step {done}, {took}: {stopped}", "bold")
        else:
            self._print(f"finished: {done} steps in {took}", "bold")

    def _show_progress(self) -> None:
        self._shown_s = self._clock()
        if self._terminal:
            self._terminal.show(self._step, self._eta(), self._status())

    def _status(self) -> str:
        """Time since the last step; queued and in-flight groups, and those dropped so far by reason; open spans."""
        gauges = [
            f"{label} {_plain(self._gauges[name])}"
            for name, label in (("fully_async/queue/depth", "queued"), ("fully_async/in_flight", "in flight"))
            if name in self._gauges
        ]
        if dropped := {k: n for k, n in self._gauges.items() if k.startswith(DROPPED_METRICS) and n}:
            counts = (
                f"{_plain(n)} {k.removeprefix(DROPPED_METRICS).replace('_', ' ')}" for k, n in sorted(dropped.items())
            )
            gauges.append(f"dropped {', '.join(counts)}")
        spans = [self._open_spans[actor] for actor in sorted(self._open_spans)]
        more = [f"and {len(spans) - _MAX_ACTORS} more"] if len(spans) > _MAX_ACTORS else []
        after = short_seconds(self._clock() - (self._steps[-1][1] if self._steps else self._began_s))
        since = f"{after} after step {self._step}" if self._steps else f"{after} after the start"
        return " · ".join([since, *gauges, *spans[:_MAX_ACTORS], *more])

    def _columns(self, step: int, values: Mapping[str, float]) -> list[tuple[str, int, str]]:
        """(heading, width, text) of each column; the columns are the same in every line."""

        def text(*names: str, how: Callable[[float], str] = short_number) -> str:
            return "/".join(how(values[name]) if name in values else _NONE for name in names)

        phases = [values[name] for name in SYNC_PHASES if name in values]
        pool = "fully_async/{}/idle_ratio".format
        return [
            ("step", self._step_width(), _of(step, self._total)),
            ("reward", 6, text("critic/rewards/mean")),
            ("acc", 5, text("rollout/accuracy")),
            ("stale mean/max", 14, text("fully_async/staleness/mean", "fully_async/staleness/max", how=_plain)),
            ("queue", 5, text("fully_async/queue/depth", how=_plain)),
            ("flight", 6, text("fully_async/in_flight", how=_plain)),
            ("idle train/roll", 15, text(pool("trainer"), pool("rollouter"), how=_percent)),
            ("tok/s train/roll", 16, text("perf/trainer_tokens_per_s", "perf/rollout_tokens_per_s")),
            ("version", 7, text("fully_async/version", how=_plain)),
            ("sync", 6, short_seconds(math.fsum(phases)) if phases else _NONE),
            ("eta", 6, self._eta()),
        ]

    def _eta(self) -> str:
        if len(self._steps) < 2:
            return _NONE
        (first, then_s), (last, last_s) = self._steps[0], self._steps[-1]
        return (
            short_seconds((self._total - last) * (last_s - then_s) / (last - first)) if last < self._total else "done"
        )

    def _step_width(self) -> int:
        return max(7, 2 * len(str(self._total)) + 1)

    def _print(self, line: str, style: str = "") -> None:
        if self._terminal:
            self._terminal.line(line, style)
        else:
            print(line, file=self._stream, flush=True)
        self._printed_s = self._clock()


def _of(step: int, total: int) -> str:
    return f"{step}/{total}"


def _plain(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


SINK = SinkSpec(
    open=lambda config, run_dir: ConsoleSink(config.trainer.total_steps, config.reporting.console_every_s),
    enabled=lambda config: True,
)
