"""Metrics to Weights & Biases: offline unless told otherwise, without a login and without a word on the console."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from asyncrl.config.schema import WandbConfig
from asyncrl.reporting.jsonl import METRICS_FILE, is_number, json_number, read_lines
from asyncrl.telemetry.recorder import Batch

_MODES = ("offline", "online", "disabled")
TABLE = ("step", "prompt_id", "prompt", "response", "reward", "versions", "finish", "response_tokens", "uid")
_TRAINED = "actor/loss"  # what only a train step's metrics have
_OF_A_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set for the driver of a submitted job
_SERVICE = "WANDB_SERVICE"


class WandbSink:
    """One wandb run, kept under ``run_dir/wandb`` (send an offline one later with ``wandb sync``).

    Every metric is drawn over its train step: ``step`` is logged as a metric of its own and declared as the x axis,
    because wandb drops what arrives for an earlier step than its last, and a validation result may. Numbers and strings
    are kept; whatever else comes is left out. Every ``table_every_steps`` the sampled trajectories since the last time
    become a table.

    A resumed run goes on with the same wandb run. Steps that it takes again, as one does that went back to a
    checkpoint, are not logged again: of metrics.jsonl the later line counts, of wandb the earlier.
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
        self._table_every = config.table_every_steps
        self._rows: list[Sequence[Any]] = []  # of trajectories, since the last table
        before = read_lines(Path(run_dir) / METRICS_FILE)
        self._trained_step = max((row["step"] for row in before if _TRAINED in row), default=0)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        if _TRAINED in values:
            if step <= self._trained_step:
                return
            self._trained_step = step
        row = {name: kept for name, value in values.items() if (kept := _loggable(value)) is not None}
        self._run.log(row | {"step": int(step)})

    def trajectories(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `asyncrl.reporting.trajectories.sampled_rows`."""
        self._rows += [[_cell(row.get(column)) for column in TABLE] for row in rows]
        if rows and self._table_every and rows[0]["step"] % self._table_every == 0:
            table = wandb.Table(columns=list(TABLE), data=self._rows)
            self._run.log({"trajectories": table, "step": int(rows[0]["step"])})
            self._rows = []

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


def _cell(value: Any) -> Any:
    """Version spans as text, such as ``0.3 · 0.4 from 17``; else as it is."""
    if not isinstance(value, list):
        return value
    return " · ".join(f"{s['version']} from {s['start']}" if s["start"] else s["version"] for s in value)


def _loggable(value: Any) -> float | str | None:
    if is_number(value):
        number = json_number(value)
        return float("nan") if number is None else number
    return value if isinstance(value, str) else None
