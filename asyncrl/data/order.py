"""Order of prompts: shuffled every epoch, endless or limited, resumable after any prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from asyncrl.data.prompts import DataError
from asyncrl.types.prompts import Prompt

_UID = re.compile(r"e(\d+)-(\d{6,})")


class PromptOrder(Iterator[Prompt]):
    """Iterates over ``prompts`` epoch by epoch; ``epochs`` 0 never ends.

    Each prompt comes once per epoch, with ``uid`` ``e{epoch}-{row:06d}``, unique in the run. An epoch's order depends
    only on seed and epoch, so a uid identifies a position::

        order = PromptOrder(prompts, seed=0, shuffle=True, epochs=0)
        first = next(order)
        again = PromptOrder(prompts, seed=0, shuffle=True, epochs=0)
        again.continue_after(first.uid)        # continues with the second prompt
        again.at(first.uid)                    # returns the first again
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True, epochs: int = 0) -> None:
        if not prompts:
            raise DataError("expected at least one prompt, found none")
        self._prompts, self._seed, self._shuffle, self._epochs = prompts, seed, shuffle, epochs
        self._start(epoch=0)

    def __next__(self) -> Prompt:
        if self._position == len(self._rows):
            self._start(self._epoch + 1)
        if self._epochs and self._epoch >= self._epochs:
            raise StopIteration
        row = int(self._rows[self._position])
        self._position += 1
        return self._prompt(self._epoch, row)

    def at(self, uid: str) -> Prompt:
        """Prompt that was issued as ``uid``. Raises DataError if it is not a row of these prompts."""
        return self._prompt(*self._parse(uid))

    def continue_after(self, uid: str) -> None:
        """Continues with the prompt that follows ``uid``. Raises DataError if it is not a row of these prompts."""
        epoch, row = self._parse(uid)
        self._start(epoch)
        self._position = self._rows.tolist().index(row) + 1

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

    def _start(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._rows: np.ndarray = np.arange(len(self._prompts))
        if self._shuffle:
            np.random.default_rng([self._seed, epoch]).shuffle(self._rows)
