"""The sinks of a run, as its config asks for them."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.reporting.console import Console
from asyncrl.reporting.hub import Hub
from asyncrl.reporting.jsonl import JsonlSink
from asyncrl.reporting.prometheus import PrometheusSink
from asyncrl.reporting.tensorboard import TensorboardSink
from asyncrl.reporting.timeline import Timeline
from asyncrl.reporting.trajectories import TrajectoryFile
from asyncrl.reporting.wandb_sink import WandbSink


def open_hub(config: Config, run_dir: Path) -> Hub:
    """Console, files of the run folder, wandb unless it is disabled, and what else has been asked for. Raises
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
        about = asdict(config) | ({"git": git} if (git := git_state()) else {})
        sinks.append(WandbSink(r.wandb, config.name, run_dir, about))
    if r.tensorboard:
        sinks.append(TensorboardSink(run_dir))
    return Hub(sinks)


def git_state() -> dict[str, str | bool]:
    """Commit and branch of the repository that the run was started in, and whether it was changed since; empty if it is
    none, as in a job's copy of one."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        commit, branch = git("rev-parse", "HEAD"), git("rev-parse", "--abbrev-ref", "HEAD")
        return {"commit": commit, "branch": branch, "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}
