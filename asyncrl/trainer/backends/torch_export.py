"""The weights of the torch backend's model as they leave it: to the engines, and as Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import copy_tokenizer, is_draft, save_checkpoint
from asyncrl.models.decoder import Decoder
from asyncrl.models.lora import PEFT_PREFIX, save_adapter
from asyncrl.param_sync.adapter_merge import MergingExport
from asyncrl.param_sync.manifest import AdapterSpec, Manifest, TensorSpec, is_adapter
from asyncrl.trainer.backends.torch_state import checkpoint_dtype

Tensors = Iterator[tuple[str, Tensor]]


class Export:
    """Of a sharded model, whose ``adapter`` is merged where the engines take none. Collective: all ranks make the same
    calls and run what they are given to its end; rank 0 is given the tensors, and writes."""

    def __init__(self, model: Decoder, adapter: AdapterSpec | None, config: Config, rank: int) -> None:
        self._model, self._adapter, self._config, self._rank = model, adapter, config, rank
        self._dtype = model.config.engine_dtype(config.rollout.engine.dtype)
        self._merges = adapter is not None and not sends_adapters(config)
        self._trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        self._first_draft: dict[str, Tensor] = {}
        if not config.param_sync.reload_draft:
            weights = self._whole(getattr(torch, self._dtype), is_draft)
            self._first_draft = {name: tensor.clone() for name, tensor in weights}

    def manifest(self) -> Manifest:
        """Every tensor of the model in the order of its parameters, in the engine's dtype, which need not be the
        checkpoint's; a tied head is listed last and not sent."""
        manifest = self._listed(self._dtype)
        return MergingExport(manifest).merged if self._merges else manifest

    def tensors(self, base: bool) -> Tensors:
        """What the manifest lists; without ``base`` what is trained. Without ``param_sync.reload_draft`` the draft goes
        out as it was at the start."""
        dtype = getattr(torch, self._dtype)
        wanted = lambda name: base or name in self._trained
        for name, tensor in self._merged(dtype) if self._merges else self._whole(dtype, wanted):
            yield name, self._first_draft.get(name, tensor)

    def write_hf(self, path: Path) -> None:
        """A checkpoint in the dtype that its config.json names, or an adapter in float32."""
        adapter, dtype = self._adapter, checkpoint_dtype(self._model.config.dtype)
        alone = adapter is not None and self._config.checkpoint.export_lora == "adapter"
        if alone:
            tensors = self._whole(torch.float32, is_adapter)
        else:
            tensors = self._whole(dtype) if adapter is None else self._merged(dtype)
        if self._rank != 0:
            list(tensors)  # none
        elif alone and adapter is not None:
            base = self._config.model.path
            save_adapter(path, dict(tensors), base, adapter.r, adapter.alpha, adapter.target_modules)
        else:
            save_checkpoint(path, tensors, self._model.config)
        if self._rank == 0:
            copy_tokenizer(self._config.model.path, path)

    def _listed(self, dtype: str) -> Manifest:
        parameters = dict(self._model.named_parameters())
        specs = [
            TensorSpec(_sent_name(name), dtype, tuple(p.shape), "draft" if is_draft(name) else "target")
            for name, p in parameters.items()
        ]
        if self._model.config.tie_word_embeddings:
            embedding = "model.embed_tokens.weight"
            shape = tuple(parameters[embedding].shape)
            specs.append(TensorSpec("lm_head.weight", dtype, shape, "target", tied_to=embedding))
        frozen_draft = self._adapter is not None and not any(map(is_draft, self._trained))
        return Manifest(tuple(specs), self._adapter, frozen_draft)

    @torch.no_grad()
    def _whole(self, dtype: torch.dtype, wanted: Callable[[str], bool] = lambda name: True) -> Tensors:
        """(name, whole tensor as ``dtype``) of the ``wanted`` parameters, one gathered at a time.

        Shards are converted before they are gathered, so a bfloat16 export moves half the bytes."""
        for name, parameter in self._model.named_parameters():
            if wanted(name):
                tensor = cast(DTensor, parameter.detach().to(dtype)).full_tensor()
                if self._rank == 0:
                    yield _sent_name(name), tensor

    def _merged(self, dtype: torch.dtype) -> Tensors:
        """(name, whole tensor as ``dtype``), the adapters merged into their weights in float32 and cast once."""
        tensors = self._whole(torch.float32)
        if self._rank == 0:
            tensors = MergingExport(self._listed("float32"))(tensors)
        for name, tensor in tensors:
            yield name, tensor.to(dtype)


def _sent_name(parameter: str) -> str:
    """The name under which a parameter is exported: its own, or PEFT's of an adapter's."""
    return PEFT_PREFIX + parameter if is_adapter(parameter) else parameter
