"""Whole weights of the torch backend's model, gathered from shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.models.checkpoint import open_tensors
from asyncrl.param_sync.manifest import is_adapter
from asyncrl.trainer.backends.torch.models import TorchModel


class ShardedWeights:
    """See `asyncrl.trainer.backends.export.Weights`. The float32 parameters are the master weights, so ``exact`` makes
    no difference."""

    def __init__(self, model: TorchModel, rank: int) -> None:
        self._model, self._rank = model, rank
        self.model, self.tied_to = model.config, model.tied_to
        self._parts = {name: self._shapes(name, tensor) for name, tensor in self._tensors().items()}
        sharded = {name: shape for parts in self._parts.values() for name, shape in parts.items()}
        self.shapes = sharded | dict(model.carried)
        trained = (name for name, p in model.module.named_parameters() if p.requires_grad)
        self.trained = frozenset(part for name in trained for part in self._parts[name])

    @torch.no_grad()
    def whole(
        self, dtype: torch.dtype, wanted: Callable[[str], bool], exact: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Shards are converted before they are gathered, so a bfloat16 export moves half the bytes."""
        for name, tensor in self._tensors().items():
            if any(map(wanted, self._parts[name])):
                tensor = tensor.detach().to(dtype)
                tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if self._rank == 0:
                    yield from (part for part in self._split(name, tensor).items() if wanted(part[0]))
        if self._rank == 0 and (carried := list(filter(wanted, self._model.carried))):
            with open_tensors(self._model.path) as read:
                yield from ((name, read(name).to(dtype)) for name in carried)

    def _tensors(self) -> Mapping[str, Tensor]:
        files = self._model.files
        return dict(self._model.module.named_parameters()) if files is None else files.stored

    def _shapes(self, name: str, tensor: Tensor) -> dict[str, tuple[int, ...]]:
        files = self._model.files
        return {name: tuple(tensor.shape)} if files is None or is_adapter(name) else files.parts[name]

    def _split(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        files = self._model.files
        return {name: tensor} if files is None or is_adapter(name) else files.of(name, tensor)
