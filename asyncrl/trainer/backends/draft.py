"""MTP draft training, as far as all backends share it; `asyncrl.trainer.draft_loss` defines the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.backends.packing import MicroBatch
from asyncrl.trainer.backends.scalars import reduce_scalars
from asyncrl.trainer.batches import partition
from asyncrl.trainer.draft_loss import draft_targets, draft_updates

#: micro-batches of a rank's sequences: of all, or of those at the given indices
MicroBatches = Callable[[TrainBatch, np.ndarray | None], list[MicroBatch]]


class DraftTraining(ABC):
    """The draft's optimizer steps, with their own ``options``; ``steps`` counts those taken.

    ``copies``: the ranks that train on different sequences; ``peers``: the ranks whose metrics are summed (None: all
    ranks)."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        micro_batches: MicroBatches,
        copies: dist.ProcessGroup | None = None,
        peers: dist.ProcessGroup | None = None,
    ) -> None:
        self._mtp, self._chunk_tokens = config.mtp, config.trainer.logprob_chunk_tokens
        self._device, self._micro_batches, self._copies, self._peers = device, micro_batches, copies, peers
        self.depths, self.detached = config.mtp.num_speculative_tokens, config.mtp.detach_encoder
        self.options = replace(config.trainer.optimizer, lr=config.mtp.learning_rate or config.trainer.optimizer.lr)
        self.steps = 0

    def counts(self, updates: Sequence[Sequence[MicroBatch]]) -> list[list[float]]:
        """Number of tokens that teach each depth in each update, over all ranks."""
        depths = range(1, self.depths + 1)
        own = {
            f"{u}/{depth}": torch.tensor(float(sum(len(draft_targets(m.batch, depth)[0]) for m in micros)))
            for u, micros in enumerate(updates)
            for depth in depths
        }
        found = reduce_scalars(own, dist.ReduceOp.SUM, self._device, self._copies)
        return [[found[f"{u}/{depth}"] for depth in depths] for u in range(len(updates))]

    def figures(self, sums: Mapping[str, Tensor], counts: Sequence[Sequence[float]]) -> dict[str, float]:
        """Metrics ``mtp/loss_1`` and so on: means over the tokens of each depth. Empty if ``sums`` is."""
        taught = [max(sum(count), 1.0) for count in zip(*counts, strict=True)]
        found = reduce_scalars(sums, dist.ReduceOp.SUM, self._device, self._peers)
        return {name: value / taught[int(name.rpartition("_")[2]) - 1] for name, value in found.items()}

    def learn(
        self, batch: TrainBatch, hidden: Mapping[int, Tensor], temperature: float, update: Callable[[], float]
    ) -> dict[str, float]:
        """Train a detached draft: `draft_updates` optimizer steps, each on an equal share of every rank's sequences,
        ``mtp.passes`` times. Returns the first pass's metrics, and the mean gradient norm of all passes.

        ``hidden``: the trunk's states [t, M] of each sequence, as far as this rank has them; the trunk does not run
        again. ``update`` takes an optimizer step and returns the gradient norm."""
        updates = [self._micro_batches(batch, share) for share in partition(batch.lengths, draft_updates(self._mtp))]
        counts = self.counts(updates)
        sums: dict[str, Tensor] = {}
        norms: list[float] = []
        for number in range(self._mtp.passes * len(updates)):
            micros, count = updates[number % len(updates)], counts[number % len(updates)]
            if not any(count):
                continue  # on a zero gradient AdamW would still move by momentum
            self._accumulate_gradients(micros, hidden, count, temperature, sums if number < len(updates) else {})
            norms.append(update())
        return self.figures(sums, counts) | ({"mtp/grad_norm": float(np.mean(norms))} if norms else {})

    @abstractmethod
    def _accumulate_gradients(
        self,
        micros: Sequence[MicroBatch],
        hidden: Mapping[int, Tensor],
        counts: Sequence[float],
        temperature: float,
        sums: dict[str, Tensor],
    ) -> None:
        """Gradient of one update, with ``counts`` tokens at each depth; adds the metrics to ``sums``."""
