"""CUDA graphs of decode passes: a pass of hundreds of kernels, launched by one call.

Launching a decode pass kernel by kernel takes the CPU several times as long as the GPU computes. A graph repeats fixed
kernels on fixed addresses, so passes must not depend on anything but their inputs: they run on a rounded number of rows
(`graph_rows`), over the weights and KV in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def graph_rows(rows: int, slots: int) -> int:
    """``rows`` rounded up, within ``slots``: to a power of two up to 8, then to a multiple of a quarter of the next
    one."""
    power = (rows - 1).bit_length()
    step = 1 << (power if rows <= 8 else power - 2)
    return min(-(-rows // step) * step, slots)


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    given: list[Tensor | None]  # what each input was copied from last


class Graphs:
    """Records passes by key and repeats them. The outputs of a pass stay valid until the next one, on the same
    stream."""

    def __init__(self) -> None:
        self._recorded: dict[Hashable, _Recorded] = {}
        self._pool: Any = None  # of the memory that all recordings share

    def run(self, key: Hashable, inputs: Sequence[Tensor], work: Callable[..., tuple[Tensor, ...]]) -> Sequence[Tensor]:
        """``work(*inputs)``, on the thread's current device and stream. Equal keys mean equal work on equal shapes. An
        input that is the same tensor as in the last run of the key must not have been written meanwhile."""
        found = self._recorded.get(key)
        if found is None:
            return self._record(key, inputs, work)
        for i, (own, given) in enumerate(zip(found.inputs, inputs, strict=True)):
            if found.given[i] is not given:
                own.copy_(given)
                found.given[i] = given
        found.graph.replay()
        return found.outputs

    def forget(self) -> None:
        """Drop all recordings: what they read or write has moved."""
        self._recorded, self._pool = {}, None

    def _record(
        self, key: Hashable, inputs: Sequence[Tensor], work: Callable[..., tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Run the pass, which also compiles its kernels, and record it for the next time."""
        done = work(*inputs)
        own = [given.clone() for given in inputs]
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process go on using the device, to receive weights
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = work(*own)
        self._pool = graph.pool()
        self._recorded[key] = _Recorded(graph, own, outputs, [None] * len(own))
        return done
