"""Export of a backend's weights: to the engines, and as Hugging Face folders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import copy_tokenizer, is_draft, save_checkpoint
from asyncrl.models.config import engine_dtype
from asyncrl.models.lora import PEFT_PREFIX, save_adapter
from asyncrl.param_sync.lora.merge import MergingExport
from asyncrl.param_sync.manifest import AdapterSpec, Manifest, TensorSpec, is_adapter
from asyncrl.trainer.backends.state import checkpoint_dtype

Tensors = Iterator[tuple[str, Tensor]]


class ModelConfig(Protocol):
    """A config.json: ``raw`` is its content, ``dtype`` the dtype that it names."""

    @property
    def raw(self) -> dict[str, Any]: ...

    @property
    def dtype(self) -> str: ...


class Weights(Protocol):
    """A backend's model under the tensor names of safetensors files. A LoRA pair, ``…lora_A.weight`` and
    ``…lora_B.weight``, follows the weight that it adapts."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def tied_to(self) -> str | None:
        """Name of the embedding that is the head too, if it is."""
        ...

    @property
    def wide(self) -> frozenset[str]:
        """Names of the tensors that are float32 whatever the dtype of the others."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, in the order of `whole`; without a tied head."""
        ...

    @property
    def trained(self) -> frozenset[str]:
        """Names of the tensors that an optimizer steps."""
        ...

    def whole(self, dtype: torch.dtype, wanted: Callable[[str], bool], exact: bool) -> Tensors:
        """(name, whole tensor as ``dtype``, a wide one as float32) of those ``wanted``, one at a time: the weights that
        the model computes with, or with ``exact`` the optimizer's master weights. Collective over all ranks, yields on
        rank 0 only."""
        ...


class Export:
    """Exports a model to engines and to disk; ``adapter`` is merged into it for engines that take no adapters.

    Collective: all ranks make the same calls and exhaust the returned iterators; rank 0 gets the tensors and writes."""

    def __init__(self, weights: Weights, adapter: AdapterSpec | None, config: Config, rank: int) -> None:
        self._weights, self._adapter, self._config, self._rank = weights, adapter, config, rank
        self._dtype = engine_dtype(weights.model.dtype, config.rollout.engine.dtype)
        self._merges = adapter is not None and not sends_adapters(config)
        self._first_draft: dict[str, Tensor] = {}
        if not config.param_sync.reload_draft:
            draft = weights.whole(getattr(torch, self._dtype), is_draft, exact=False)
            self._first_draft = {name: tensor.clone() for name, tensor in draft}

    @functools.cached_property
    def manifest(self) -> Manifest:
        """All tensors of the model in the order of its parameters, in the engine's dtype, which may differ from the
        checkpoint's. A tied head is listed last but not sent."""
        manifest = self._listed(self._dtype)
        return MergingExport(manifest).merged if self._merges else manifest

    def tensors(self, base: bool) -> Tensors:
        """The manifest's tensors; without ``base`` the trained ones. Without ``param_sync.reload_draft`` the draft
        keeps its initial values."""
        dtype = getattr(torch, self._dtype)
        wanted = lambda name: base or name in self._weights.trained
        for name, tensor in self._merged(dtype, exact=False) if self._merges else self._sent(dtype, wanted):
            yield name, self._first_draft.get(name, tensor)

    def write_hf(self, path: Path) -> None:
        """Write a checkpoint in the dtype that its config.json names, or an adapter in float32."""
        adapter, dtype = self._adapter, checkpoint_dtype(self._weights.model.dtype)
        alone = adapter is not None and self._config.checkpoint.export_lora == "adapter"
        if alone:
            tensors = self._sent(torch.float32, is_adapter, exact=True)
        else:
            tensors = self._sent(dtype, exact=True) if adapter is None else self._merged(dtype, exact=True)
        if self._rank != 0:
            list(tensors)  # takes part in the collectives; yields nothing
        elif alone and adapter is not None:
            base = self._config.model.path
            save_adapter(path, dict(tensors), base, adapter.r, adapter.alpha, adapter.target_modules)
        else:
            save_checkpoint(path, tensors, self._weights.model)
        if self._rank == 0:
            copy_tokenizer(self._config.model.path, path)

    def _listed(self, dtype: str) -> Manifest:
        shapes = self._weights.shapes
        specs = [
            TensorSpec(
                _sent_name(name),
                "float32" if name in self._weights.wide else dtype,
                shape,
                "draft" if is_draft(name) else "target",
            )
            for name, shape in shapes.items()
        ]
        if embedding := self._weights.tied_to:
            specs.append(TensorSpec("lm_head.weight", dtype, shapes[embedding], "target", tied_to=embedding))
        adapter = dataclasses.replace(self._adapter, dtype=dtype) if self._adapter is not None else None
        frozen_draft = adapter is not None and not any(map(is_draft, self._weights.trained))
        return Manifest(tuple(specs), adapter, frozen_draft)

    def _sent(
        self, dtype: torch.dtype, wanted: Callable[[str], bool] = lambda name: True, exact: bool = False
    ) -> Tensors:
        for name, tensor in self._weights.whole(dtype, wanted, exact):
            yield _sent_name(name), tensor

    def _merged(self, dtype: torch.dtype, exact: bool) -> Tensors:
        """(name, whole tensor as ``dtype``), with adapters merged into their weights in float32 and cast once."""
        tensors = self._sent(torch.float32, exact=exact)
        if self._rank == 0:
            tensors = MergingExport(self._listed("float32"))(tensors)
        for name, tensor in tensors:
            yield name, tensor if name in self._weights.wide else tensor.to(dtype)


def _sent_name(parameter: str) -> str:
    """A parameter's name in exports: its own, or PEFT's for an adapter."""
    return PEFT_PREFIX + parameter if is_adapter(parameter) else parameter
