"""Whole weights of the torch backend's model, gathered from shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.models.decoder import Decoder


class ShardedWeights:
    """See `asyncrl.trainer.backends.export.Weights`. The float32 parameters are the master weights, so ``exact`` makes
    no difference."""

    def __init__(self, model: Decoder, rank: int) -> None:
        self._decoder, self._rank = model, rank
        self.model, self.tied_head = model.config, model.config.tie_word_embeddings
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)

    @torch.no_grad()
    def whole(
        self, dtype: torch.dtype, wanted: Callable[[str], bool], exact: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Shards are converted before they are gathered, so a bfloat16 export moves half the bytes."""
        for name, parameter in self._decoder.named_parameters():
            if wanted(name):
                tensor = cast(DTensor, parameter.detach().to(dtype)).full_tensor()
                if self._rank == 0:
                    yield name, tensor
