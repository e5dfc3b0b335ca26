"""The sinks of a run, as its config asks for them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.reporting.console import Console
from asyncrl.reporting.hub import Hub
from asyncrl.reporting.jsonl import JsonlSink
from asyncrl.reporting.prometheus import PrometheusSink
from asyncrl.reporting.timeline import Timeline
from asyncrl.reporting.trajectories import TrajectoryFile
from asyncrl.reporting.wandb_sink import WandbSink


def open_hub(config: Config, run_dir: Path) -> Hub:
    """Console, files of the run folder, Prometheus if it has a port, and wandb unless it is disabled. Raises
    ConfigError."""
    r = config.reporting
    sinks: list[Any] = [
        Console(config.trainer.total_steps, r.console_every_s),
        JsonlSink(run_dir),
        Timeline(run_dir),
        TrajectoryFile(run_dir),
    ]
    if r.prometheus.port:
        try:
            sinks.append(PrometheusSink(config.name, r.prometheus.host, r.prometheus.port))
        except OSError as e:
            raise ConfigError([f"reporting.prometheus.port: {r.prometheus.port} cannot be served: {e}"]) from None
    if r.wandb.mode != "disabled":
        sinks.append(WandbSink(r.wandb, config.name, run_dir, asdict(config)))
    return Hub(sinks)
