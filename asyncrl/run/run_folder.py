"""Folder of a run: layout, lock, config; resume checks at the start, summary and report at the end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.config.load import ConfigError, load_config, to_yaml
from asyncrl.config.resume import refused_changes
from asyncrl.config.schema import Config
from asyncrl.models.config import CheckpointError
from asyncrl.observability.telemetry.log import LOGS, LogConfig
from asyncrl.run.preflight import Preflight
from asyncrl.run.shutdown import Shutdown
from asyncrl.sample_queue.journal import found_copy
from asyncrl.sample_queue.ledger import FILE as LEDGER
from asyncrl.sample_queue.ledger import LedgerError, read_meta, reading
from asyncrl.trainer.checkpoints import Checkpoint, CheckpointStore

AUTO = "auto"
CONFIG = "config.yaml"
JOURNAL_COPY = "journal"
LOCK_PATIENCE_S = 30.0  # for the processes of a killed run to end


class RunFolder:
    """``path`` holds config.yaml, metrics.jsonl, spans.jsonl, trajectories.jsonl, logs/, checkpoints/, wandb/,
    summary.json, report.html and trace.json.gz. ``journal`` holds ledger.sqlite and spool/: the same folder, unless
    ``config.journal_dir`` names another disk; then each checkpoint copies them to ``journal_copy``. ``checkpoint``: the
    verified checkpoint to resume from, None at the start. Locked against other runs while the process lives."""

    def __init__(self, path: Path, config: Config, lock_patience_s: float = 0.0) -> None:
        self.path = path
        self.checkpoint: Checkpoint | None = None
        self.checkpoints = CheckpointStore(path / "checkpoints", config.checkpoint)
        self.logs = LogConfig(str(path / LOGS), config.reporting.log_level)
        self.journal = journal_folder(path, config.journal_dir)
        self.journal_copy = path / JOURNAL_COPY if config.journal_dir else None
        self._lock = _locked(path, lock_patience_s)

    @classmethod
    def open(cls, config: Config, resume: str | None, found: Preflight) -> RunFolder:
        """A new folder (see `create`), or with ``resume`` the folder of an earlier run. ``auto`` resumes from the
        newest checkpoint in ``config.run_dir``, or starts a new run if the folder has none; a path names a checkpoint.

        ``found``: the preflight's findings, which must fit the earlier run. Waits for the processes of a killed run to
        end. Raises ConfigError."""
        if resume is None:
            return cls.create(config)
        if resume != AUTO and not (Path(resume) / "metadata.json").is_file():
            raise ConfigError([f"--resume: expected {AUTO} or the folder of a checkpoint, found {resume}"])
        path = Path(config.run_dir) if resume == AUTO else Path(resume).resolve().parent.parent
        if not (path / CONFIG).is_file():
            if resume != AUTO:
                raise ConfigError([f"--resume: {resume} is not in the folder of a run: {path} has no {CONFIG}"])
            return cls.create(config)
        if problems := refused_changes(load_config(path / CONFIG), config):
            raise ConfigError(problems)
        folder = cls(path.resolve(), config, LOCK_PATIENCE_S)
        try:
            folder._check_owner()
            folder._check_writable()
            folder._fetch_journal()
            folder._check_prompts(found.prompts_fingerprint)
            folder._find_checkpoint(None if resume == AUTO else Path(resume).resolve())
            folder._write_config(config)
        except (CheckpointError, LedgerError) as e:
            raise ConfigError([f"--resume: {e}"]) from None
        except OSError as e:
            raise ConfigError([_unwritable(Path(e.filename or path), e.strerror)]) from None
        return folder

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """Create ``config.run_dir``, or ``…-2``, ``…-3`` beside it if it holds a run already: nothing is overwritten.

        Raises ConfigError if the folder cannot be created or written."""
        wanted, number = Path(config.run_dir), 1
        if "working_dir_files" in wanted.resolve().parts:
            raise ConfigError(
                [
                    f"run_dir: {wanted} is in the copy of the working directory that Ray makes for a job and deletes "
                    "after it; expected a permanent folder: ASYNCRL_RUNS of the runtime environment, or run_dir"
                ]
            )
        path = wanted
        try:
            while path.exists() and any(path.iterdir()):
                number += 1
                path = wanted.with_name(f"{wanted.name}-{number}")
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path.resolve(), config)
            folder.journal.mkdir(parents=True, exist_ok=True)
            folder._check_owner()
            if (folder.journal / LEDGER).exists():
                raise ConfigError(
                    [f"journal_dir: {folder.journal} is from an old run in {path}; delete it, or use another run_dir"]
                )
            folder._write_config(config)
        except OSError as e:
            raise ConfigError([_unwritable(path, e.strerror)]) from None
        return folder

    def finish(self, shutdown: Shutdown, figures: Mapping[str, Any], report: bool) -> None:
        """Write summary.json, then the report, and print the paths of the results."""
        how = {"status": shutdown.status, "reason": shutdown.stopped, "failed": shutdown.failure}
        (self.path / "summary.json").write_text(json.dumps({**figures, **how}, indent=2) + "\n")
        if report:
            from asyncrl.observability.report.report import write_report
            from asyncrl.observability.report.trace import write_trace

            print(f"report:      {write_report(self.path)}")
            write_trace(self.path)
        if newest := self.checkpoints.newest():
            print(f"checkpoint:  {newest.path}")
        print(f"run folder:  {self.path}", flush=True)

    def _check_owner(self) -> None:
        """Raises ConfigError if another user made the journal's folder, as anyone can in a shared ``journal_dir``."""
        if self.journal_copy is None or not os.path.lexists(self.journal):
            return
        if (owner := os.lstat(self.journal).st_uid) != (user := os.geteuid()):
            raise ConfigError(
                [f"journal_dir: {self.journal} belongs to user {owner}, expected {user}; choose another journal_dir"]
            )

    def _check_writable(self) -> None:
        """Raises ConfigError at once, where otherwise an actor would fail long after the start."""
        for path in (self.path, self.journal / LEDGER, self.journal / "spool", self.checkpoints.folder):
            if path.exists() and not os.access(path, os.W_OK):
                raise ConfigError([_unwritable(path, "no write access")])

    def _fetch_journal(self) -> None:
        """On another machine, or with another journal_dir: restore ledger and spool from the copy in the run folder."""
        home = self.journal_copy or self.path / JOURNAL_COPY
        if not (self.journal / LEDGER).is_file() and (copy := found_copy(home)) is not None:
            partial = self.journal.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(copy, partial)
            if self.journal == self.path:
                for item in partial.iterdir():  # the ledger last: its presence makes the journal valid
                    if item.name != LEDGER:
                        item.replace(self.journal / item.name)
                (partial / LEDGER).replace(self.journal / LEDGER)
                partial.rmdir()
            else:
                shutil.rmtree(self.journal, ignore_errors=True)
                partial.rename(self.journal)

    def _check_prompts(self, fingerprint: str) -> None:
        """Raises ConfigError if the prompts differ from those of the earlier run, whose order could not continue."""
        if not (self.journal / LEDGER).is_file():
            return  # killed before it began
        with reading(self.journal / LEDGER) as db:
            before = read_meta(db).get("prompts", fingerprint)
        if before != fingerprint:
            raise ConfigError([f"data.train_files: the run to resume has {before}; found {fingerprint}"])

    def _check_ledger(self, db: sqlite3.Connection) -> None:
        """Raises LedgerError if the ledger is older than the checkpoint, whose groups would be trained again."""
        if self.checkpoint is None:
            return
        metadata = self.checkpoint.metadata
        query = "SELECT COUNT(*) FROM groups WHERE state = 'trained' AND step <= ?"
        if (trained := db.execute(query, (metadata.step,)).fetchone()[0]) != metadata.trained:
            raise LedgerError(
                f"{self.checkpoint.path} holds {metadata.trained} groups, the ledger {self.journal / LEDGER} has "
                f"{trained} as trained up to its step {metadata.step}: they belong to different runs; resume from an "
                "older checkpoint"
            )

    def _find_checkpoint(self, wanted: Path | None) -> None:
        """Set `checkpoint`; rename those later than a ``wanted`` one, which belong to an abandoned lineage."""
        self.checkpoints.sweep()
        found = self.checkpoints.all()
        if wanted is not None or found:
            self.checkpoint = self.checkpoints.open(wanted or found[-1].path)
        covered = 0
        if (self.journal / LEDGER).is_file():
            with reading(self.journal / LEDGER, thorough=False) as db:
                covered = int(read_meta(db).get("covered_step", 0))
                self._check_ledger(db)
        elif self.checkpoint is not None:
            raise LedgerError(
                f"{self.checkpoint.path} needs its ledger, but there is none at {self.journal / LEDGER}; restore it "
                "from a copy, set its journal_dir, or start a new run from the checkpoint's weights"
            )
        if (step := self.checkpoint.metadata.step if self.checkpoint else 0) < covered:
            where = f"{self.checkpoint.path} is of step {step}" if self.checkpoint else "no checkpoint is left"
            raise CheckpointError(
                f"{where}, but the groups trained up to step {covered} are no longer kept; resume from a later "
                "checkpoint, or start a new run from its weights"
            )
        for other in found:
            if self.checkpoint and other.taken > self.checkpoint.taken:
                other.path.rename(other.path.with_name(f"abandoned_{other.path.name}_{time.time_ns()}"))

    def _write_config(self, config: Config) -> None:
        """Write the current config; keep the previous one under another name."""
        text, path = to_yaml(config), self.path / CONFIG
        if path.exists():
            if path.read_text() == text:
                return
            number = len(list(self.path.glob("config.*.yaml"))) + 1
            shutil.copyfile(path, self.path / f"config.{number}.yaml")
        new = path.with_suffix(".partial")
        new.write_text(text)
        new.replace(path)  # atomic: resume finds a run by its config


def journal_folder(run: Path, journal_dir: str) -> Path:
    """Folder of a run's ledger and spool: the run's own, or a folder in ``journal_dir``."""
    if not journal_dir:
        return run
    return Path(journal_dir) / f"{run.name}-{xxhash.xxh3_64_hexdigest(str(run).encode())}"


def _unwritable(path: Path, why: str | None) -> str:
    return f"run_dir: {path} cannot be written ({why}); make it writable, or choose another run_dir"


def _locked(path: Path, patience_s: float) -> int:
    """Lock a folder for this process. Raises ConfigError if another process holds the lock for ``patience_s``."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                with contextlib.suppress(OSError):
                    os.close(fd)
                raise ConfigError(
                    [f"run_dir: {path} is in use by another run; end it first, or choose another run_dir"]
                ) from None
            time.sleep(0.2)  # flock has no timeout
