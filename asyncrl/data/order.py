"""Order of prompts: shuffled every epoch, mixed by data source, endless or limited, resumable after any prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from asyncrl.data.prompts import DataError
from asyncrl.types.prompts import Prompt

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
    DataError for a mixture that does not name each source."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        shuffle: bool = True,
        epochs: int = 0,
        mixture: Mapping[str, float] | None = None,
    ) -> None:
        if not prompts:
            raise DataError("expected at least one prompt, found none")
        self._prompts, self._epochs = prompts, epochs
        if mixture:
            sources = np.array([prompt.data_source for prompt in prompts])
            _check(mixture, sources)
            total = sum(mixture.values())
            names = [name for name in sorted(mixture) if mixture[name]]
            self._shares = [mixture[name] / total for name in names]
            rows = [np.flatnonzero(sources == name) for name in names]
            seeds = [[seed, k] for k in range(len(rows))]
        else:
            self._shares, rows, seeds = [1.0], [np.arange(len(prompts))], [[seed]]
        self._sources = [_Source(of, key, shuffle) for of, key in zip(rows, seeds, strict=True)]

    def __next__(self) -> Prompt:
        source = self._next_source()
        epoch, row = source.peek()
        if self._epochs and epoch >= self._epochs:
            raise StopIteration
        source.issued += 1
        return self._prompt(epoch, row)

    def at(self, uid: str) -> Prompt:
        """Prompt that was issued as ``uid``. Raises DataError if it is not a row of these prompts."""
        return self._prompt(*self._parse(uid))

    def continue_after(self, uid: str) -> None:
        """Continues with the prompt that follows ``uid``. Raises DataError if it is not a row of these prompts."""
        epoch, row = self._parse(uid)
        its = next((source for source in self._sources if row in source.rows), None)
        if its is None:
            raise DataError(
                f"{uid!r} is of a data source that data.mixture leaves out: resume with the first run's mixture"
            )
        target = its.place(epoch, row)
        for source in self._sources:
            source.issued = 0
        if len(self._sources) == 1:
            its.issued = target + 1
        while its.issued <= target:  # others were issued meanwhile
            self._next_source().issued += 1

    def _next_source(self) -> _Source:
        """The source that is furthest behind its share."""
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


def _check(mixture: Mapping[str, float], sources: np.ndarray) -> None:
    found = sorted(set(sources.tolist()))
    if sorted(mixture) != found:
        raise DataError(
            f"data.mixture: expected a share for each data source, {', '.join(found)}; found "
            f"{', '.join(sorted(mixture))}"
        )
    if any(not math.isfinite(share) or share < 0 for share in mixture.values()) or not any(mixture.values()):
        raise DataError(f"data.mixture: expected shares of at least 0, one of them above 0; found {dict(mixture)}")
