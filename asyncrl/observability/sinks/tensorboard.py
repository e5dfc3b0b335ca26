"""Metrics and trajectories as TensorBoard event files: ``tensorboard --logdir runs``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.observability.number_format import json_numbers
from asyncrl.observability.sinks.base import Sink, SinkSpec

FOLDER = "tensorboard"


class TensorboardSink(Sink):
    """Writes to ``run_dir/tensorboard``, from `begin` on. Of steps that a resumed run repeats, TensorBoard shows the
    later values."""

    def __init__(self, run_dir: Path | str) -> None:
        self._folder = Path(run_dir) / FOLDER
        self._writer: Any = None

    def begin(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1 if step else None)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        for name, number in json_numbers(values).items():
            if number is not None:
                self._writer.add_scalar(name, number, step)

    def trajectories(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for i, row in enumerate(rows):
            text = f"reward {row['reward']}\n\n    {row['prompt']}\n\n    {row['response']}"
            self._writer.add_text(f"trajectories/{i}", text, row["step"])

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        if self._writer is None:
            return
        if reason := failed or stopped:
            self._writer.add_text("ended", reason)
        self._writer.close()


def _problems(config: Config) -> Iterator[str]:
    if importlib.util.find_spec("tensorboard") is None:
        yield "reporting.tensorboard: the package tensorboard is not installed; `pip install tensorboard` adds it"


SINK = SinkSpec(
    open=lambda config, run_dir: TensorboardSink(run_dir),
    enabled=lambda config: config.reporting.tensorboard,
    problems=_problems,
)
