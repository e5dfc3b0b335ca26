"""Progress for people: one aligned line per train step, and a sign of life when a step takes long."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TextIO

from asyncrl.config.schema import DeadlinesConfig
from asyncrl.reporting.jsonl import is_number, json_number
from asyncrl.telemetry.recorder import Batch

_HEADER_EVERY = 25  # lines
_PACE_STEPS = 20  # the ETA follows the pace of this many steps
_NONE = "–"
_OF_THE_LAST_SYNC = ("param_sync/", "fully_async/version")

#: metric names of the sync session's phases, in their order; each phase has a deadline of its name
SYNC_PHASES = tuple(f"param_sync/{field.name}" for field in fields(DeadlinesConfig))


def short_number(value: float) -> str:
    """Three significant digits and a thousands' letter: 0.531, 84.2, 1.27k, 3.40M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            value, suffix = value / limit, letter
            break
    else:
        suffix = ""
    digits = max(0, 2 - math.floor(math.log10(abs(value) * 1.0005))) if abs(value) >= 0.01 else 3
    return f"{value:.{min(digits, 3)}f}{suffix}"


def short_seconds(seconds: float) -> str:
    """0.31s, 12.4s, 4m10s, 2h05m, 3d04h."""
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{s:02d}s"
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


class Console:
    """A sink that prints to ``stream``: a line when a new step's metrics come, one for validation results, and from
    `spans` one when nothing was printed for ``every_s``. Version and sync seconds are those of the last parameter sync.
    Colours only on a terminal without NO_COLOR."""

    def __init__(
        self,
        total_steps: int,
        every_s: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._every_s, self._clock = total_steps, every_s, clock
        self._stream = stream or sys.stdout
        self._colour = self._stream.isatty() and "NO_COLOR" not in os.environ
        self._began_s = self._printed_s = clock()
        self._rows = 0
        self._step = 0
        self._steps: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)  # (step, when it was reported)
        self._synced: dict[str, float] = {}  # figures of the last parameter sync: not every step has one
        self._gauges: dict[str, float] = {}
        self._doing: dict[str, str] = {}  # actor → its longest open span

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: json_number(value) for name, value in values.items() if is_number(value)}
        validation = {name: v for name, v in numbers.items() if name.startswith("validation/") and v is not None}
        synced = {name: v for name, v in numbers.items() if name.startswith(_OF_THE_LAST_SYNC) and v is not None}
        training = {
            name: v
            for name, v in numbers.items()
            if not name.startswith(("validation/", "reporting/", *_OF_THE_LAST_SYNC))
        }
        self._synced |= synced
        if training and (not self._steps or step != self._steps[-1][0]):
            if step < self._step:  # back at a checkpoint
                self._steps.clear()
            self._step = step
            self._steps.append((step, self._clock()))
            known = {name: v for name, v in training.items() if v is not None}
            columns = self._columns(step, self._synced | known)
            if self._rows % _HEADER_EVERY == 0:
                self._print("  ".join(f"{name:>{width}}" for name, width, _ in columns), dim=True)
            self._print("  ".join(f"{text:>{width}}" for _, width, text in columns))
            self._rows += 1
        if validation:
            version = [validation.pop(f"validation/{part}", None) for part in ("lineage", "version")]
            of = f" of version {version[0]:.0f}.{version[1]:.0f}" if None not in version else ""
            figures = ", ".join(
                f"{k.split('/', 1)[1].replace('_', ' ')} {short_number(v)}" for k, v in validation.items()
            )
            self._print(f"{_of(step, self._total):>{self._step_width()}}  validation{of}: {figures}", bold=True)

    def spans(self, batch: Batch) -> None:
        self._gauges |= batch.gauges
        self._doing.pop(batch.actor, None)
        if batch.open_spans:
            longest = min(batch.open_spans, key=lambda span: span.start_s)
            self._doing[batch.actor] = f"{batch.actor}: {longest.name} {short_seconds(longest.end_s - longest.start_s)}"
        if self._clock() - self._printed_s >= self._every_s:
            gauges = [
                f"{label} {_plain(self._gauges[name])}"
                for name, label in (("fully_async/queue/depth", "queued"), ("fully_async/in_flight", "in flight"))
                if name in self._gauges
            ]
            busy = [self._doing[actor] for actor in sorted(self._doing)]
            shown = gauges + busy[:4] + ([f"and {len(busy) - 4} more"] if len(busy) > 4 else [])
            after = short_seconds(self._clock() - (self._steps[-1][1] if self._steps else self._began_s))
            since = f"{after} after step {self._step}" if self._steps else f"{after} after the start"
            self._print(f"{'…':>{self._step_width()}}  {' · '.join([since, *shown])}", dim=True)

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        took = short_seconds(self._clock() - self._began_s)
        done = _of(self._step, self._total)
        if failed is not None:
            self._print(f"FAILED after step {done}, {took}: {failed}", bold=True)
        elif stopped is not None:
            self._print(f"stopped after step {done}, {took}: {stopped}", bold=True)
        else:
            self._print(f"finished: {done} steps in {took}", bold=True)

    def _columns(self, step: int, values: Mapping[str, float]) -> list[tuple[str, int, str]]:
        """(heading, width, text) of each column; every line has them all."""

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
        (first, then_s), (last, now_s) = self._steps[0], self._steps[-1]
        return short_seconds((self._total - last) * (now_s - then_s) / (last - first)) if last < self._total else "done"

    def _step_width(self) -> int:
        return max(7, 2 * len(str(self._total)) + 1)

    def _print(self, line: str, dim: bool = False, bold: bool = False) -> None:
        if self._colour and (dim or bold):
            line = f"\x1b[{2 if dim else 1}m{line}\x1b[0m"
        print(line, file=self._stream, flush=True)
        self._printed_s = self._clock()


def _of(step: int, total: int) -> str:
    return f"{step}/{total}"


def _plain(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"
