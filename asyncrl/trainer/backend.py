"""The backend seam: what the training loop asks of a training framework. SPMD: every rank makes the same calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from asyncrl.param_sync.manifest import Manifest


@dataclass
class TrainBatch:
    """Sequences of one rank, packed: ``B`` of them, ``T`` tokens with prompts, ``R`` response tokens.

    ``tokens`` int32 [T]; sequence b owns tokens cu_seqlens[b]:cu_seqlens[b+1] (int64 [B+1]). The response columns run
    over all sequences in order: ``rows`` int64 [R] is the packed place whose logits draw the token (the place before
    it), ``targets`` int32 [R] that token, ``row_offsets`` int64 [B+1] who owns which. ``loss_mask`` bool [R],
    ``columns``: float32 [R] by name (``behaviour_logprobs``, ``advantages``, later ``proximal_logprobs``,
    ``reference_logprobs``), ``sequence_columns``: [B] by name (``rewards``, ``sequence_weight`` …).
    """

    tokens: np.ndarray
    cu_seqlens: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    row_offsets: np.ndarray
    loss_mask: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    sequence_columns: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 [B], prompt and response."""
        return np.diff(self.cu_seqlens)

    def select(self, sequences: Sequence[int]) -> TrainBatch:
        """The batch of these sequences, in this order."""
        starts, row_starts = self.cu_seqlens, self.row_offsets
        token_ix = [np.arange(starts[b], starts[b + 1]) for b in sequences]
        row_ix = [np.arange(row_starts[b], row_starts[b + 1]) for b in sequences]
        cu = np.concatenate([[0], np.cumsum([len(x) for x in token_ix])]).astype(np.int64)
        ro = np.concatenate([[0], np.cumsum([len(x) for x in row_ix])]).astype(np.int64)
        shift = np.concatenate(
            [np.arange(0), *(np.full(len(r), cu[i] - starts[b]) for i, (b, r) in enumerate(zip(sequences, row_ix)))]
        )
        tok = np.concatenate([np.arange(0), *token_ix])
        row = np.concatenate([np.arange(0), *row_ix])
        return TrainBatch(
            tokens=self.tokens[tok],
            cu_seqlens=cu,
            rows=self.rows[row] + shift,
            targets=self.targets[row],
            row_offsets=ro,
            loss_mask=self.loss_mask[row],
            columns={k: v[row] for k, v in self.columns.items()},
            sequence_columns={k: v[np.asarray(sequences, dtype=np.int64)] for k, v in self.sequence_columns.items()},
        )


@dataclass
class LossOutput:
    """``loss``: the sum over this micro-batch's tokens, each weighted so that the sum over all micro-batches and ranks,
    divided by the global denominator, is the batch's loss. ``sums``: further scalars that add up over micro-batches and
    ranks; ``extremes``: scalars of which the maximum counts."""

    loss: Tensor
    sums: dict[str, Tensor]
    extremes: dict[str, Tensor] = field(default_factory=dict)


#: (logprobs [R], entropy [R], micro-batch) → LossOutput
LossFunction = Callable[[Tensor, Tensor, TrainBatch], LossOutput]


@dataclass(frozen=True)
class Scores:
    """float32 [R] each."""

    logprobs: np.ndarray
    entropy: np.ndarray


class NonFiniteError(ArithmeticError):
    """A loss or a gradient norm that is not finite; the optimizer step was not taken."""


class Backend(Protocol):
    """``export``, ``logprobs``, ``train_step`` and ``load`` are collective: called by all ranks, in the same order.
    ``write`` is collective too, but in an order of its own."""

    rank: int
    world_size: int
    #: of those that take different sequences; ranks that hold one copy of the model together have the same data_rank
    data_rank: int
    data_ranks: int

    def manifest(self) -> Manifest: ...

    def export(self, base: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the manifest that travels, whole, in its order; without ``base`` those of
        `Manifest.without_base`. Collective on all ranks, yielding on senders only. A tensor that is held stays as it is
        until the send is over: it may travel from where it lies."""
        ...

    def logprobs(self, batch: TrainBatch, temperature: float) -> Scores:
        """Score this rank's batch without gradient, under the current weights."""
        ...

    def reference_logprobs(self, batch: TrainBatch, temperature: float) -> np.ndarray:
        """float32 [R]: this rank's batch under the frozen reference model; collective. RuntimeError if none is held."""
        ...

    def train_step(
        self, batch: TrainBatch, loss: LossFunction, global_denominator: float, temperature: float
    ) -> Mapping[str, float]:
        """One optimizer step over this rank's batch. The backend cuts it into micro-batches; the gradient is that of
        (sum of losses over all ranks) / global_denominator. Returns global figures: the sums divided by the
        denominator, the extremes, ``loss``, ``grad_norm``, ``lr``. Raises NonFiniteError instead of stepping on a loss
        or gradient norm that is not finite."""
        ...

    def state(self) -> Mapping[str, Any]: ...

    def stage(self) -> None:
        """Copy weights, optimizer, schedule and the random state of this rank into host memory that is made once and
        reused. Done on return: training may go on. RuntimeError while a `write` is under way."""

    def write(self, path: Path) -> None:
        """Write what `stage` copied last into a folder, and onto the disk; collective. In a thread of its own if
        training goes on meanwhile. Raises CheckpointError on every rank if one cannot write, RuntimeError if nothing
        was staged or another write is under way."""

    def load(self, path: Path) -> None:
        """Read what `write` wrote, at any number of ranks; collective. At the same number, all that follows is bit for
        bit what it would have been. Raises CheckpointError if the folder is not whole, or of another model."""

    def export_hf(self, path: Path) -> None:
        """Write a Hugging Face checkpoint; collective, files from rank 0."""

    def close(self) -> None:
        """Leave the process group; collective."""
