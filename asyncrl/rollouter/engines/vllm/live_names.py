"""Maps canonical tensor names to the parameters of a live vLLM model, in the form that its loader expects."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Container, Iterator, Mapping

import torch
from vllm.distributed import get_dp_group, get_tp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, get_spec_layer_idx_from_weight_name

from asyncrl.param_sync.digest import dtype_name
from asyncrl.param_sync.names import PACKED, LiveTensor, NameResolver

Rename = Callable[[str], str | None]


def resolver(model: torch.nn.Module, dtype: torch.dtype, shared_with: torch.nn.Module | None = None) -> NameResolver:
    """Name resolver for a loaded model. ``dtype``: the model's. ``shared_with``: the target, if ``model`` is its draft;
    modules that they share are loaded with the target."""
    shared = set() if shared_with is None else {id(module) for module in shared_with.modules()}
    live: dict[str, LiveTensor] = {}
    ignore: set[str] = set()
    for prefix, module in _modules(model):
        parameters, buffers = _loadable(module)
        names = {prefix + leaf for leaf in parameters | buffers}
        if id(module) in shared:
            ignore |= names
            continue
        live |= {prefix + leaf: _described(module, leaf, t, dtype) for leaf, t in (parameters | buffers).items()}
        ignore |= {prefix + leaf for leaf in buffers}
    for name, module, parameter in _unrecorded(model):
        if name not in ignore:
            live[name] = _described(module, name.rpartition(".")[2], parameter, dtype)
    packed = {owner: tuple(parts) for owner, parts in getattr(model, "packed_modules_mapping", {}).items()}
    return NameResolver(
        live,
        packed={**PACKED, **packed},
        ties={name: owner for name, owner in ties(model).items() if {name, owner} <= live.keys()},
        ignore=frozenset(ignore),
        expects_base_layer=_expects_base_layer(model),
        num_experts=getattr(model, "num_logical_experts", None) or None,
        rename=_rename(model, live),
        drops=lambda name: AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER.map_name(name) is None,
    )


def ties(model: torch.nn.Module) -> Mapping[str, str]:
    """Embeddings and heads that share a parameter: name → name of the first module that holds it. All of them are
    loaded, because each kernel may keep its own packed copy of the weight."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for prefix, module in _modules(model):
        if isinstance(module, VocabParallelEmbedding):
            name = f"{prefix}weight"
            if (owner := first.setdefault(id(module.weight), name)) != name:
                found[name] = owner
    return found


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module once, with its first path, which is the checkpoint's."""
    for path, module in model.named_modules():
        yield f"{path}." if path else "", module


def _loadable(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers in the checkpoint's layout; the live ones may have been packed,
    transposed or quantised for a kernel."""
    parameters, buffers = get_layerwise_info(module).restore_metadata
    transient = module._non_persistent_buffers_set
    return parameters, {name: b for name, b in buffers.items() if name not in transient}


def _unrecorded(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """Parameters that vLLM's reload does not record because their layout never changes: biases, and the routers' score
    corrections, which the experts hold too."""
    seen: set[int] = set()
    for prefix, module in _modules(model):
        for leaf, parameter in module._parameters.items():
            if leaf in SKIP_TENSORS and parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + leaf, module, parameter


def _described(module: torch.nn.Module, leaf: str, tensor: torch.Tensor, dtype: torch.dtype) -> LiveTensor:
    """``leaf`` of ``module`` as the name resolver sees it. The dtype is compared only if it is the model's: loaders
    cast as they copy, and some models keep single parameters wider than the rest."""
    return LiveTensor(dtype_name(tensor) if tensor.dtype == dtype else None, _whole_shape(module, leaf, tensor))


def _whole_shape(module: torch.nn.Module, leaf: str, tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Shape of the checkpoint's tensor, of which each tensor-parallel worker may hold a shard; None if the shard does
    not determine it."""
    shape = tuple(tensor.shape)
    if isinstance(module, VocabParallelEmbedding):
        return (module.org_vocab_size, *shape[1:])  # the other rows are padding
    # not isinstance: a norm's subclass may be sharded
    if _sharers() == 1 or type(module) in (RMSNorm, torch.nn.LayerNorm, ReplicatedLinear):
        return shape
    if leaf not in ("weight", "bias") or not isinstance(module, LinearBase):
        return None
    if isinstance(module, QKVParallelLinear):  # with fewer KV heads than workers, some workers hold the same heads
        keys_and_values = module.total_num_kv_heads * (module.head_size + module.v_head_size)
        return (module.total_num_heads * module.head_size + keys_and_values, *shape[1:])
    if isinstance(module, ColumnParallelLinear):
        return (shape[0] * module.tp_size, *shape[1:])
    if isinstance(module, RowParallelLinear):
        return shape if leaf == "bias" else (shape[0], shape[1] * module.tp_size)
    return None


def _sharers() -> int:
    """Number of workers that one tensor may be sharded over; experts are sharded over data-parallel workers too."""
    return get_tp_group().world_size * get_dp_group().world_size


def _expects_base_layer(model: torch.nn.Module) -> Callable[[str], bool]:
    """True for live names whose loader expects ``base_layer`` in the name of a LoRA-wrapped module. Wrapped modules
    usually load themselves, under the checkpoint's names. Experts do not, nor does anything inside a module whose
    loader looks up all parameters by full name."""
    inside = [at for at, module in _modules(model) if getattr(module, "lora_base_layer_prefix", "") or _by_hand(module)]
    return lambda name: name.startswith(tuple(inside))


def _by_hand(module: torch.nn.Module) -> bool:
    """True if the module's loader looks up parameters by full name instead of delegating to its submodules. vLLM's
    loaders of this kind all have a local variable ``params_dict``."""
    load = getattr(type(module), "load_weights", None)
    return load is not None and "params_dict" in inspect.unwrap(load).__code__.co_varnames


def _rename(model: torch.nn.Module, live: Container[str]) -> Rename:
    """The renaming that the model's own loader applies to a checkpoint's names, without its packing. Maps to None the
    names that it leaves to another model or would mistake for parts of a packed module."""
    to_modules, packs = _to_modules(model), _packing(model)

    def rename(name: str) -> str | None:
        renamed = to_modules(name)
        if renamed is None or renamed not in live:
            return renamed
        # a loader that packs in_proj_qkv must not get in_proj_qkvz: it would rename it to in_proj_qkvzz
        mapped = any(renamed.startswith(at) and mapper.map_name(renamed) != renamed for at, mapper in packs)
        return None if mapped else renamed

    return rename


def _packing(model: torch.nn.Module) -> list[tuple[str, WeightsMapper]]:
    """For each module whose loader renames parts of packed modules: its prefix and that mapping."""
    mappers = ((prefix, getattr(module, "hf_to_vllm_mapper", None)) for prefix, module in _modules(model))
    return [(at, WeightsMapper(orig_to_new_stacked=m.orig_to_new_stacked)) for at, m in mappers if m is not None]


def _to_modules(model: torch.nn.Module) -> Rename:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        to_modules: Rename = dataclasses.replace(mapper, orig_to_new_stacked={}).map_name
        return to_modules
    if hasattr(model, "_rewrite_spec_layer_name"):
        return lambda name: _in_numbered_draft(model, name)
    if hasattr(model, "is_unused_checkpoint_weight"):
        return lambda name: _in_mtp_draft(model, name)
    return lambda name: name


def _in_numbered_draft(model: torch.nn.Module, name: str) -> str | None:
    """Rename for the MTP models of DeepSeek and GLM, whose layer numbers follow the target's."""
    layer = get_spec_layer_idx_from_weight_name(model.config, name)
    if layer is not None:
        return str(model._rewrite_spec_layer_name(layer, name))  # type: ignore[operator]
    return name if "embed_tokens" in name else None


def _in_mtp_draft(model: torch.nn.Module, name: str) -> str | None:
    """Rename for the MTP models of Qwen, whose checkpoint names begin with ``mtp``."""
    if model.is_unused_checkpoint_weight(name):  # type: ignore[operator]
        return None
    return "model." + name.removeprefix("mtp.") if name.startswith("mtp.") else name
