"""The checkpoints of a run: folders that are whole or not there, with a checksum of every file, kept by count and best.

    checkpoints/step_000012/            cut.json, checksums.json, state/ (the ranks'), hf/ (if exported)
    checkpoints/step_000015.partial/    being written; a crash leaves it, nothing ever reads it
    checkpoints/step_000009.trash/      being deleted
    checkpoints/step_000012.replaced/   the old one, while another of the same step takes its name
    checkpoints/final                   → step_000020, a relative link

One process writes, any may read::

    store = CheckpointStore(run_dir / "checkpoints", config.checkpoint)
    store.sweep()                                # once, before a run goes on here: a crash may have left something
    newest = store.newest()                      # store.open(newest.path) verifies every file
    partial = store.begin(step)                  # write into it
    checkpoint = store.complete(partial, cut)    # on disk and whole from here on
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from asyncrl.config.schema import CheckpointConfig
from asyncrl.models.config import CheckpointError
from asyncrl.sample import PolicyVersion

T = TypeVar("T")

PARTIAL = ".partial"  # ends the name of a checkpoint that is not whole
FINAL = "final"

_TRASH, _REPLACED = ".trash", ".replaced"
_NAME = re.compile(r"step_\d{6,}")
_CUT, _CHECKSUMS = "cut.json", "checksums.json"
_BLOCK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Cut:
    """What a checkpoint says about the run beside the state of the ranks."""

    step: int
    version: PolicyVersion  # the one published last when it was taken
    trained: int  # groups in its weights
    trained_at_publish: int  # groups in the weights when ``version`` was published
    metrics: dict[str, float]  # such as the newest value of the metric that decides which are best


@dataclass(frozen=True)
class Checkpoint:
    """A whole one."""

    path: Path
    cut: Cut

    @property
    def taken(self) -> tuple[int, int]:
        """Orders checkpoints by when they were taken: a run that went back to step 9 is at step 10 later than the
        lineage it came from was at step 12, and has left that one's later checkpoints behind."""
        return self.cut.version.lineage, self.cut.step


class CheckpointStore:
    """The checkpoints in ``folder``; which of them are kept, ``config`` says. Raises OSError where the folder cannot be
    written; what was whole before is whole then."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder
        self._config = config

    def sweep(self) -> None:
        """Remove what an interrupted save or deletion left; only for the run that writes here, before it does.

        A checkpoint that was about to be replaced by another of its step gets its name back."""
        for path in sorted(self.folder.glob("*")):
            if path.suffix == _REPLACED and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (PARTIAL, _TRASH, _REPLACED):
                _remove(path)

    def begin(self, step: int) -> Path:
        """An empty folder for the checkpoint of this step; what an earlier attempt left in it is removed."""
        partial = self.folder / f"step_{step:06d}{PARTIAL}"
        _remove(partial)
        partial.mkdir(parents=True)
        return partial

    def complete(self, partial: Path, cut: Cut) -> Checkpoint:
        """Make what `begin` gave and all ranks have written a checkpoint, then delete those that are not kept.

        Everything is on disk before the folder gets its name, in one rename. If the step has a checkpoint already, that
        one is renamed away first; a crash in between leaves the checkpoint before it as the newest, and `sweep` brings
        the old one of this step back. It is deleted when the new one is in its place."""
        if partial.name != f"step_{cut.step:06d}{PARTIAL}":
            raise ValueError(f"{partial} is not the folder that begin({cut.step}) gave, which the cut is of")
        _write_json(partial / _CUT, asdict(cut))
        sums = {str(p.relative_to(partial)): _measured(p, sync=True)._asdict() for p in _files(partial)}
        _write_json(partial / _CHECKSUMS, {"files": sums})
        for path in (partial / _CHECKSUMS, *(p for p in partial.rglob("*") if p.is_dir()), partial):
            _sync(path)

        whole = partial.with_suffix("")
        replaced = whole.with_suffix(_REPLACED)
        if whole.exists():
            _remove(replaced)
            whole.rename(replaced)
        partial.rename(whole)
        _sync(self.folder)
        _remove(replaced)
        self._rotate()
        return Checkpoint(whole, cut)

    def all(self) -> list[Checkpoint]:
        """The whole ones, in the order in which they were taken. Their files are not verified: `open` does that.

        A folder without cut.json is none: somebody is deleting it. Raises CheckpointError if a cut.json is damaged."""
        cuts = [(path, _read_json(path / _CUT, _cut)) for path in self._paths()]
        return sorted((Checkpoint(path, cut) for path, cut in cuts if cut is not None), key=lambda c: c.taken)

    def newest(self) -> Checkpoint | None:
        return found[-1] if (found := self.all()) else None

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint at ``path`` (it may be a link to one), with every file of it verified.

        Raises CheckpointError that names the file, what was expected of it and what was found."""
        path = path.resolve()
        if path.suffix in (PARTIAL, _TRASH):
            raise CheckpointError(f"{path}: no checkpoint, its save or deletion was interrupted; {self._others(path)}")
        cut = _read_json(path / _CUT, _cut)
        sums = _read_json(path / _CHECKSUMS, _checksums)
        if cut is None or sums is None:
            missing = _CUT if cut is None else _CHECKSUMS
            raise CheckpointError(f"{path}: no whole checkpoint there ({missing} is missing); {self._others(path)}")
        for name, expected in sums.items():
            file = path / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, expected {expected}; {self._others(path)}")
            if (found := _measured(file)) != expected:
                raise CheckpointError(f"{file} is damaged: expected {expected}, found {found}; {self._others(path)}")
        return Checkpoint(path, cut)

    def mark_final(self, checkpoint: Checkpoint) -> None:
        """Let the link ``final`` name this checkpoint of the store, at once and for good."""
        link = self.folder / f"{FINAL}{PARTIAL}"
        _remove(link)
        link.symlink_to(checkpoint.path.name)
        link.replace(self.folder / FINAL)
        _sync(self.folder)

    def _rotate(self) -> None:
        """Delete all but the newest ``keep_last`` (0: all are kept) and the best ``keep_best``; of equals the newer one
        is better, and one without the metric or with a value that is not finite is not among the best."""
        found, config = self.all(), self._config
        if not config.keep_last:
            return
        sign = 1.0 if config.best_is == "highest" else -1.0
        values = {c.path: sign * c.cut.metrics.get(config.best_metric, math.nan) for c in found}
        rated = sorted((c for c in found if math.isfinite(values[c.path])), key=lambda c: (values[c.path], c.taken))
        best = rated[-config.keep_best :] if config.keep_best else []
        for checkpoint in found[: -config.keep_last]:
            if checkpoint not in best:
                self._delete(checkpoint.path)

    def _delete(self, path: Path) -> None:
        """Renamed first: half deleted, it must not look whole."""
        final = self.folder / FINAL
        if final.is_symlink() and os.readlink(final) == path.name:
            final.unlink()
        trash = path.with_suffix(_TRASH)
        _remove(trash)
        path.rename(trash)
        _remove(trash)

    def _paths(self) -> list[Path]:
        return [path for path in self.folder.glob("step_*") if _NAME.fullmatch(path.name)]

    def _others(self, path: Path) -> str:
        """What to do about a checkpoint that cannot be used."""
        names = ", ".join(sorted(other.name for other in self._paths() if other.name != path.name))
        return f"restore it from a copy, or go on from another one ({names or 'there is none'})"


class _Measure(NamedTuple):
    """Size and checksum of a file."""

    bytes: int
    xxh3_64: str  # hexadecimal

    def __str__(self) -> str:
        return f"{self.bytes} bytes with xxh3_64 {self.xxh3_64}"


def _measured(path: Path, sync: bool = False) -> _Measure:
    """``sync``: and have the file on disk when this returns."""
    digest, block, size = xxhash.xxh3_64(), memoryview(bytearray(_BLOCK_BYTES)), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return _Measure(size, digest.hexdigest())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """A folder with all that is in it, or a link; nothing if it is not there."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _read_json(path: Path, read: Callable[[Any], T]) -> T | None:
    """What ``read`` makes of a JSON file, None if there is none; CheckpointError if it is not what was written."""
    try:
        return read(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        why = f"{type(e).__name__}: {e}"
        raise CheckpointError(f"{path} is damaged ({why}); restore it from a copy or delete its folder") from None


def _cut(value: Any) -> Cut:
    cut = Cut(**value)
    return replace(cut, version=PolicyVersion(*cut.version))


def _checksums(value: Any) -> dict[str, _Measure]:
    return {name: _Measure(**measure) for name, measure in value["files"].items()}
