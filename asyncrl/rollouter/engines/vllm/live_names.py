"""What a live vLLM model takes: its parameters as its loader knows them, and where canonical names belong in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from asyncrl.param_sync.digest import dtype_name
from asyncrl.param_sync.names import PACKED, LiveTensor, NameResolver


def resolver(
    model: torch.nn.Module, tp_size: int, lora: bool, shared_with: torch.nn.Module | None = None
) -> NameResolver:
    """Resolves names against a loaded model. ``shared_with``: the target of a draft model, whose modules this one may
    use; what they share is loaded there."""
    shared = set() if shared_with is None else {id(module) for module in shared_with.modules()}
    live: dict[str, LiveTensor] = {}
    optional: set[str] = set()
    for path, module in model.named_modules():
        parameters, buffers = _loadable(module)
        prefix = f"{path}." if path else ""
        for leaf, tensor in (parameters | buffers).items():
            name = prefix + leaf
            live[name] = _described(module, tensor, tp_size)
            if leaf in buffers or id(module) in shared:
                optional.add(name)
    packed = {owner: tuple(parts) for owner, parts in getattr(model, "packed_modules_mapping", {}).items()}
    return NameResolver(
        live,
        packed={**PACKED, **packed},
        ignore=frozenset(optional),
        expects_base_layer=lora,
        tp_shards=tp_size,
        rename=_rename(model),
    )


def _loadable(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers in the form in which a checkpoint has them: their kernels may
    have packed, transposed or quantised them since."""
    parameters, buffers = get_layerwise_info(module).restore_metadata
    # biases are recorded nowhere, as they stay what they are
    parameters = {name: p for name, p in module._parameters.items() if p is not None and name == "bias"} | parameters
    transient = module._non_persistent_buffers_set
    return parameters, {name: b for name, b in buffers.items() if name not in transient}


def _described(module: torch.nn.Module, tensor: torch.Tensor, tp_size: int) -> LiveTensor:
    """Loaders cast while they copy, so only a width that the model as a whole has is compared."""
    if tp_size > 1:
        return LiveTensor(None, None)
    shape = tuple(tensor.shape)
    if isinstance(module, VocabParallelEmbedding):
        shape = (module.org_vocab_size, *shape[1:])  # the rest is padding
    return LiveTensor(dtype_name(tensor), shape)


def _rename(model: torch.nn.Module) -> Callable[[str], str] | None:
    """The model's own map from a checkpoint's names to its modules, less what it says of packed ones."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    mapper = dataclasses.replace(mapper, orig_to_new_stacked={})
    return lambda name: mapper.map_name(name) or name
