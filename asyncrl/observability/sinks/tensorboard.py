"""Metrics and trajectories as TensorBoard event files: ``tensorboard --logdir runs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.load import ConfigError
from asyncrl.observability.number_format import json_numbers
from asyncrl.observability.sinks.base import Sink, SinkSpec

FOLDER = "tensorboard"


class TensorboardSink(Sink):
    """Writes to ``run_dir/tensorboard``. Raises ConfigError if the package is missing."""

    def __init__(self, run_dir: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                ["reporting.tensorboard: the package tensorboard is not installed; `pip install tensorboard` adds it"]
            ) from None
        self._writer = SummaryWriter(str(Path(run_dir) / FOLDER))

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        for name, number in json_numbers(values).items():
            if number is not None:
                self._writer.add_scalar(name, number, step)

    def trajectories(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for i, row in enumerate(rows):
            text = f"reward {row['reward']}\n\n    {row['prompt']}\n\n    {row['response']}"
            self._writer.add_text(f"trajectories/{i}", text, row["step"])

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        if reason := failed or stopped:
            self._writer.add_text("ended", reason)
        self._writer.close()


SINK = SinkSpec(
    open=lambda config, run_dir: TensorboardSink(run_dir), enabled=lambda config: config.reporting.tensorboard
)
