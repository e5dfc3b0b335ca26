"""The draft's losses and updates on FSDP2 shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from asyncrl.config.schema import Config
from asyncrl.models.decoder import Decoder, DraftScores
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.backends.draft import DraftTraining, MicroBatches
from asyncrl.trainer.backends.packing import PADDING, MicroBatch
from asyncrl.trainer.backends.scalars import add_scalars


class TorchDraftTraining(DraftTraining):
    def __init__(
        self, config: Config, device: torch.device, micro_batches: MicroBatches, model: Decoder, world_size: int
    ) -> None:
        super().__init__(config, device, micro_batches)
        self._model, self._world_size = model, world_size

    def loss(self, drafts: Sequence[DraftScores], counts: Sequence[float], sums: dict[str, Tensor]) -> Tensor:
        """A micro-batch's share of an update with ``counts`` tokens at each depth; adds metrics to ``sums``."""
        # FSDP averages gradients over ranks, but the losses are sums over them
        scale = self._world_size * self._mtp.loss_scaling_factor / self.depths
        for depth, draft in enumerate(drafts, 1):
            add_scalars(sums, {f"mtp/loss_{depth}": draft.loss.detach(), f"mtp/accuracy_{depth}": draft.hits})
        return torch.stack([d.loss * (scale / max(n, 1.0)) for d, n in zip(drafts, counts, strict=True)]).sum()

    def learn(
        self, batch: TrainBatch, hidden: Mapping[int, Tensor], temperature: float, update: Callable[[], float]
    ) -> dict[str, float]:
        """See `DraftTraining.learn`. Only the draft changes: embedding and head stay gathered throughout."""
        blank = torch.zeros(1, self._model.config.hidden_size, device=self._device)
        root = cast(FSDPModule, self._model)
        root.set_reshard_after_backward(False, recurse=False)
        try:
            return super().learn(batch, {PADDING: blank, **hidden}, temperature, update)
        finally:
            root.set_reshard_after_backward(True, recurse=False)
            root.reshard()

    def _accumulate_gradients(
        self,
        micros: Sequence[MicroBatch],
        hidden: Mapping[int, Tensor],
        counts: Sequence[float],
        temperature: float,
        sums: dict[str, Tensor],
    ) -> None:
        for micro in micros:
            scores = self._model.score_drafts(
                torch.cat([hidden[b] for b in micro.sequences]),
                micro.tokens,
                micro.layout,
                micro.drafts(self.depths),
                temperature,
                self._chunk_tokens,
                self._mtp.loss,
            )
            self.loss(scores, counts, sums).backward()
