"""Conversion of weights from and to Hugging Face names, one megatron-core parameter at a time, at any layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.models.checkpoint import is_draft, open_tensors
from asyncrl.models.config import CheckpointError
from asyncrl.trainer.backends.megatron.bridges import Bridge, Source
from asyncrl.trainer.backends.megatron.expert_names import of_rank
from asyncrl.trainer.backends.megatron.lora import Adapters
from asyncrl.trainer.backends.megatron.optimizer import ShardedAdamW
from asyncrl.trainer.backends.megatron.policy import PolicyModel, padded_vocabulary

from megatron.core import parallel_state  # isort: skip (after what makes it run without CUDA)

_all = lambda name: True
VOCABULARY_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight")


class Conversion:
    """Plan of a model's conversion: the tensors that make up each parameter, and the ranks that have it. Used for
    loading, export and checkpoints. Construction and all methods are collective over the ranks that hold one copy of
    the model (tensor, pipeline and expert parallel).

    ``shapes``: every converted tensor by its safetensors name, in the order in which `whole` yields them. Raises
    CheckpointError if they are not exactly the folder's tensors. ``tasks``: Megatron-Bridge's, each with a module on
    the ranks that have it."""

    def __init__(self, bridge: Bridge, chunks: Sequence[PolicyModel]) -> None:
        self._bridge, self._chunks = bridge, list(chunks)
        self._plans: dict[torch.dtype | None, list[Any]] = {}
        self._padded = padded_vocabulary(bridge.provider.vocab_size, bridge.provider.tensor_model_parallel_size)
        self.tasks = self._plan(None)
        self.shapes = self._checked(self.tasks)
        self._adapters: Adapters | None = None

    def attach(self, adapters: Adapters) -> None:
        """From now on each LoRA pair follows the weight that it adapts, in `shapes` and in `whole`."""
        self._adapters, base = adapters, self.shapes
        self.shapes = {}
        for name, shape in base.items():
            self.shapes |= {name: shape, **adapters.pairs.get(name, {})}

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Fill this rank's parameters from whole tensors, which ``read`` returns by name."""
        for block in self.blocks():
            for parameter, part in block.convert(read):
                parameter.data.copy_(part)
        self.fill_tied_head(lambda parameter: parameter, lambda head, weight: head.data.copy_(weight))

    @torch.no_grad()
    def fill_tied_head(
        self, of: Callable[[torch.nn.Parameter], Tensor], put: Callable[[torch.nn.Parameter, Tensor], Any]
    ) -> None:
        """Fill a tied head on another stage than the embedding. It duplicates the embedding's rows under a name for
        which the bridge has no tensor: ``put`` stores there the result of ``of`` for the embedding, in the parameter's
        shape. As when the model is built, the first stage's values and the last stage's zeros are summed. With MTP
        layers the last stage's copy has the embedding's own name, so nothing is done."""
        provider = self._bridge.provider
        first, last = self._chunks[0].pre_process, self._chunks[-1].post_process
        if provider.share_embeddings_and_output_weights and not provider.mtp_num_layers and first != last:
            weight = self._chunks[0 if first else -1].shared_embedding_or_output_weight()
            shared = of(weight).detach().float().clone() if first else torch.zeros_like(weight, dtype=torch.float32)
            torch.distributed.all_reduce(shared, group=parallel_state.get_embedding_group())
            if last:
                put(weight, shared)

    @torch.no_grad()
    def whole(
        self,
        of: Callable[[torch.nn.Parameter], Tensor],
        dtype: torch.dtype = torch.float32,
        wanted: Callable[[str], bool] = _all,
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of the tensors ``wanted``, converted from ``of(parameter)``: the parameter itself or one
        of its moments, in its shape. (The tensors of one parameter are wanted all or none.)

        ``of`` is called on the ranks that have the parameter; every rank yields."""
        for task in self._plan(dtype):
            names = list(self._sent(task))
            found = self._converted(task, of, dtype) if any(map(wanted, names)) else {}
            for name in names:
                if name in found:
                    yield name, found[name]
                if self._adapters is not None:
                    yield from self._adapters.pair(name, of, dtype, wanted)

    def _converted(
        self, task: Any, of: Callable[[torch.nn.Parameter], Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        mine = task.param_weight
        # the last stage's copy of the embedding, for head or draft, is not a separate tensor
        here = mine is not None and not getattr(mine, "shared", False)
        part = of(mine).detach().to(dtype) if here else None
        found = task.mapping.megatron_to_hf(part, task.megatron_module)
        return {name: tensor[: self.shapes[name][0]] for name, tensor in found.items()}

    def blocks(self, size: int = 1, wanted: Callable[[str], bool] = _all) -> Iterator[Block]:
        """This rank's parameters whose tensors are ``wanted``, ``size`` of the model's parameters at a time; every rank
        yields the same number of blocks."""
        tasks = [task for task in self.tasks if any(map(wanted, _names(task)))]
        for lo in range(0, len(tasks), size):
            here = [task for task in tasks[lo : lo + size] if task.megatron_module is not None]
            yield Block(here, self._padded)

    def _plan(self, dtype: torch.dtype | None) -> list[Any]:
        """Tasks of Megatron-Bridge in the order of layers, the same on all ranks; one set for loading (None) and one
        for each exported dtype. They are separate because a task caches facts about its parameter: the kind, known only
        to the owner while loading, and the dtype that the owner sends. A task used for two purposes would wait for
        messages that never come."""
        if dtype not in self._plans:
            names = SimpleNamespace(get_all_keys=lambda: list(self._bridge.source.shapes))
            folder = SimpleNamespace(state=SimpleNamespace(source=names))
            self._plans[dtype] = self._bridge.converter.build_conversion_tasks(folder, self._chunks)
            rank, each = parallel_state.get_expert_model_parallel_rank(), self._experts_of_rank
            for task in filter(None, self._plans[dtype]):
                if ".local_experts." in task.global_param_name:
                    # the bridge mistakes the expert's number on this rank for its global number
                    task.mapping.hf_param = of_rank(rank, each, task.mapping.hf_param)
        return self._plans[dtype]

    @property
    def _experts_of_rank(self) -> int:
        return (self._bridge.provider.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()

    def _sent(self, task: Any) -> Iterator[str]:
        """Tensors that `whole` yields for a task; an expert's come with those of its peers on other ranks."""
        for name in _names(task):
            if not task.mapping.is_expert:
                yield name
                continue
            for rank in range(parallel_state.get_expert_model_parallel_world_size()):
                yield of_rank(rank, self._experts_of_rank, name)

    def _checked(self, tasks: Sequence[Any]) -> dict[str, tuple[int, ...]]:
        source = self._bridge.source
        if None in tasks:
            raise CheckpointError(
                f"{source.path}: the bridge of {source.architecture} has no tensor for "
                f"{sum(task is None for task in tasks)} of its parameters; use another model"
            )
        made = [name for task in tasks for name in self._sent(task)]
        missing, unknown = sorted(set(made) - source.shapes.keys()), sorted(source.shapes.keys() - set(made))
        for what, names in {"missing": missing, "unknown": unknown}.items():
            if names:
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                raise CheckpointError(
                    f"{source.path}: {what} tensors: {', '.join(names[:4])}{more}; the bridge of {source.architecture} "
                    f"converts {len(made)}"
                )
        return {name: source.shapes[name] for name in made}


@dataclass(frozen=True)
class Block:
    """Some of this rank's parameters, with the tasks that convert them."""

    tasks: list[Any]
    padded_vocabulary: int

    @property
    def names(self) -> list[str]:
        """The tensors that make up the parameters."""
        return [name for task in self.tasks for name in _names(task)]

    def only(self, names: Sequence[str]) -> Block:
        """A block of the tasks whose tensors are all in ``names``."""
        return Block([task for task in self.tasks if set(_names(task)) <= set(names)], self.padded_vocabulary)

    def convert(self, read: Callable[[str], Tensor]) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """(parameter, this rank's part of the tensors that ``read`` returns for it), float32 in the parameter's shape;
        collective over the tensor parallel ranks."""
        for task in self.tasks:

            def whole(name: str, task: Any = task) -> Tensor:
                found = read(name).to(task.param_weight.device, torch.float32)
                if task.global_param_name in VOCABULARY_ROWS:
                    found = F.pad(found, (0, 0, 0, self.padded_vocabulary - len(found)))
                return found

            names = task.mapping.hf_param
            tensors = whole(names) if isinstance(names, str) else {part: whole(name) for part, name in names.items()}
            with _as_float32(task):
                converted = task.mapping.hf_to_megatron(tensors, task.megatron_module)
            if converted.shape != task.param_weight.shape:
                raise CheckpointError(
                    f"{task.global_param_name} was made of {', '.join(_names(task))} with shape "
                    f"{tuple(converted.shape)}, expected {tuple(task.param_weight.shape)}"
                )
            yield task.param_weight, converted


class ModelWeights:
    """See `asyncrl.trainer.backends.export.Weights`."""

    wide: frozenset[str] = frozenset()

    def __init__(
        self, source: Source, conversion: Conversion, optimizer: ShardedAdamW, trained: frozenset[str], rank: int
    ) -> None:
        self.model, self.trained = source, trained
        self.shapes = conversion.shapes | source.carried
        embeddings = (name for name in self.shapes if name.endswith("embed_tokens.weight") and not is_draft(name))
        self.tied_to = next(embeddings) if source.tied else None
        self._conversion, self._optimizer, self._rank = conversion, optimizer, rank

    def whole(self, dtype: torch.dtype, wanted: Callable[[str], bool], exact: bool) -> Iterator[tuple[str, Tensor]]:
        """Without ``exact`` only the ranks of one copy of the model need to take part."""
        of = self._optimizer.weight if exact else lambda parameter: parameter
        for named in self._conversion.whole(of, dtype, wanted):
            if self._rank == 0:
                yield named
        if self._rank == 0 and (carried := list(filter(wanted, self.model.carried))):
            with open_tensors(self.model.path) as read:
                yield from ((name, read(name).to(dtype)) for name in carried)


@contextlib.contextmanager
def _as_float32(task: Any) -> Iterator[None]:
    """Make the bridge convert in float32 by a stand-in parameter: the dtype of a 16-bit parameter is too coarse for
    master weights. (Replacing the parameter's own data would silently drop its gradient hooks.)"""
    if task.param_weight.dtype == torch.float32:
        yield
        return
    parameters, name = task.megatron_module._parameters, task.param_name.rsplit(".", 1)[-1]
    kept = parameters[name]
    parameters[name] = torch.nn.Parameter(torch.empty_like(kept, dtype=torch.float32), requires_grad=False)
    try:
        yield
    finally:
        parameters[name] = kept


def _names(task: Any) -> list[str]:
    names = task.mapping.hf_param
    return [names] if isinstance(names, str) else list(names.values())
