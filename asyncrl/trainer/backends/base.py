"""The backend seam: interface of a training framework, and the registry that finds it. SPMD: every rank makes the same
calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.models.config import ModelConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.manifest import Manifest
from asyncrl.plugins.registry import Registry


@dataclass
class TrainBatch:
    """Packed sequences of one rank: ``B`` sequences, ``T`` tokens with prompts, ``R`` response tokens.

    ``tokens`` int32 [T]; sequence b owns tokens cu_seqlens[b]:cu_seqlens[b+1] (int64 [B+1]). Response columns run over
    all sequences in order: ``targets`` int32 [R] are the response tokens, ``rows`` int64 [R] the packed positions whose
    logits predict them (each one before its token), ``row_offsets`` int64 [B+1] the sequences' bounds in them.
    ``loss_mask`` bool [R], ``columns``: [R] by name (float32 ``behaviour_logprobs``, ``weights``, ``advantages``, later
    ``proximal_logprobs``, ``reference_logprobs``; int32 ``sampler``), ``sequence_columns``: [B] by name (``rewards``,
    ``group`` …).
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
        """A batch of the given sequences, in that order."""
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

    @staticmethod
    def joined(parts: Sequence[TrainBatch]) -> TrainBatch:
        """All sequences of ``parts``, which have the same columns. ``group`` and ``sample`` continue to count from one
        part to the next."""
        if len(parts) == 1:
            return parts[0]
        ends = lambda values: np.cumsum([0, *values]).astype(np.int64)
        tokens, rows = ends(len(part.tokens) for part in parts), ends(len(part.targets) for part in parts)
        sequence_columns = {k: [part.sequence_columns[k] for part in parts] for k in parts[0].sequence_columns}
        for name in ("group", "sample"):
            counted = sequence_columns[name]
            before = ends(values.max(initial=-1) + 1 for values in counted)
            sequence_columns[name] = [values + base for values, base in zip(counted, before)]
        return TrainBatch(
            tokens=np.concatenate([part.tokens for part in parts]),
            cu_seqlens=np.concatenate([[0], *(part.cu_seqlens[1:] + base for part, base in zip(parts, tokens))]),
            rows=np.concatenate([part.rows + base for part, base in zip(parts, tokens)]),
            targets=np.concatenate([part.targets for part in parts]),
            row_offsets=np.concatenate([[0], *(part.row_offsets[1:] + base for part, base in zip(parts, rows))]),
            loss_mask=np.concatenate([part.loss_mask for part in parts]),
            columns={k: np.concatenate([part.columns[k] for part in parts]) for k in parts[0].columns},
            sequence_columns={k: np.concatenate(values) for k, values in sequence_columns.items()},
        )


@dataclass
class LossOutput:
    """A micro-batch's loss and metrics.

    ``loss``: weighted sum over its tokens; the sum over all micro-batches and ranks, divided by the global denominator,
    is the batch's loss. ``sums``: scalars, each a sum over the tokens whose weight (column ``weights``) is not 0; the
    metrics are means over these. ``counts``: vectors, whose metrics are plain sums, one for each element; ``extremes``:
    scalars reduced by maximum."""

    loss: Tensor
    sums: dict[str, Tensor]
    counts: dict[str, Tensor] = field(default_factory=dict)
    extremes: dict[str, Tensor] = field(default_factory=dict)


#: metric of an optimizer step: the number of tokens over which its means are
TRAINED = "trained_tokens"

#: of a model, float32 [R] by name: a language model's are ``logprobs`` and ``entropy``
Outputs = Mapping[str, Tensor]
#: (outputs of the policy, micro-batch) → LossOutput
LossFunction = Callable[[Outputs, TrainBatch], LossOutput]


class NonFiniteError(ArithmeticError):
    """Loss or gradient norm is not finite; the optimizer step was not taken."""


class Backend(Protocol):
    """One rank of the trainer.

    ``export``, ``outputs``, ``summed``, ``accumulate``, ``optimizer_step`` and ``load`` are collective: all ranks call
    them in the same order. ``write`` is collective too, but ordered separately."""

    rank: int
    world_size: int
    #: index and number of the data parallel copies; ranks that hold one copy of the model share a data_rank
    data_rank: int
    data_ranks: int
    #: float64 [2]: numbers that the caller keeps in the training state, equal on all ranks
    kept: Tensor

    @property
    def in_parts(self) -> bool:
        """True if an optimizer step's gradient may be accumulated over several calls."""
        ...

    @property
    def only_policy_loss(self) -> bool:
        """True if nothing but the policy's loss learns from `accumulate`: no draft, no balance of experts."""
        ...

    @property
    def prompts_once(self) -> bool:
        """True if the prompt of a group's sequences may be computed once."""
        ...

    def manifest(self) -> Manifest: ...

    def export(self, base: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The sent tensors of the manifest, whole, in its order; without ``base`` those of `Manifest.without_base`.
        Collective over all ranks, yields on senders only. A yielded tensor keeps its values until the send is over, so
        it may be sent without a copy."""
        ...

    def outputs(self, batch: TrainBatch, temperature: float, model: str = "policy") -> Mapping[str, np.ndarray]:
        """`Outputs` for this rank's batch, without gradient, of one of the models that the rank holds under its current
        weights: ``policy``, or ``reference``. Raises RuntimeError for one that it does not hold."""
        ...

    def summed(self, values: np.ndarray) -> np.ndarray:
        """The elementwise sum of all data ranks' ``values``, an array of one shape; collective."""
        ...

    def accumulate(
        self, batch: TrainBatch, loss: LossFunction, denominator: float, temperature: float, first: bool = True
    ) -> None:
        """Compute the gradient of (sum of losses over all ranks) / denominator on this rank's batch, which the backend
        cuts into micro-batches. If not ``first``, it is added to the gradient of the calls before, which had the same
        denominator and temperature."""
        ...

    def optimizer_step(self, scale: float = 1.0) -> Mapping[str, float]:
        """One optimizer step with ``scale`` times the accumulated gradient. Returns global metrics of what was
        accumulated: means, `TRAINED`, counts, extremes, ``loss``, ``grad_norm``, ``lr``. Raises NonFiniteError, without
        a step, if loss or gradient norm is not finite."""
        ...

    def stage(self) -> None:
        """Copy this rank's weights, optimizer, schedule and random state into host memory, allocated once. Training may
        continue after the return. Raises RuntimeError during a `write`."""

    def write(self, path: Path) -> None:
        """Write the last staged state into a folder, synced to disk; collective. May run in another thread while
        training continues. Raises CheckpointError on every rank if one cannot write, RuntimeError if nothing was staged
        or another write is running."""

    def load(self, path: Path) -> None:
        """Restore a state that `write` wrote at any number of ranks; collective. With the same number, training
        continues bit for bit. Raises CheckpointError if the folder is incomplete, or holds another model."""

    def export_hf(self, path: Path) -> None:
        """Write a Hugging Face checkpoint; collective, files from rank 0."""

    def close(self) -> None:
        """Leave the process groups; collective."""


class BackendSpec(Protocol):
    """A training framework as the run sees it before any of its packages is imported."""

    #: PyPI names of which at least one must be installed beside asyncrl; empty: none needed
    distributions: frozenset[str]
    #: dotted keys of options and sections that only this backend reads; with another one they must keep their defaults
    options: frozenset[str]

    def ranks_per_copy(self, config: Config) -> int:
        """Number of trainer ranks that together hold one copy of the model, and train on the same sequences."""
        ...

    def weight_shards(self, config: Config) -> int:
        """Number of shards of weights and optimizer state, one per rank; for memory estimates."""
        ...

    def problems(self, config: Config) -> Iterator[str]:
        """One line per problem with the options, each beginning with an option's key."""
        ...

    def check_model(self, config: Config, path: str, mtp_from_trunk: bool) -> ModelConfig:
        """Check that a checkpoint has what the backend needs, without reading tensors. Raises CheckpointError."""
        ...

    def model_problems(self, config: Config, text: Mapping[str, Any]) -> Iterator[str]:
        """As `problems`, for options that do not suit the model. ``text``: the text part of its config.json."""
        ...

    def make(self, config: Config, rank: int, world_size: int, init_method: str | None, recorder: Recorder) -> Backend:
        """The backend of one rank, in that rank's process; imports the framework. Collective."""
        ...


BACKENDS: Registry[BackendSpec] = Registry(
    kind="backend",
    option="trainer.backend",
    package="asyncrl.trainer.backends",
    attribute="BACKEND",
    entry_points="asyncrl.backends",
    interface=BackendSpec,
)


def computes_in_bfloat16(config: Config) -> bool:
    """trainer.mixed_precision, with ``auto`` resolved."""
    if config.trainer.mixed_precision == "auto":
        return ModelConfig.load(config.model.path).engine_dtype(config.rollout.engine.dtype) == "bfloat16"
    return config.trainer.mixed_precision == "bfloat16"
