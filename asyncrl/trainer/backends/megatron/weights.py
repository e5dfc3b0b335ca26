"""Weights from and to Hugging Face names, one parameter of megatron-core at a time, at any parallel layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.models.checkpoint import open_tensors
from asyncrl.models.config import CheckpointError
from asyncrl.trainer.backends.megatron.bridges import Bridge, Source, of_rank
from asyncrl.trainer.backends.megatron.lora import Adapters
from asyncrl.trainer.backends.megatron.optimizer import ShardedAdamW
from asyncrl.trainer.backends.megatron.policy import PolicyModel, padded_vocabulary

from megatron.core import parallel_state  # isort: skip (after what makes it run without CUDA)

_all = lambda name: True
VOCABULARY_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight")


class Conversion:
    """The plan of a model's conversion: which parameters hold which tensors, and who has them. Made once, as it takes a
    collective, and used for loading, export and checkpoints; all methods are collective over the ranks that hold one
    copy of the model (tensor, pipeline and expert parallel).

    ``shapes``: every tensor that travels, by its name in the safetensors files, in the order in which `whole` yields
    them. Raises CheckpointError if these are not exactly the tensors of the folder. ``tasks``: Megatron-Bridge's, each
    with a module on the ranks that have it."""

    def __init__(self, bridge: Bridge, chunks: Sequence[PolicyModel]) -> None:
        self._bridge, self._chunks = bridge, list(chunks)
        self._plans: dict[torch.dtype | None, list[Any]] = {}
        self._padded = padded_vocabulary(bridge.provider.vocab_size, bridge.provider.tensor_model_parallel_size)
        self.tasks = self._plan(None)
        self.shapes = self._checked(self.tasks)
        self._adapters: Adapters | None = None

    def attach(self, adapters: Adapters) -> None:
        """From now on each pair comes after the weight that it is beside, in `shapes` and in `whole`."""
        self._adapters, base = adapters, self.shapes
        self.shapes = {}
        for name, shape in base.items():
            self.shapes |= {name: shape, **adapters.pairs.get(name, {})}

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Fill this rank's parameters from whole tensors, which ``read`` gives by name."""
        for block in self.blocks():
            for parameter, part in block.convert(read):
                parameter.data.copy_(part)
        self.fill_tied_head(lambda parameter: parameter, lambda head, weight: head.data.copy_(weight))

    @torch.no_grad()
    def fill_tied_head(
        self, of: Callable[[torch.nn.Parameter], Tensor], put: Callable[[torch.nn.Parameter, Tensor], Any]
    ) -> None:
        """A tied head on a stage of its own has the embedding's rows once more, under a name that the bridge has no
        tensor for: ``put`` there what ``of`` gives for the embedding, each in the parameter's shape. As when the model
        is built, the last stage's zeros and what the first has are summed. With MTP layers the last stage's copy has
        the embedding's own name, and nothing is left to do."""
        provider = self._bridge.provider
        first, last = self._chunks[0].pre_process, self._chunks[-1].post_process
        if provider.share_embeddings_and_output_weights and not provider.mtp_num_layers and first != last:
            weight = self._chunks[0 if first else -1].shared_embedding_or_output_weight()
            told = of(weight).detach().float().clone() if first else torch.zeros_like(weight, dtype=torch.float32)
            torch.distributed.all_reduce(told, group=parallel_state.get_embedding_group())
            if last:
                put(weight, told)

    @torch.no_grad()
    def whole(
        self,
        of: Callable[[torch.nn.Parameter], Tensor],
        dtype: torch.dtype = torch.float32,
        wanted: Callable[[str], bool] = _all,
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of what ``of`` gives for each parameter, such as itself or a moment of it, in its shape;
        of those ``wanted`` alone. (Tensors that one parameter holds are wanted all or none.)

        ``of`` is asked on the ranks that have the parameter; every rank yields."""
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
        # the embedding's copy on the last stage, for head or draft, is not a second tensor
        here = mine is not None and not getattr(mine, "shared", False)
        part = of(mine).detach().to(dtype) if here else None
        found = task.mapping.megatron_to_hf(part, task.megatron_module)
        return {name: tensor[: self.shapes[name][0]] for name, tensor in found.items()}

    def blocks(self, size: int = 1, wanted: Callable[[str], bool] = _all) -> Iterator[Block]:
        """This rank's parameters of those whose tensors are ``wanted``, ``size`` of the model's at a time; every rank
        yields as many blocks."""
        tasks = [task for task in self.tasks if any(map(wanted, _names(task)))]
        for lo in range(0, len(tasks), size):
            here = [task for task in tasks[lo : lo + size] if task.megatron_module is not None]
            yield Block(here, self._padded)

    def _plan(self, dtype: torch.dtype | None) -> list[Any]:
        """Tasks of Megatron-Bridge in the order of layers, the same on all ranks; made once for loading (None) and once
        for each dtype that is exported. They remember what they have learned of a parameter: its kind while they load,
        which only its owner does, and what dtype the owner sends. Tasks that served two ends would wait for messages
        that never come."""
        if dtype not in self._plans:
            names = SimpleNamespace(get_all_keys=lambda: list(self._bridge.source.shapes))
            folder = SimpleNamespace(state=SimpleNamespace(source=names))
            self._plans[dtype] = self._bridge.converter.build_conversion_tasks(folder, self._chunks)
            rank, each = parallel_state.get_expert_model_parallel_rank(), self._experts_of_rank
            for task in filter(None, self._plans[dtype]):
                if ".local_experts." in task.global_param_name:
                    # whose number the bridge takes for one among all, though it is one among this rank's
                    task.mapping.hf_param = of_rank(rank, each, task.mapping.hf_param)
        return self._plans[dtype]

    @property
    def _experts_of_rank(self) -> int:
        return (self._bridge.provider.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()

    def _sent(self, task: Any) -> Iterator[str]:
        """The tensors that `whole` yields for it: those of an expert come with its like on the other ranks."""
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
    """Some parameters of this rank, with the tasks that convert them."""

    tasks: list[Any]
    padded_vocabulary: int

    @property
    def names(self) -> list[str]:
        """The tensors that they are made of."""
        return [name for task in self.tasks for name in _names(task)]

    def only(self, names: Sequence[str]) -> Block:
        """The tasks that make parameters of these tensors alone."""
        return Block([task for task in self.tasks if set(_names(task)) <= set(names)], self.padded_vocabulary)

    def convert(self, read: Callable[[str], Tensor]) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """(parameter, this rank's part of what ``read`` gives for it), float32 in the parameter's shape; collective
        over the tensor parallel ranks."""
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

    def __init__(
        self, source: Source, conversion: Conversion, optimizer: ShardedAdamW, trained: frozenset[str], rank: int
    ) -> None:
        self.model, self.tied_head, self.trained = source, source.tied, trained
        self.shapes = conversion.shapes | source.carried
        self._conversion, self._optimizer, self._rank = conversion, optimizer, rank

    def whole(self, dtype: torch.dtype, wanted: Callable[[str], bool], exact: bool) -> Iterator[tuple[str, Tensor]]:
        """Not ``exact``, only the ranks of one copy of the model need to take part."""
        of = self._optimizer.weight if exact else lambda parameter: parameter
        for named in self._conversion.whole(of, dtype, wanted):
            if self._rank == 0:
                yield named
        if self._rank == 0 and (carried := list(filter(wanted, self.model.carried))):
            with open_tensors(self.model.path) as read:
                yield from ((name, read(name).to(dtype)) for name in carried)


@contextlib.contextmanager
def _as_float32(task: Any) -> Iterator[None]:
    """The bridge gives each rank its part in the dtype of the module's parameter: too coarse for what the optimizer
    steps, where that has 16 bits. A stand-in is there meanwhile. (Were the parameter's own data replaced, it would lose
    the hooks that add up its gradient, and nothing would say so.)"""
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
