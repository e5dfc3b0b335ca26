"""Whole weights of the torch backend's model, gathered from shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
        self.model, self.tied_to, self.wide = model.config, model.tied_to, model.wide
        parameters = dict(model.module.named_parameters())
        #: by parameter; without `FileTensors`, and for adapters, files have the parameter itself
        self._files = {n: None if is_adapter(n) else model.files for n in parameters}
        self._parts = {
            name: {name: tuple(p.shape)} if (files := self._files[name]) is None else files.parts[name]
            for name, p in parameters.items()
        }
        #: (module, attribute) by parameter: FSDP puts another tensor in its place for a while
        self._places = {n: (model.module.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in parameters}
        self.shapes = {n: shape for parts in self._parts.values() for n, shape in parts.items()} | dict(model.carried)
        self.trained = frozenset(part for n, p in parameters.items() if p.requires_grad for part in self._parts[n])

    @torch.no_grad()
    def whole(
        self, dtype: torch.dtype, wanted: Callable[[str], bool], exact: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Shards are converted before they are gathered, so a bfloat16 export moves half the bytes."""
        for name, (module, attribute) in self._places.items():
            if any(map(wanted, self._parts[name])):
                tensor: Tensor = getattr(module, attribute)
                if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1:
                    tensor = tensor.to_local()  # each operation on a DTensor takes a tenth of a millisecond
                tensor = tensor.detach().to(dtype)
                tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if self._rank == 0:
                    parts = {name: tensor} if (files := self._files[name]) is None else files.of(name, tensor)
                    yield from (part for part in parts.items() if wanted(part[0]))
        if self._rank == 0 and (carried := list(filter(wanted, self._model.carried))):
            with open_tensors(self._model.path) as read:
                yield from ((name, read(name).to(torch.float32 if name in self.wide else dtype)) for name in carried)
