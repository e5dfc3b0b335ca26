"""Metrics to Weights & Biases: offline unless told otherwise, without a login and without a word on the console."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from asyncrl.config.schema import WandbConfig
from asyncrl.reporting.jsonl import is_number, json_number
from asyncrl.telemetry.recorder import Batch

_MODES = ("offline", "online", "disabled")
_OF_A_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set for the driver of a submitted job
_SERVICE = "WANDB_SERVICE"


class WandbSink:
    """One wandb run, kept under ``run_dir/wandb`` (send an offline one later with ``wandb sync``).

    Every metric is drawn over its train step: ``step`` is logged as a metric of its own and declared as the x axis,
    because wandb drops what arrives for an earlier step than its last, and a validation result may. Numbers and strings
    are kept; whatever else comes is left out.
    """

    def __init__(self, config: WandbConfig, run_name: str, run_dir: Path | str, run_config: Mapping[str, Any]) -> None:
        """``run_config``: the whole resolved configuration as nested plain values. Raises ValueError for an unknown
        mode and wandb's own errors (a missing login, for one) when ``online``."""
        if config.mode not in _MODES:
            raise ValueError(f"reporting.wandb.mode must be one of {', '.join(_MODES)}, found {config.mode!r}")
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        self._detached = config.mode != "disabled" and _OF_A_RAY_JOB in os.environ and _SERVICE not in os.environ
        if self._detached:
            # `ray job stop` signals every process below the job's, while the run has its last step to log: wandb's
            # service must not be among them, and is not if the process that starts it ends
            os.environ[_SERVICE] = _wandb("beta", "core", "start", "--idle-timeout", "60s")
        self._run = wandb.init(
            mode=config.mode,  # type: ignore[arg-type]
            project=config.project,
            entity=config.entity or None,
            name=run_name,
            tags=config.tags or None,
            dir=str(run_dir),
            id=_run_id(Path(run_dir) / "wandb-id") if config.mode != "disabled" else None,
            resume="allow" if config.mode == "online" else None,
            config=dict(run_config),
            reinit="create_new",
            # Its own terminal capture would swallow the console sink's lines into the run's files.
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        row = {name: kept for name, value in values.items() if (kept := _loggable(value)) is not None}
        self._run.log(row | {"step": int(step)})

    def spans(self, batch: Batch) -> None:
        pass

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        """Ends the run: with exit code 1 if it failed, and what failed or stopped it in its summary."""
        for name, reason in (("failed", failed), ("stopped", stopped)):
            if reason is not None:
                self._run.summary[name] = reason
        exit_code = 0 if failed is None else 1
        self._run.finish(exit_code=exit_code)
        # `finish` may return before wandb's service process has written an offline run's file; this waits for it.
        wandb.teardown(exit_code=exit_code)
        if self._detached:
            _wandb("beta", "core", "stop")
            del os.environ[_SERVICE]


def _wandb(*command: str) -> str:
    """Run wandb's command line; returns what it prints. Raises subprocess.SubprocessError."""
    done = subprocess.run(
        [sys.executable, "-m", "wandb", *command], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def _run_id(path: Path) -> str:
    """The id that the run has had from its start: a resumed one goes on under it."""
    if not path.is_file():
        path.write_text(secrets.token_hex(4))
    return path.read_text()


def _loggable(value: Any) -> float | str | None:
    if is_number(value):
        number = json_number(value)
        return float("nan") if number is None else number
    return value if isinstance(value, str) else None
