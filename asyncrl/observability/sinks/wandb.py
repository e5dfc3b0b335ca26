"""Sends metrics and trajectory tables to Weights & Biases; by default offline, which needs no login."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.load import ConfigError, to_yaml
from asyncrl.config.schema import Config, WandbConfig
from asyncrl.disk.files import write_whole
from asyncrl.observability.number_format import is_number, json_number
from asyncrl.observability.sinks.base import Sink, SinkSpec
from asyncrl.observability.sinks.jsonl import METRICS_FILE, read_jsonl

TABLE = ("step", "prompt_id", "prompt", "response", "reward", "versions", "finish", "response_tokens", "uid")
_TRAINED = "actor/loss"  # only the metrics of train steps have it
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set for the driver of a submitted job
_SERVICE = "WANDB_SERVICE"
FINISH_S = 120.0  # for the last uploads: an online run whose network is gone ends too; `wandb sync` uploads the rest


class WandbSink(Sink):
    """One wandb run under ``run_dir/wandb``; ``wandb sync`` uploads an offline one later.

    The x axis of every metric is the train step: ``step`` is logged as a metric and declared as the x axis, because
    wandb drops values of earlier steps than its latest, and validation results may be late. Numbers and strings are
    logged, other values dropped. Every ``table_every_steps`` steps, and at the end, the trajectories sampled since the
    last table are logged as a table.

    A resumed run continues the same wandb run. Steps that a rollback to a checkpoint repeats are not logged again:
    metrics.jsonl has the later values, wandb the earlier ones.
    """

    def __init__(self, config: WandbConfig, run_name: str, run_dir: Path | str, run_config: Mapping[str, Any]) -> None:
        """``run_config``: the resolved configuration as nested plain values. Raises wandb's own errors when
        ``online``, such as a missing login, and subprocess.SubprocessError if its service does not start."""
        import wandb  # takes half a second, so only runs that use it import it

        Path(run_dir).mkdir(parents=True, exist_ok=True)
        for kind in ("cache", "data"):
            # The defaults are in the user's home folder. `wandb sync` reads the files staged in these.
            os.environ.setdefault(f"WANDB_{kind.upper()}_DIR", str(Path(run_dir, "wandb", kind).absolute()))
        self._detached = config.mode != "disabled" and _RAY_JOB in os.environ and _SERVICE not in os.environ
        if self._detached:
            # `ray job stop` signals all descendants of the job's process while the run still logs its last step. Once
            # the process that started the wandb service has exited, the service is not a descendant.
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
            # wandb's terminal capture would swallow the console sink's lines.
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, finish_timeout=FINISH_S
            ),
        )
        self._table_every = config.table_every_steps
        self._rows: list[Sequence[Any]] = []  # trajectories since the last table
        before = read_jsonl(Path(run_dir) / METRICS_FILE)
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
        if not rows or not self._table_every:
            return
        self._rows += [[_cell(row.get(column)) for column in TABLE] for row in rows]
        if rows[0]["step"] % self._table_every == 0:
            self._log_table()

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        """Ends the wandb run: exit code 1 after a failure, and the reason in the summary."""
        try:
            if self._rows:
                self._log_table()
        finally:
            self._finish(failed, stopped)

    def _finish(self, failed: str | None, stopped: str | None) -> None:
        import wandb

        for name, reason in (("failed", failed), ("stopped", stopped)):
            if reason is not None:
                self._run.summary[name] = reason
        exit_code = 0 if failed is None else 1
        self._run.finish(exit_code=exit_code)
        # `finish` may return before the service has written an offline run's file; `teardown` waits for it.
        wandb.teardown(exit_code=exit_code)
        if self._detached:
            _wandb("beta", "core", "stop")
            del os.environ[_SERVICE]

    def _log_table(self) -> None:
        import wandb

        rows, self._rows = self._rows, []  # a table that fails is not tried again
        table = wandb.Table(columns=list(TABLE), data=rows)
        self._run.log({"trajectories": table, "step": int(rows[-1][0])})


def _wandb(*command: str) -> str:
    """Output of wandb's command line. Raises subprocess.SubprocessError."""
    done = subprocess.run(
        [sys.executable, "-m", "wandb", *command], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def _run_id(path: Path) -> str:
    """The run's wandb id, kept in ``path`` for resumed runs."""
    if not path.is_file() or not path.read_text():
        write_whole(path, secrets.token_hex(4))
    return path.read_text()


def _cell(value: Any) -> Any:
    """Versions as text, such as ``0.3 · 0.4``; other values unchanged."""
    return " · ".join(value) if isinstance(value, list) else value


def _loggable(value: Any) -> float | str | None:
    if is_number(value):
        number = json_number(value)
        return float("nan") if number is None else number
    return value if isinstance(value, str) else None


def git_state() -> dict[str, str | bool]:
    """Commit, branch and dirty flag of the working directory's repository; empty outside a repository, as in a Ray
    job's copy."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        commit, branch = git("rev-parse", "HEAD"), git("rev-parse", "--abbrev-ref", "HEAD")
        return {"commit": commit, "branch": branch, "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _open(config: Config, run_dir: Path) -> WandbSink:
    import wandb

    about = yaml.safe_load(to_yaml(config)) | ({"git": git} if (git := git_state()) else {})
    try:
        return WandbSink(config.reporting.wandb, config.name, run_dir, about)
    except (wandb.Error, subprocess.SubprocessError) as e:
        said = getattr(e, "stderr", None) or ""  # of a service that did not start
        raise ConfigError([f"reporting.wandb: a run cannot begin: {' '.join(f'{e} {said}'.split())}"]) from None


def _problems(config: Config) -> Iterator[str]:
    """Asks for no password: nobody may be there."""
    if config.reporting.wandb.mode != "online":
        return
    import wandb

    try:
        wandb.setup(wandb.Settings(silent=True, mode="online"))  # whatever WANDB_MODE says
        logged_in = wandb.login(prompt=False, verify=False)
    except Exception as e:
        yield f"reporting.wandb.mode: online needs a valid login: {e}"
    else:
        if not logged_in:
            yield (
                "reporting.wandb.mode: online needs a login, found none; set WANDB_API_KEY or run `wandb login`, "
                "or choose offline, whose runs `wandb sync` uploads later"
            )
    finally:
        wandb.teardown()  # a run's service starts with the run's settings


SINK = SinkSpec(open=_open, enabled=lambda config: config.reporting.wandb.mode != "disabled", problems=_problems)
