"""Folder of a run: layout, lock, config; resume checks at the start, summary and report at the end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.config.load import CONFIG_FILE, ConfigError, load_config, to_yaml
from asyncrl.config.resume import refused_changes
from asyncrl.config.schema import Config
from asyncrl.disk.files import make_folder, rename, sync_tree, write_whole
from asyncrl.models.config import CheckpointError
from asyncrl.observability.run_profile import FILE as PROFILE
from asyncrl.observability.run_profile import profiled_groups
from asyncrl.observability.series import SUMMARY_FILE, read_series, totals
from asyncrl.observability.telemetry.log import LOGS, LogConfig
from asyncrl.run.driver_epoch import FOLDER as DRIVERS
from asyncrl.run.driver_epoch import DriverEpoch, InUse, ended_in_order, wait_for_previous
from asyncrl.run.preflight import FINGERPRINT, Preflight
from asyncrl.run.resume import ResumePoint, counts, resume_point
from asyncrl.run.shutdown import Shutdown, say
from asyncrl.sample_queue.journal import COPIES, newest_copy
from asyncrl.sample_queue.ledger import FILE as LEDGER
from asyncrl.sample_queue.ledger import LedgerError, read_meta, reading
from asyncrl.sample_queue.snapshots import FILE as SNAPSHOTS
from asyncrl.trainer.checkpoints import FINAL, Checkpoint, CheckpointStore

log = logging.getLogger(__name__)

AUTO = "auto"
LOCK_PATIENCE_S = 30.0  # for the processes of a killed run to end


class RunFolder:
    """``path`` holds config.yaml, metrics.jsonl, spans.jsonl, trajectories/, logs/, checkpoints/, drivers/,
    wandb/, summary.json, report.html and trace.json.gz. ``journal`` holds ledger.sqlite, snapshots.sqlite and spool/:
    the same folder, unless ``config.journal_dir`` names another disk; then each checkpoint copies them to
    ``journal_copy``. ``checkpoint``: the verified checkpoint to resume from, None at the start. Locked against other
    runs while the process lives; ``epoch`` shows whether it is still the run's driver."""

    checkpoint: Checkpoint | None
    checkpoints: CheckpointStore
    epoch: DriverEpoch

    def __init__(self, path: Path, config: Config, lock_patience_s: float = 0.0) -> None:
        if Path(config.run_dir).resolve() != path:  # else a resume of its config.yaml would find another run
            config = replace(config, run_dir=str(path))
        self.path, self._config = path, config
        self.logs = LogConfig(str(path / LOGS), config.reporting.log_level)
        self.journal = journal_folder(path, config.journal_dir)
        self._lock = _locked(path, lock_patience_s)

    @classmethod
    def open(cls, config: Config, resume: str | None, found: Preflight, skip: Sequence[str] = ()) -> RunFolder | None:
        """A new folder (see `create`), or with ``resume`` the folder of an earlier run. ``auto`` resumes from the
        newest intact checkpoint in ``config.run_dir``, or starts a new run if the folder has none; a path names a
        checkpoint. None, after a line that says so, if ``auto`` finds a run that has ended and that these options would
        not change.

        ``found``: the preflight's findings, which must fit the earlier run. ``skip``: uids of groups that it may drop,
        because they are not in the checkpoint's weights. Waits for the processes of a killed run to
        end. Raises ConfigError; a refused resume changes nothing."""
        if skip and resume is None:
            raise ConfigError(["--skip: drops groups of a run that is resumed; expected --resume as well"])
        if resume is None:
            return cls.create(config)
        if resume != AUTO and not os.path.isfile(Path(resume) / "metadata.json"):
            raise ConfigError([f"--resume: expected {AUTO} or the folder of a checkpoint, found {resume}"])
        path = Path(config.run_dir) if resume == AUTO else Path(resume).resolve().parent.parent
        if not _holds_run(path):
            if resume != AUTO:
                raise ConfigError([f"--resume: {resume} is not in the folder of a run: {path} has no {CONFIG_FILE}"])
            return cls.create(config)
        if problems := refused_changes(load_config(path / CONFIG_FILE), config):
            raise ConfigError(problems)
        wanted = None if resume == AUTO else Path(resume).resolve()
        folder = cls(path.resolve(), config, LOCK_PATIENCE_S)
        try:
            with contextlib.ExitStack() as unlock:
                unlock.callback(os.close, folder._lock)
                folder._check_owner()
                folder._check_writable()
                wait_for_previous(folder.path, LOCK_PATIENCE_S)
                valid = folder._valid_checkpoints()
                point = folder._resume_point(wanted, valid)
                folder._check_prompts(point, found.prompts_fingerprint)
                folder._check_skipped(point, skip)
                if resume == AUTO and not skip and folder._is_done(point):
                    done = f"nothing is left to do after step {config.trainer.total_steps}"
                    say(f"{folder.path}: {done}; a larger trainer.total_steps trains on")
                    return None
                folder._begin(LOCK_PATIENCE_S)
                folder.checkpoints.sweep()
                if (valid_now := folder._valid_checkpoints()) != valid:
                    valid, point = valid_now, folder._resume_point(wanted, valid_now)
                folder._continue_from(point, valid)
                folder._write_config()
                unlock.pop_all()
        except (CheckpointError, LedgerError) as e:
            raise ConfigError([f"--resume: {e}"]) from None
        except InUse as e:
            raise ConfigError([f"run_dir: {e}; end it first, or choose another run_dir"]) from None
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
            while path.exists() and _holds_something(path):
                number += 1
                path = wanted.with_name(f"{wanted.name}-{number}")
            make_folder(path)
            folder = cls(path.resolve(), config)
            make_folder(folder.journal)
            folder._check_owner()
            if (folder.journal / LEDGER).exists():
                raise ConfigError(
                    [f"journal_dir: {folder.journal} is from an old run in {path}; delete it, or use another run_dir"]
                )
            folder._begin(0.0)
            folder._write_config()
        except InUse as e:  # it was created on two machines at once
            raise ConfigError([f"run_dir: {e}; choose another run_dir"]) from None
        except OSError as e:
            raise ConfigError([_unwritable(path, e.strerror)]) from None
        return folder

    @property
    def journal_copy(self) -> Path | None:
        """A driver that lost its epoch never replaces the copy of the next one."""
        return self.path / COPIES / f"{self.epoch.number:06d}" if self._config.journal_dir else None

    def summarize(self, shutdown: Shutdown, figures: Mapping[str, Any], profile: Mapping[str, Any] | None) -> None:
        """Write summary.json, with the totals of all drivers of the run, and profile.json, unless an earlier driver's
        has more groups. Raises EpochOver."""
        self.epoch.check()
        whole = totals(read_series(self.path)[0])
        how = {"status": shutdown.status, "reason": shutdown.stopped, "failed": shutdown.failure}
        write_whole(self.path / SUMMARY_FILE, json.dumps({**figures, **whole, **how}, indent=2) + "\n")
        if profile is not None and len(profile["groups"]) >= profiled_groups(self.path / PROFILE):
            write_whole(self.path / PROFILE, json.dumps(profile) + "\n")

    def finish(self, report: bool) -> None:
        """Write the report, print the paths of the results, and leave the run to other drivers. Raises EpochOver."""
        self.epoch.check()
        if report:
            self._report()
        if newest := self.checkpoints.newest():
            say(f"checkpoint:  {newest.path}")
        say(f"run folder:  {self.path}")
        self.epoch.end()

    def _report(self) -> None:
        """The run is as good without its pages."""
        from asyncrl.observability.report.report import write_report
        from asyncrl.observability.report.trace import write_trace

        try:
            say(f"report:      {write_report(self.path)}")
            write_trace(self.path)
        except Exception:
            log.exception("the report could not be written; `python -m asyncrl.report %s` tries again", self.path)

    def _check_owner(self) -> None:
        """Raises ConfigError if another user made the journal's folder, as anyone can in a shared ``journal_dir``."""
        if not self._config.journal_dir or not os.path.lexists(self.journal):
            return
        if (owner := os.lstat(self.journal).st_uid) != (user := os.geteuid()):
            raise ConfigError(
                [f"journal_dir: {self.journal} belongs to user {owner}, expected {user}; choose another journal_dir"]
            )

    def _check_writable(self) -> None:
        """Raises ConfigError at once, where otherwise an actor would fail long after the start."""
        for path in (self.path, self.journal / LEDGER, self.journal / "spool", self.path / "checkpoints"):
            if path.exists() and not os.access(path, os.W_OK):
                raise ConfigError([_unwritable(path, "no write access")])

    def _begin(self, patience_s: float) -> None:
        """Become the run's driver."""
        self.epoch = DriverEpoch.take(self.path, patience_s)
        self.checkpoint, self.checkpoints = None, self._store(self.epoch.number, self.epoch.check)

    def _store(self, epoch: int = 0, check: Callable[[], None] = lambda: None) -> CheckpointStore:
        folder, count = self.path / "checkpoints", functools.partial(counts, self.path)
        return CheckpointStore(folder, self._config.checkpoint, epoch, check, count)

    def _valid_checkpoints(self) -> dict[str, str]:
        """Name → digest, in the order in which they were taken."""
        return {checkpoint.path.name: checkpoint.digest for checkpoint in self._store().all()}

    def _resume_point(self, wanted: Path | None, valid: Mapping[str, str]) -> ResumePoint:
        """``wanted``: a checkpoint; None for the newest intact one. Raises CheckpointError, LedgerError."""
        store = self._store()
        among = [checkpoint for checkpoint in store.all() if checkpoint.path.name in valid]
        checkpoint = store.newest_intact(among) if wanted is None else store.open(wanted)
        if checkpoint is not None and checkpoint.path.name not in valid:
            raise CheckpointError(
                f"{checkpoint.path} was written after another driver had taken over the run; resume from one of "
                f"{', '.join(valid)}"
            )
        older = [c for c in among if checkpoint is not None and c.taken < checkpoint.taken]
        journals = [self.journal, *filter(None, [newest_copy(self.path)])]
        if not any((journal / LEDGER).is_file() for journal in journals) and (self.path / LEDGER).is_file():
            raise LedgerError(f"{self.path} has its journal in itself; resume without journal_dir")
        return resume_point(checkpoint, older, journals)

    def _is_done(self, point: ResumePoint) -> bool:
        """The last driver has trained all steps and ended in order, under the same options."""
        checkpoint = point.checkpoint
        if checkpoint is None or checkpoint.metadata.step < self._config.trainer.total_steps:
            return False
        try:
            status = json.loads((self.path / SUMMARY_FILE).read_bytes())["status"]
        except (OSError, ValueError, LookupError):
            return False
        final = (self.path / "checkpoints" / FINAL).resolve() == checkpoint.path.resolve()
        same = (self.path / CONFIG_FILE).read_text() == to_yaml(self._config)
        return status == "finished" and final and same and ended_in_order(self.path)

    def _continue_from(self, point: ResumePoint, valid: Mapping[str, str]) -> None:
        """Restore the journal that fits, and put aside the checkpoints that do not count."""
        self.epoch.found(valid)
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)  # of an end that was none
        self.checkpoint = point.checkpoint
        self.checkpoints.abandon_after(self.checkpoint)
        if point.journal is not None and point.journal != self.journal:
            self._restore_journal(point.journal)

    def _restore_journal(self, copy: Path) -> None:
        """Replace ledger, snapshots and spool by a copy of them."""
        partial = self.journal.with_name(f"{self.journal.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(copy, partial)
        sync_tree(partial)
        if self.journal == self.path:  # the ledger goes first and comes last: the journal is valid with it only
            for old in (*_database(self.path / LEDGER), *_database(self.path / SNAPSHOTS)):
                old.unlink(missing_ok=True)
            shutil.rmtree(self.path / "spool", ignore_errors=True)
            for name in sorted(os.listdir(partial), key=lambda name: name == LEDGER):
                rename(partial / name, self.path / name)
            partial.rmdir()
        else:
            shutil.rmtree(self.journal, ignore_errors=True)
            rename(partial, self.journal)

    def _check_prompts(self, point: ResumePoint, fingerprint: str) -> None:
        """Raises ConfigError if the prompts differ from those of the earlier run: neither their order nor their rewards
        would go on as they were."""
        if point.journal is None:
            return  # killed before it began
        with reading(point.journal / LEDGER) as db:
            before = read_meta(db).get(FINGERPRINT, fingerprint)
        if before != fingerprint:
            key = "source" if self._config.data.source else "train_files"
            problem = f"data.{key}: the run to resume has {before}; found {fingerprint}"
            raise ConfigError([f"{problem}; resume with the same rows, in all their columns"])

    def _check_skipped(self, point: ResumePoint, uids: Sequence[str]) -> None:
        """Raises ConfigError for a group that cannot be dropped any more, or was never issued."""
        if not uids:
            return
        if point.journal is None:
            raise ConfigError([f"--skip: the run has no group {uids[0]}"])
        step = point.checkpoint.metadata.step if point.checkpoint is not None else 0
        with reading(point.journal / LEDGER) as db:
            for uid in uids:
                row = db.execute("SELECT state, step FROM groups WHERE uid = ?", (uid,)).fetchone()
                if row is None:
                    raise ConfigError([f"--skip: the run has no group {uid}"])
                if row[0] == "trained" and row[1] <= step:
                    raise ConfigError([f"--skip: group {uid} is in the weights of the checkpoint, since step {row[1]}"])

    def _write_config(self) -> None:
        """Write the current config; keep the previous one under another name."""
        text, path = to_yaml(self._config), self.path / CONFIG_FILE
        if path.exists():
            if path.read_text() == text:
                return
            number = len(list(self.path.glob("config.*.yaml"))) + 1
            shutil.copyfile(path, self.path / f"config.{number}.yaml")
        write_whole(path, text)  # resume finds a run by its config


def journal_folder(run: Path, journal_dir: str) -> Path:
    """Folder of a run's ledger and spool: the run's own, or a folder in ``journal_dir``."""
    if not journal_dir:
        return run
    return Path(journal_dir) / f"{run.name}-{xxhash.xxh3_64_hexdigest(str(run).encode())}"


def _holds_run(path: Path) -> bool:
    """Raises ConfigError if the disk does not say: without an answer another run would begin."""
    try:
        os.stat(path / CONFIG_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        problem = f"run_dir: {path} cannot be read ({e.strerror}); make it readable, or choose another run_dir"
        raise ConfigError([problem]) from None
    return True


def _holds_something(path: Path) -> bool:
    """True unless the folder is empty, or has only what comes before a run begins: its drivers."""
    return any(item.name != DRIVERS and item.suffix != ".partial" for item in path.iterdir())


def _database(path: Path) -> list[Path]:
    """An SQLite file and the two beside it that belong to it."""
    return [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm")]


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
        except OSError as e:
            if e.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            return fd  # a disk without locks: the epochs of the drivers have to do
