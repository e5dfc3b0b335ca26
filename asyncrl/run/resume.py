"""Where a run resumes: a checkpoint, and a ledger that knows exactly the groups in its weights."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.models.config import CheckpointError
from asyncrl.run.driver_epoch import written_too_late
from asyncrl.sample_queue.ledger import FILE as LEDGER
from asyncrl.sample_queue.ledger import LedgerError, read_meta, reading
from asyncrl.trainer.checkpoints import Checkpoint
from asyncrl.types.groups import groups_digest
from asyncrl.types.versions import PolicyVersion


@dataclass(frozen=True)
class ResumePoint:
    """``checkpoint``: None for a run that was killed before its first. ``journal``: folder with its ledger and spool;
    None if there is none."""

    checkpoint: Checkpoint | None
    journal: Path | None


def counts(run: Path, checkpoint: Checkpoint) -> bool:
    """False for a checkpoint that its driver wrote after its epoch. Raises CheckpointError."""
    return not written_too_late(run, checkpoint.metadata.driver_epoch, checkpoint.path.name, checkpoint.digest)


def resume_point(checkpoint: Checkpoint | None, older: Sequence[Checkpoint], journals: Iterable[Path]) -> ResumePoint:
    """The checkpoint with the first of ``journals`` whose ledger fits. ``older``: checkpoints before it, for advice.

    Raises LedgerError if none fits, CheckpointError if groups trained since the checkpoint are no longer kept."""
    journals = [journal for journal in journals if (journal / LEDGER).is_file()]
    if not journals:
        if checkpoint is None:
            return ResumePoint(None, None)
        raise LedgerError(
            f"{checkpoint.path} needs its ledger, but there is none; restore it from a copy, set its journal_dir, or "
            "start a new run from the checkpoint's weights"
        )
    misfits = []
    for journal in journals:
        with reading(journal / LEDGER, thorough=False) as db:
            if (misfit := _misfit(db, journal / LEDGER, checkpoint)) is None:
                _check_kept(db, checkpoint)
                return ResumePoint(checkpoint, journal)
            fitting = [c.path.name for c in older if _misfit(db, journal / LEDGER, c) is None]
            advice = f"; {fitting[-1]} fits it: --resume {older[0].path.parent / fitting[-1]}" if fitting else ""
            misfits.append(misfit + advice)
    raise LedgerError("; ".join(misfits))


def _misfit(db: sqlite3.Connection, ledger: Path, checkpoint: Checkpoint | None) -> str | None:
    """Why the ledger is not the one that the checkpoint was taken with, or is older; None if it fits."""
    if checkpoint is None:
        return None
    metadata = checkpoint.metadata
    rows = db.execute("SELECT uid FROM groups WHERE state = 'trained' AND step <= ?", (metadata.step,)).fetchall()
    known = db.execute("SELECT 1 FROM versions WHERE lineage = ? AND number = ?", metadata.version).fetchone()
    expected = f"{checkpoint.path} was taken with another ledger than {ledger}"
    if len(rows) != metadata.trained:
        return f"{expected}: it holds {metadata.trained} groups, there are {len(rows)} up to its step {metadata.step}"
    if groups_digest(uid for (uid,) in rows) != metadata.groups_digest:
        return f"{expected}: {len(rows)} groups are trained up to its step {metadata.step} in both, but not the same"
    if known is None and metadata.version != PolicyVersion(0, 0):
        return f"{expected}: that one has no version {metadata.version}"
    return None


def _check_kept(db: sqlite3.Connection, checkpoint: Checkpoint | None) -> None:
    """Raises CheckpointError if the ledger does not keep the groups that were trained since the checkpoint."""
    covered = int(read_meta(db).get("covered_step", 0))
    if (step := checkpoint.metadata.step if checkpoint else 0) < covered:
        where = f"{checkpoint.path} is of step {step}" if checkpoint else "no checkpoint is left"
        raise CheckpointError(
            f"{where}, but the groups trained up to step {covered} are no longer kept; resume from a later "
            "checkpoint, or start a new run from its weights"
        )
