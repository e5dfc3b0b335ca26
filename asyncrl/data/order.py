"""In which order prompts are issued: shuffled anew in each epoch, endless or not, resumable to the very prompt."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.data.prompts import DataError
from asyncrl.sample import Prompt


class PromptOrder(Iterator[Prompt]):
    """Iterate over ``prompts`` epoch by epoch; ``epochs`` 0 never ends.

    Each prompt comes once in an epoch, with ``uid`` ``e{epoch}-{row:06d}``, unique in the run. An epoch's order depends
    on seed and epoch alone, so a few integers say where the iteration stands::

        order = PromptOrder(prompts, seed=0, shuffle=True, epochs=0)
        first = next(order)
        state = order.state()                  # JSON
        again = PromptOrder(prompts, seed=0, shuffle=True, epochs=0)
        again.load_state(state)                # goes on with the second prompt
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True, epochs: int = 0) -> None:
        if not prompts:
            raise DataError("an order needs at least one prompt, found none")
        self._prompts, self._seed, self._shuffle, self._epochs = prompts, seed, shuffle, epochs
        self._place(epoch=0, position=0)

    def __next__(self) -> Prompt:
        if self._position == len(self._rows):
            self._place(self._epoch + 1, position=0)
        if self._epochs and self._epoch >= self._epochs:
            raise StopIteration
        row = int(self._rows[self._position])
        self._position += 1
        return replace(self._prompts[row], uid=f"e{self._epoch}-{row:06d}", epoch=self._epoch)

    def state(self) -> dict[str, Any]:
        """Where the iteration stands, and a fingerprint of what it runs over; JSON."""
        return {"epoch": self._epoch, "position": self._position, "over": self._fingerprint()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError if prompts, seed or shuffling were others then."""
        if state["over"] != self._fingerprint():
            raise DataError(
                f"the order to resume ran over {state['over']}, this one runs over {self._fingerprint()}: resume with "
                f"the prompt files, seed and data.shuffle of the first run"
            )
        self._place(int(state["epoch"]), int(state["position"]))

    def _place(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._rows = np.arange(len(self._prompts))
        if self._shuffle:
            np.random.default_rng([self._seed, epoch]).shuffle(self._rows)

    def _fingerprint(self) -> dict[str, Any]:
        ids = "\n".join(prompt.prompt_id for prompt in self._prompts)
        return {
            "prompts": len(self._prompts),
            "ids_crc32": zlib.crc32(ids.encode()),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }
