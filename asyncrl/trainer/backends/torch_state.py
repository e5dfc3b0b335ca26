"""What the torch backend writes and reads: training state for any number of ranks, and tensors whole for others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.models.checkpoint import is_draft
from asyncrl.models.config import CheckpointError, DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.param_sync.manifest import Manifest, TensorSpec


def checkpoint_dtype(config: DecoderConfig) -> torch.dtype:
    """The floating dtype that the checkpoint's config names, or float32: what a Hugging Face export is written in."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.dtype, torch.float32)


def manifest_of(model: Decoder, dtype: str) -> Manifest:
    """Every tensor of the model in the order of its parameters; a tied head is listed last and not sent."""
    specs = [
        TensorSpec(name, dtype, tuple(p.shape), "draft" if is_draft(name) else "target")
        for name, p in model.named_parameters()
    ]
    if model.config.tie_word_embeddings:
        shape = tuple(model.model.embed_tokens.weight.shape)
        specs.append(TensorSpec("lm_head.weight", dtype, shape, "target", tied_to="model.embed_tokens.weight"))
    return Manifest(tuple(specs))


@torch.no_grad()
def whole_tensors(model: Decoder, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor as ``dtype``), one parameter gathered at a time; collective, every rank yields.

    Shards are converted before they are gathered, so a bfloat16 export moves half the bytes."""
    for name, parameter in model.named_parameters():
        yield name, cast(DTensor, parameter.detach().to(dtype)).full_tensor()


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a (nested) dict of tensors and DTensors, each rank its shards; collective."""
    dcp.save(state, checkpoint_id=path)


def load_state(path: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of ``state`` in place from what any number of ranks saved; collective.

    Raises CheckpointError if there is no whole checkpoint at ``path``."""
    if not (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path}: no training state there (.metadata is missing, which is written last: the save did not finish)"
        )
    dcp.load(state, checkpoint_id=path)
