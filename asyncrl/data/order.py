"""Order of prompts: shuffled every epoch, mixed by data source or by success, endless or limited, resumable after any
prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from asyncrl.config.schema import CurriculumConfig
from asyncrl.data.curriculum import Curriculum
from asyncrl.data.prompts import DataError
from asyncrl.types.prompts import Prompt

MAX_CLASSES = 32  # of a curriculum; each has its own epochs and metrics
SOURCE = "data_source"  # the class of a prompt is its source, whatever data.source_key names the column

_UID = re.compile(r"e(\d+)-(\d{6,})")


class PromptOrder(Iterator[Prompt]):
    """Iterates over ``prompts`` epoch by epoch; ``epochs`` 0 never ends.

    Each prompt comes once per epoch, with ``uid`` ``e{epoch}-{row:06d}``, unique in the run. The order depends only on
    the arguments, so a uid identifies a position::

        order = PromptOrder(prompts, seed=0, shuffle=True, epochs=0)
        first = next(order)
        again = PromptOrder(prompts, seed=0, shuffle=True, epochs=0)
        again.continue_after(first.uid)        # continues with the second prompt
        again.at(first.uid)                    # returns the first again

    ``mixture``: shares of data sources by name, in any unit. Every stretch of prompts has them as nearly as whole
    prompts allow, and each source has epochs of its own; the first one to have had ``epochs`` ends the order. Raises
    DataError for a mixture that does not name each source.

    ``curriculum``: the prompts' classes come by success instead, see `asyncrl.data.curriculum`. The caller says under
    which version it issues, and how each group ends; a uid alone does not identify a position then, but the groups of
    the run do::

        order.version = 3
        prompt = next(order)
        order.ended(prompt.uid, success=0.5)
        again.continue_from([(prompt.uid, 3, 0.5)])   # continues with the second prompt
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        shuffle: bool = True,
        epochs: int = 0,
        mixture: Mapping[str, float] | None = None,
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        if not prompts:
            raise DataError("expected at least one prompt, found none")
        self._prompts, self._epochs = prompts, epochs
        self.version = 0  #: number of the one under which the next prompt will be issued
        self._curriculum: Curriculum | None = None
        by = curriculum.by if curriculum else ""
        if mixture or by:
            classes = np.array([_class(prompt, by or SOURCE) for prompt in prompts])
            shares = mixture or dict.fromkeys(classes.tolist(), 1.0)
            _check(shares, classes)
            total = sum(shares.values())
            self.classes = [name for name in sorted(shares) if shares[name]]
            self._shares = [shares[name] / total for name in self.classes]
            rows = [np.flatnonzero(classes == name) for name in self.classes]
            seeds = [[seed, k] for k in range(len(rows))]
            if curriculum and by:
                _check_classes(by, self.classes)
                self._curriculum = Curriculum(self._shares, seed, curriculum.window, curriculum.floor)
        else:
            self._shares, rows, seeds, self.classes = [1.0], [np.arange(len(prompts))], [[seed]], []
        self._sources = [_Source(of, key, shuffle) for of, key in zip(rows, seeds, strict=True)]
        self._source_of_row = np.full(len(prompts), -1)
        for k, of in enumerate(rows):
            self._source_of_row[of] = k

    def __next__(self) -> Prompt:
        source = self._next_source()
        epoch, row = source.peek()
        if self._epochs and epoch >= self._epochs:
            raise StopIteration
        source.issued += 1
        prompt = self._prompt(epoch, row)
        if self._curriculum is not None:
            self._curriculum.issued(prompt.uid, self._sources.index(source), self.version)
        return prompt

    @property
    def adapts(self) -> bool:
        """There is a curriculum: prompts should be taken as late as possible."""
        return self._curriculum is not None

    def ended(self, uid: str, success: float | None) -> None:
        """A group has ended, with this share of its samples; None: it has no samples."""
        if self._curriculum is not None:
            self._curriculum.ended(uid, success)

    def figures(self) -> dict[str, float]:
        """Of each class, by name: its share of the next prompts, and its success."""
        if self._curriculum is None:
            return {}
        weights, success = self._curriculum.weights(self.version), self._curriculum.success(self.version)
        shares = {f"{name}/share": share for name, share in zip(self.classes, weights / weights.sum(), strict=True)}
        ended = zip(self.classes, success, strict=True)
        return shares | {f"{name}/success": found for name, found in ended if found is not None}

    def continue_from(self, history: Iterable[tuple[str, int, float | None]]) -> None:
        """Continues after these groups, all that the run has issued: uid, version and success, in the order of issue.
        Raises DataError if one is not a row of these prompts."""
        assert self._curriculum is not None
        for uid, version, success in history:
            source = self._source_of(uid)
            source.issued += 1
            self._curriculum.issued(uid, self._sources.index(source), version)
            if success is not None:  # else it may be in flight
                self._curriculum.ended(uid, success)

    def at(self, uid: str) -> Prompt:
        """Prompt that was issued as ``uid``. Raises DataError if it is not a row of these prompts."""
        return self._prompt(*self._parse(uid))

    def continue_after(self, uid: str) -> None:
        """Continues with the prompt that follows ``uid``. Raises DataError if it is not a row of these prompts."""
        its = self._source_of(uid)
        target = its.place(*self._parse(uid))
        for source in self._sources:
            source.issued = 0
        if len(self._sources) == 1:
            its.issued = target + 1
        while its.issued <= target:  # others were issued meanwhile
            self._next_source().issued += 1

    def _source_of(self, uid: str) -> _Source:
        _, row = self._parse(uid)
        if (found := int(self._source_of_row[row])) < 0:
            raise DataError(
                f"{uid!r} is of a data source that data.mixture leaves out: resume with the first run's mixture"
            )
        return self._sources[found]

    def _next_source(self) -> _Source:
        """That of the class which the curriculum draws, else the one that is furthest behind its share."""
        if self._curriculum is not None:
            return self._sources[self._curriculum.draw(self.version)]
        count = 1 + sum(source.issued for source in self._sources)
        behind = [share * count - source.issued for share, source in zip(self._shares, self._sources, strict=True)]
        return self._sources[behind.index(max(behind))]

    def _prompt(self, epoch: int, row: int) -> Prompt:
        return replace(self._prompts[row], uid=f"e{epoch}-{row:06d}", epoch=epoch)

    def _parse(self, uid: str) -> tuple[int, int]:
        """(epoch, row)"""
        parts = _UID.fullmatch(uid)
        if parts is None or int(parts[2]) >= len(self._prompts):
            raise DataError(
                f"expected e<epoch>-<row> with a row below {len(self._prompts)}, found {uid!r}: resume with the prompt "
                "files of the first run"
            )
        return int(parts[1]), int(parts[2])


class _Source:
    """The rows of one source, and how many prompts were issued of it. ``seed``: of its epochs' orders, before the
    epoch's number."""

    def __init__(self, rows: np.ndarray, seed: list[int], shuffle: bool) -> None:
        self.rows, self.issued = rows, 0
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._order = -1, rows

    def peek(self) -> tuple[int, int]:
        """Epoch and row of its next prompt."""
        epoch, position = divmod(self.issued, len(self.rows))
        return epoch, int(self._of(epoch)[position])

    def place(self, epoch: int, row: int) -> int:
        """How many prompts of the source come before this one."""
        return epoch * len(self.rows) + self._of(epoch).tolist().index(row)

    def _of(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.rows.copy()
            if self._shuffle:
                np.random.default_rng([*self._seed, epoch]).shuffle(self._order)
        return self._order


def _class(prompt: Prompt, by: str) -> str:
    """Raises DataError for a prompt without the column."""
    if by == SOURCE:
        return prompt.data_source
    if by not in prompt.extra:
        raise DataError(
            f"data.curriculum.by: prompt {prompt.prompt_id} has no column {by!r}; expected it in each row, or "
            f"{SOURCE}, which each has"
        )
    return str(prompt.extra[by])


def _check_classes(by: str, classes: Sequence[str]) -> None:
    if not 2 <= len(classes) <= MAX_CLASSES:
        raise DataError(
            f"data.curriculum.by: expected 2 to {MAX_CLASSES} different values in the column {by!r}, found "
            f"{len(classes)}"
        )


def _check(mixture: Mapping[str, float], sources: np.ndarray) -> None:
    found = sorted(set(sources.tolist()))
    if sorted(mixture) != found:
        raise DataError(
            f"data.mixture: expected a share for each data source, {', '.join(found)}; found "
            f"{', '.join(sorted(mixture))}"
        )
    if any(not math.isfinite(share) or share < 0 for share in mixture.values()) or not any(mixture.values()):
        raise DataError(f"data.mixture: expected shares of at least 0, one of them above 0; found {dict(mixture)}")
