"""LoRA in a megatron-core model: a low-rank pair for each linear layer of the checkpoint, at any parallel layout.

megatron-core fuses several of a checkpoint's layers: q_proj, k_proj and v_proj into ``linear_qkv``, gate_proj and
up_proj into ``linear_fc1``, and the input projections of linear attention into ``in_proj``. Each of them has its own
pair here, as in PEFT and the torch backend, or none. To find where a rank's layer has which rows, the bridge converts
weights whose entries are their row numbers.

Megatron-Bridge's PEFT cannot train such pairs: its LoRA has a single A per fused layer. Its CanonicalLoRA has one per
module, but calls missing ones if only q_proj is targeted, and with two tensor parallel ranks needs an even LoRA rank
and an even number of tokens in every micro-batch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.config.schema import LoraConfig
from asyncrl.models.lora import first_a, pair_names
from asyncrl.param_sync.lora.adapters import adapter_spec
from asyncrl.param_sync.manifest import AdapterSpec
from asyncrl.trainer.backends.megatron import packages

packages.prepare()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes  # noqa: E402

#: weights of the trunk's layers that may be targeted; not experts or drafts
_LAYER = re.compile(
    r"decoder\.layers\.\d+\.(?:self_attention|mlp)\.(linear_(?:qkv|proj|fc1|fc2)|in_proj|out_proj)\.weight"
)
_ALL = "all"  # key of the only module of a layer that is not fused
_ROW_SHARDED = ("linear_qkv", "linear_fc1", "in_proj")


class Pair(nn.Module):
    """A [r, in] and B [out, r] of one module of the checkpoint: this rank's rows of B, or columns of A."""

    def __init__(self, a: Tensor, rows: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(a)
        self.lora_B = nn.Parameter(a.new_zeros(rows, len(a)))


class LayerAdapter(nn.Module):
    """Adapter pairs (``pairs``) of one megatron-core layer. It is the layer's submodule ``adapter``, a name that
    Megatron-Bridge ignores.

    ``rows``, for a layer whose rows are sharded over the tensor parallel ranks: for each of this rank's rows, the row
    of the pairs' concatenated B to add; one past the end for none. ``shared``: sequence parallelism, in which each of
    these ranks has a part of the tokens before and after the layer."""

    rows: Tensor

    def __init__(self, pairs: Mapping[str, Pair], rows: Tensor, scale: float, shared: bool) -> None:
        super().__init__()
        self.pairs = nn.ModuleDict(pairs)
        self.register_buffer("rows", rows, persistent=False)
        self._scale, self._shared = scale, shared
        self.enabled = True

    def beside_rows(self, x: Tensor) -> Tensor:
        """Addend to the output of a row-sharded layer; ``x`` is the whole input, or this rank's tokens."""
        pairs: list[Any] = list(self.pairs.values())
        inner = F.linear(x, torch.cat([pair.lora_A for pair in pairs]))
        # each rank's rows of B yield a part of the gradient of A x, summed in the backward pass
        if self._shared:
            inner = tensor_parallel.gather_from_sequence_parallel_region(inner)
        else:
            inner = tensor_parallel.copy_to_tensor_model_parallel_region(inner)
        beside = F.pad(torch.block_diag(*(pair.lora_B for pair in pairs)), (0, 0, 0, 1))
        return F.linear(inner, beside.index_select(0, self.rows)) * self._scale

    def beside_columns(self, x: Tensor) -> Tensor:
        """Addend to the output of a column-sharded layer; ``x`` is this rank's part of the input."""
        (pair,) = cast(list[Any], self.pairs.values())
        inner = F.linear(x, pair.lora_A)
        if self._shared:
            inner = tensor_parallel.reduce_scatter_to_sequence_parallel_region(inner)
        else:
            inner = tensor_parallel.reduce_from_tensor_model_parallel_region(inner)
        return F.linear(inner, pair.lora_B) * self._scale


@dataclass(frozen=True)
class ShardSpec:
    """Sharding of a pair's tensor over the tensor parallel ranks: along ``dim``, or replicated (None). ``rows``: row
    numbers of all ranks concatenated, if the order differs from the tensor's."""

    dim: int | None = None
    rows: Tensor | None = None

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part."""
        if self.dim is None:
            return whole
        if self.rows is not None:
            whole = whole[self.rows]
        return whole.chunk(_tensor_parts(), self.dim)[parallel_state.get_tensor_model_parallel_rank()].contiguous()

    def joined(self, part: Tensor) -> Tensor:
        """The whole tensor from the parts of all ranks; collective over them."""
        if self.dim is None:
            return part
        whole = torch.cat(_gathered(part), self.dim)
        return whole if self.rows is None else torch.empty_like(whole).index_copy_(0, self.rows, whole)


class Adapters:
    """All pairs of a model: modules for this rank's layers, shapes and owners for the others.

    Built from the tasks that load the model (`Conversion.tasks`), collective over the ranks that hold one copy of it,
    like `pair`. Raises ManifestError for a target that matches no linear layer of the trunk."""

    def __init__(
        self,
        tasks: Sequence[Any],
        shapes: Mapping[str, tuple[int, ...]],
        lora: LoraConfig,
        dtype: str,
        seed: int,
        device: torch.device,
    ) -> None:
        self._device = device
        layers = [(task, *found) for task in tasks if (found := _modules(task))]
        modules = {
            module: (shapes[f"{module}.weight"][0], shapes[f"{module}.weight"][1])
            for *_, parts in layers
            for module in parts.values()
        }
        self.spec: AdapterSpec = adapter_spec(lora, modules, dtype)
        #: weight → name → shape of its pair
        self.pairs: dict[str, dict[str, tuple[int, int]]] = {}
        for module, (rows, columns) in modules.items():
            if self.spec.targets(module):
                pair = zip(pair_names(module), ((lora.rank, columns), (rows, lora.rank)), strict=True)
                self.pairs[f"{module}.weight"] = dict(pair)
        self._parts: dict[str, tuple[nn.Parameter, ShardSpec]] = {}
        self._layers: list[LayerAdapter] = []
        for task, kind, parts in layers:
            if task.megatron_module is not None and any(map(self.spec.targets, parts.values())):
                self._add(
                    task, kind in _ROW_SHARDED, {part: (name, modules[name]) for part, name in parts.items()}, seed
                )
        self._owners = self._find_owners()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the model computes as its base."""
        for layer in self._layers:
            layer.enabled = False
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enabled = True

    @torch.no_grad()
    def pair(
        self, weight: str, of: Callable[[nn.Parameter], Tensor], dtype: torch.dtype, wanted: Callable[[str], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of the tensors ``wanted`` in the pair of ``weight``, if it has one; see
        `asyncrl.trainer.backends.megatron.weights.Conversion.whole`."""
        for name, shape in self.pairs.get(weight, {}).items():
            if wanted(name):
                if name in self._parts:
                    parameter, shard = self._parts[name]
                    tensor = shard.joined(of(parameter).detach().to(dtype))
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=self._device)
                yield name, self._broadcast(name, tensor)

    def parts(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(parameter, this rank's part) of whole tensors."""
        for name, tensor in tensors.items():
            if name in self._parts:
                parameter, shard = self._parts[name]
                yield parameter, shard.own(tensor.to(self._device))

    def _add(self, task: Any, by_rows: bool, parts: Mapping[str, tuple[str, tuple[int, int]]], seed: int) -> None:
        """Add a layer's adapter. ``parts``: name and shape of each module in the layer."""
        layer, pairs = task.megatron_module, {}
        shared = layer.config.sequence_parallel
        numbers = self._numbers(task, parts) if by_rows else torch.empty(0, dtype=torch.long, device=self._device)
        beside, first, put = torch.full_like(numbers, -1), 0, 0
        for part, (module, (rows, columns)) in parts.items():
            if self.spec.targets(module):
                shards = (ShardSpec(1), ShardSpec())
                if by_rows:
                    here = (numbers >= first) & (numbers < first + rows)
                    own, order = (numbers[here] - first).sort()
                    beside[here] = put + order.argsort()
                    shards = (ShardSpec(), ShardSpec(0, torch.cat(_gathered(own))))
                    put += len(own)
                a = first_a(module, self.spec.r, columns, seed).to(self._device)
                pair = pairs[part] = Pair(shards[0].own(a), len(shards[1].own(a.new_empty(rows))))
                for name, parameter, shard in zip(pair_names(module), (pair.lora_A, pair.lora_B), shards, strict=True):
                    self._parts[name] = parameter, shard
                    set_tensor_model_parallel_attributes(parameter, shard.dim is not None, shard.dim or 0, 1)
                    # a replicated tensor then sees only this rank's tokens, so its gradients are summed over the ranks
                    parameter.sequence_parallel = shared and shard.dim is None  # type: ignore[attr-defined]
            first += rows
        beside[beside < 0] = put
        layer.adapter = LayerAdapter(pairs, beside, self.spec.alpha / self.spec.r, shared)
        self._layers.append(layer.adapter)
        if hasattr(layer, "layer_norm_weight"):
            layer.return_layernorm_output = True
        layer.register_forward_hook(_with_rows if by_rows else _with_columns)

    def _numbers(self, task: Any, parts: Mapping[str, tuple[str, tuple[int, int]]]) -> Tensor:
        """Row number in the concatenated modules of each row of this rank's layer; collective over the tensor parallel
        ranks. (float32 is exact for integers up to 2²⁴.)"""
        numbered, first = {}, 0
        for part, (_, (rows, columns)) in parts.items():
            counted = torch.arange(first, first + rows, dtype=torch.float32, device=self._device)
            numbered[part], first = counted[:, None].repeat(1, columns), first + rows
        whole = numbered if isinstance(task.mapping.hf_param, dict) else numbered[_ALL]
        return cast(Tensor, task.mapping.hf_to_megatron(whole, task.megatron_module))[:, 0].long()

    def _find_owners(self) -> dict[str, int]:
        """Name → rank of this pipeline that has the tensor."""
        group = parallel_state.get_pipeline_model_parallel_group()
        names: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(names, list(self._parts), group=group)
        ranks = dist.get_process_group_ranks(group)
        return {name: rank for rank, held in zip(ranks, names, strict=True) for name in held}

    def _broadcast(self, name: str, tensor: Tensor) -> Tensor:
        group = parallel_state.get_pipeline_model_parallel_group()
        if dist.get_world_size(group) > 1:
            dist.broadcast(tensor, self._owners[name], group=group)
        return tensor


def _modules(task: Any) -> tuple[str, dict[str, str]] | None:
    """(kind of layer, the checkpoint's modules in the order of its rows) for a task that loads the weight of a layer
    that may be targeted, else None."""
    if (found := _LAYER.fullmatch(task.global_param_name)) is None:
        return None
    names = task.mapping.hf_param
    parts = {_ALL: names} if isinstance(names, str) else names
    return found[1], {part: name.removesuffix(".weight") for part, name in parts.items()}


def _with_rows(layer: Any, inputs: tuple[Tensor, ...], output: Any) -> tuple[Tensor, Tensor | None]:
    out, bias, x = _read(layer, inputs, output)
    return (out + layer.adapter.beside_rows(x) if layer.adapter.enabled else out), bias


def _with_columns(layer: Any, inputs: tuple[Tensor, ...], output: Any) -> tuple[Tensor, Tensor | None]:
    out, bias, x = _read(layer, inputs, output)
    return (out + layer.adapter.beside_columns(x) if layer.adapter.enabled else out), bias


def _read(layer: Any, inputs: tuple[Tensor, ...], output: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """(output, bias, input of the layer's matrix). Transformer Engine's layers that include the preceding norm are set
    to return its output too."""
    if not hasattr(layer, "layer_norm_weight"):
        out, bias = output
        return out, bias, inputs[0]
    if len(output) == 3:
        return output
    (out, normed), bias = output
    return out, bias, normed


def _gathered(part: Tensor) -> list[Tensor]:
    """The parts of all tensor parallel ranks."""
    if _tensor_parts() == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(_tensor_parts())]
    dist.all_gather(parts, part.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return parts


def _tensor_parts() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()
