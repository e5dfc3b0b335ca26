"""Checkpoints of a run: folders that appear atomically, with a checksum of every file, retained by age and rating.

    checkpoints/step_000012/            metadata.json, checksums.json, state/ (the ranks'), hf/ (if exported),
                                        rating.json (may be measured later, so without a checksum)
    checkpoints/step_000015.1.partial/  being written by the first driver; left by a crash, never read
    checkpoints/step_000009.trash/      being deleted
    checkpoints/step_000012.replaced/   the old one, while a new one of the same step takes its name
    checkpoints/abandoned_step_…/       from which the run did not go on, for the user to delete
    checkpoints/final                   → step_000020, a relative link

One process writes, any may read::

    store = CheckpointStore(run_dir / "checkpoints", config.checkpoint)
    store.sweep()                                   # once, before a run continues here: removes a crash's leftovers
    newest = store.newest()                         # store.open(newest.path) verifies every file
    partial = store.begin(step)                     # write into it
    checkpoint = store.complete(partial, metadata)  # complete and on disk from here on
    store.rate(checkpoint.taken, metrics)           # measured with its weights, before or after the save
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from asyncrl.config.schema import CheckpointConfig
from asyncrl.disk.files import make_folder, rename, sync, write_whole
from asyncrl.models.config import CheckpointError
from asyncrl.types.versions import PolicyVersion

T = TypeVar("T")

log = logging.getLogger(__name__)

PARTIAL = ".partial"  # suffix of an incomplete checkpoint
FINAL = "final"

_TRASH, _REPLACED = ".trash", ".replaced"
_NAME = re.compile(r"step_\d{6,}")
_METADATA, _CHECKSUMS, _RATING = "metadata.json", "checksums.json", "rating.json"
_BLOCK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class CheckpointMetadata:
    """Position of the run at a checkpoint, beside the state of the ranks."""

    step: int
    version: PolicyVersion  # the last one published when the checkpoint was taken
    trained: int  # groups trained into its weights
    trained_at_publish: int  # groups trained into the weights when ``version`` was published
    groups_digest: int = 0  # of the groups trained, see `asyncrl.types.groups.groups_digest`
    driver_epoch: int = 0  # of the driver that wrote it


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. ``rating``: the metric that decides which are best, once measured with its weights."""

    path: Path
    metadata: CheckpointMetadata
    rating: dict[str, float] = field(default_factory=dict)

    @property
    def taken(self) -> tuple[int, int]:
        """Sort key by time: after a rollback to step 9, the new lineage's step 10 is later than step 12 of the old
        lineage, whose later checkpoints are obsolete."""
        return self.metadata.version.lineage, self.metadata.step

    @property
    def digest(self) -> str:
        """Identifies its content, by the checksums of its files as they were written."""
        path = self.path / _CHECKSUMS
        return xxhash.xxh3_64_hexdigest(path.read_bytes() if path.is_file() else b"")


class CheckpointStore:
    """Checkpoints in ``folder``; ``config`` decides which are kept. ``driver_epoch``: of the driver that writes here;
    ``check`` raises once a newer one does; ``counts``: False for a checkpoint of an earlier driver that came later, of
    which nothing here knows. Raises OSError if the folder cannot be written; existing checkpoints then stay whole."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        driver_epoch: int = 0,
        check: Callable[[], None] = lambda: None,
        counts: Callable[[Checkpoint], bool] = lambda checkpoint: True,
    ) -> None:
        self.folder, self.driver_epoch = folder, driver_epoch
        self._config, self._check, self._counts = config, check, counts
        self._ratings: dict[tuple[int, int], dict[str, float]] = {}
        self._awaited: set[tuple[int, int]] = set()
        self._naming = threading.Lock()  # one thread writes checkpoints while another rates them

    def sweep(self) -> None:
        """Remove leftovers of interrupted saves and deletions. Only for the run that writes here, before it writes.

        A checkpoint that was about to be replaced by a new one of its step gets its name back."""
        for path in sorted(self.folder.glob("*")):
            if path.suffix == _REPLACED and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (PARTIAL, _TRASH, _REPLACED):
                _remove(path)

    def begin(self, step: int) -> Path:
        """Create an empty folder for this step's checkpoint; removes leftovers of an earlier attempt."""
        partial = self._partial(step)
        _remove(partial)
        make_folder(partial)
        return partial

    def complete(self, partial: Path, metadata: CheckpointMetadata) -> Checkpoint:
        """Turn a folder from `begin` that all ranks have written into a checkpoint, then delete those not kept.

        Everything is on disk before the folder gets its name in one rename. An existing checkpoint of the step is
        renamed away first, and deleted afterwards; a crash in between leaves the preceding checkpoint as the newest,
        and `sweep` restores the old one of this step. If a newer driver began meanwhile, the checkpoint may have got
        its name, but does not count for the newer driver."""
        if partial != self._partial(metadata.step):
            raise ValueError(f"expected the folder that begin({metadata.step}) returned, found {partial}")
        (partial / _METADATA).write_text(_json(asdict(metadata)))
        sums = {str(p.relative_to(partial)): _measured(p, sync=True)._asdict() for p in _files(partial)}
        (partial / _CHECKSUMS).write_text(_json({"files": sums}))
        for path in (partial / _CHECKSUMS, *(p for p in partial.rglob("*") if p.is_dir()), partial):
            sync(path)

        whole = self.folder / f"step_{metadata.step:06d}"
        replaced = whole.with_suffix(_REPLACED)
        checkpoint = Checkpoint(whole, metadata)
        self._check()
        with self._naming:
            if rating := self._ratings.get(checkpoint.taken, {}):
                _write_rating(partial, rating)
            if whole.exists():
                _remove(replaced)
                whole.rename(replaced)
            rename(partial, whole)
            self._check()
            trash = self._rotate()
        for folder in (replaced, *trash):
            _remove(folder)
        return replace(checkpoint, rating=rating)

    def await_rating(self, taken: tuple[int, int]) -> None:
        """The weights of `Checkpoint.taken` are being measured: their checkpoint is kept until `rate` is called."""
        self._awaited.add(taken)

    def rate(self, taken: tuple[int, int], metrics: Mapping[str, float]) -> None:
        """Record ``metrics`` measured with the weights of `Checkpoint.taken`, whether or not these are saved yet; then
        delete the checkpoints not kept."""
        name = self._config.best_metric
        with self._naming:
            self._awaited.discard(taken)
            if name in metrics:
                self._ratings[taken] = {name: metrics[name]}
                for checkpoint in self.all():
                    if checkpoint.taken == taken:
                        _write_rating(checkpoint.path, self._ratings[taken])
            trash = self._rotate()
        for folder in trash:
            _remove(folder)

    def all(self) -> list[Checkpoint]:
        """Whole checkpoints in the order in which they were taken. Files are not verified; `open` does that.

        A folder without metadata.json is being deleted and left out, and so is one whose metadata cannot be read, or
        that does not count."""
        found = []
        for path in self._paths():
            try:
                metadata = _read_json(path / _METADATA, _metadata)
            except CheckpointError as e:
                log.warning("%s", e)
                continue
            if metadata is not None:
                found.append(Checkpoint(path, metadata, _rating(path)))
        return sorted(filter(self._counts, found), key=lambda c: c.taken)

    def newest(self) -> Checkpoint | None:
        return found[-1] if (found := self.all()) else None

    def newest_intact(self, among: Sequence[Checkpoint] | None = None) -> Checkpoint | None:
        """The newest checkpoint, of these or of all, whose files are as they were written; warns of damaged ones."""
        for checkpoint in reversed(self.all() if among is None else among):
            try:
                return self.open(checkpoint.path)
            except CheckpointError as e:
                log.warning("%s. Trying the checkpoint before", e)
        return None

    def abandon_after(self, checkpoint: Checkpoint | None) -> None:
        """Rename the checkpoints that the run does not go on from: those taken after this one (None: all), and those
        that cannot be read now or do not count. Read later, they would have weights of groups that are trained again.
        """
        with self._naming:
            before = {c.path for c in self.all() if checkpoint is not None and c.taken <= checkpoint.taken}
            for path in self._paths():
                if path not in before and (path / _METADATA).exists():
                    log.info("%s is set aside: the run goes on without it", path)
                    self._rename(path, path.with_name(f"abandoned_{path.name}_{time.time_ns()}"))

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint at ``path`` (or at the target of a link), with every file verified.

        Raises CheckpointError, which names the file, the expectation and the finding."""
        path = path.resolve()
        if path.suffix in (PARTIAL, _TRASH):
            raise CheckpointError(
                f"{path}: expected a checkpoint, found an interrupted save or deletion; {self._others(path)}"
            )
        metadata = _read_json(path / _METADATA, _metadata)
        sums = _read_json(path / _CHECKSUMS, _checksums)
        if metadata is None or sums is None:
            missing = _METADATA if metadata is None else _CHECKSUMS
            raise CheckpointError(f"{path}: no whole checkpoint there ({missing} is missing); {self._others(path)}")
        for name, expected in sums.items():
            file = path / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, expected {expected}; {self._others(path)}")
            try:
                found = _measured(file)
            except OSError as e:
                raise CheckpointError(f"{file} cannot be read ({e.strerror}); {self._others(path)}") from None
            if found != expected:
                raise CheckpointError(f"{file} is damaged: expected {expected}, found {found}; {self._others(path)}")
        return Checkpoint(path, metadata, _rating(path))

    def mark_final(self, checkpoint: Checkpoint) -> None:
        """Point the link ``final`` at this checkpoint, atomically and synced to disk."""
        link = self.folder / f"{FINAL}{PARTIAL}"
        _remove(link)
        link.symlink_to(checkpoint.path.name)
        rename(link, self.folder / FINAL)

    def _partial(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.{self.driver_epoch}{PARTIAL}"

    def _rotate(self) -> list[Path]:
        """Rename the checkpoints to delete, and return their new paths: removal may take minutes, so the caller does it
        without the lock. Keeps the newest ``keep_last`` (0: all), the best ``keep_best``, and those still being rated.
        Of equal ratings the newer checkpoint wins; one without a finite rating is never among the best."""
        config = self._config
        if not config.keep_last:
            return []
        found = self.all()
        sign = 1.0 if config.best_is == "highest" else -1.0
        values = {c.path: sign * c.rating.get(config.best_metric, math.nan) for c in found}
        rated = sorted((c for c in found if math.isfinite(values[c.path])), key=lambda c: (values[c.path], c.taken))
        best = rated[-config.keep_best :] if config.keep_best else []
        return [
            self._discarded(checkpoint.path)
            for checkpoint in found[: -config.keep_last]
            if checkpoint not in best and not (config.keep_best and checkpoint.taken in self._awaited)
        ]

    def _discarded(self, path: Path) -> Path:
        """Rename a checkpoint's folder, so that a half-deleted one does not look complete; returns the new path."""
        trash = path.with_suffix(_TRASH)
        _remove(trash)
        self._rename(path, trash)
        return trash

    def _rename(self, path: Path, to: Path) -> None:
        """Rename a checkpoint's folder, to which ``final`` must not point any more."""
        final = self.folder / FINAL
        if final.is_symlink() and os.readlink(final) == path.name:
            final.unlink()
        path.rename(to)

    def _paths(self) -> list[Path]:
        return [path for path in self.folder.glob("step_*") if _NAME.fullmatch(path.name)]

    def _others(self, path: Path) -> str:
        """Advice for a checkpoint that cannot be used."""
        names = ", ".join(sorted(other.name for other in self._paths() if other.name != path.name))
        return f"restore it from a copy, or resume from another one ({names or 'there is none'})"


class _Measure(NamedTuple):
    """Size and checksum of a file."""

    bytes: int
    xxh3_64: str  # hexadecimal

    def __str__(self) -> str:
        return f"{self.bytes} bytes with xxh3_64 {self.xxh3_64}"


def _measured(path: Path, sync: bool = False) -> _Measure:
    """``sync``: the file is on disk on return."""
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


def _remove(path: Path) -> None:
    """Remove a link, or a folder with its contents, if it exists."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _write_rating(checkpoint: Path, rating: dict[str, float]) -> None:
    write_whole(checkpoint / _RATING, _json(rating))


def _read_json(path: Path, read: Callable[[Any], T]) -> T | None:
    """Parse a JSON file with ``read``; None if it does not exist. Raises CheckpointError if it is damaged, or cannot be
    read."""
    try:
        return read(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        why = f"{type(e).__name__}: {e}"
        raise CheckpointError(f"{path} is damaged ({why}); restore it from a copy or delete its folder") from None


def _rating(path: Path) -> dict[str, float]:
    """Empty if damaged: a checkpoint is usable without its rating."""
    try:
        return _read_json(path / _RATING, dict) or {}
    except CheckpointError:
        return {}


def _metadata(value: Any) -> CheckpointMetadata:
    metadata = CheckpointMetadata(**value)
    return replace(metadata, version=PolicyVersion(*metadata.version))


def _checksums(value: Any) -> dict[str, _Measure]:
    return {name: _Measure(**measure) for name, measure in value["files"].items()}
