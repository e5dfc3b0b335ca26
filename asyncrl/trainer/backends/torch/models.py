"""The models that the torch backend trains: the native decoder, or any causal LM of transformers.

Of both, one rank reads the files, and each rank holds its shards only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import check_checkpoint, check_folder, decoder_tensors, tensor_headers
from asyncrl.models.config import CheckpointError, ModelConfig
from asyncrl.models.decoder import without_storage
from asyncrl.param_sync.manifest import is_adapter
from asyncrl.trainer.backends.torch.checks import implementation

if TYPE_CHECKING:
    from asyncrl.models.causal_lm import FileTensors

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class TorchModel:
    """A causal LM, in host memory that holds nothing yet, and what it takes to shard, fill and export it.

    ``module`` is called as `Decoder.forward` is; ``layers`` are sharded one by one, ``methods`` of ``module`` or of a
    layer run its forward hooks too. ``read`` gives the weights and buffers by name, in any dtype. ``tied_to``: name of
    the embedding that is the head too. ``carried``: shapes of tensors of the files ``path`` that belong to the model,
    though no parameter holds them: they never change. ``wide``: those of them that are float32 in the files, as
    routers' corrections are beside bfloat16 weights."""

    path: str
    config: ModelConfig
    module: nn.Module
    layers: Sequence[nn.Module]
    methods: Sequence[tuple[nn.Module, str]]
    read: Callable[[], Tensors]
    tied_to: str | None
    files: FileTensors | None = None
    carried: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    wide: frozenset[str] = frozenset()

    def shard(self, mesh: DeviceMesh, rank: int, values: Tensors, **policies: Any) -> None:
        """Shard the module over ``mesh``; layers by themselves, the rest together: embedding, final norm and head.
        Then fill it with ``values``, which only the first rank has."""
        for layer in self.layers:
            fully_shard(layer, mesh=mesh, **policies)
        fully_shard(self.module, mesh=mesh, **policies)
        if self.files is not None:  # experts that are modules of their own run only on ranks that have tokens for them
            for layer in self.layers or [self.module]:
                cast(FSDPModule, layer).set_reduce_scatter_unused_params(True)
        for module, method in self.methods:
            register_fsdp_forward_method(module, method)
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                if not is_adapter(name):  # those are made alike on all ranks
                    _first_to_all(cast(DTensor, p), values.get(name), rank)
            for name, b in self.module.named_buffers():
                whole = values[name].to(b) if rank == 0 else torch.empty_like(b)
                torch.distributed.broadcast(whole, 0)
                b.copy_(whole)

    def check(self, device: torch.device, bfloat16: bool) -> None:
        """Raises CheckpointError if transformers' code of the model does not allow to score sequences together."""
        if self.files is not None:
            from asyncrl.models.scoring import ScoringModel, check_scores

            check_scores(cast(ScoringModel, self.module), self.path, device, bfloat16)
            cast(FSDPModule, self.module).reshard()


def load(config: Config, path: str, half_on_cuda: bool, mtp_from_trunk: bool = False) -> TorchModel:
    """A checkpoint's model. Raises CheckpointError as `check` does."""
    if implementation(config, path) == "native":
        return _native(config, path, mtp_from_trunk)
    return _transformers(config, path, half_on_cuda)


def _native(config: Config, path: str, mtp_from_trunk: bool) -> TorchModel:
    model = check_checkpoint(path, mtp_from_trunk)
    decoder = without_storage(model)
    allocate(decoder)
    decoder.float32_head = config.model.float32_head
    decoder.activation_checkpointing = config.trainer.activation_checkpointing
    drafts = list(getattr(decoder.model, "mtp_layers", []))
    return TorchModel(
        path=path,
        config=model,
        module=decoder,
        layers=[*cast(nn.ModuleList, decoder.model.layers), *drafts],
        methods=[(decoder, "score_drafts"), *((layer, "draft") for layer in drafts)],
        read=lambda: decoder_tensors(path, mtp_from_trunk)[1],
        tied_to="model.embed_tokens.weight" if model.tie_word_embeddings else None,
    )


def _transformers(config: Config, path: str, half_on_cuda: bool) -> TorchModel:
    from asyncrl.models import causal_lm  # transformers takes seconds to import
    from asyncrl.models.scoring import scoring

    trust = config.model.trust_remote_code
    model = causal_lm.build(path, trust)
    module = scoring(
        model,
        attention=causal_lm.choose_attention(model, config.model.attention, half_on_cuda),
        float32_head=config.model.float32_head,
        activation_checkpointing=config.trainer.activation_checkpointing,
    )
    if config.trainer.activation_checkpointing and not causal_lm.layers(module):
        raise CheckpointError(
            f"{path}: transformers does not say which modules of {type(module).__name__} are layers; expected "
            "trainer.activation_checkpointing=false"
        )
    allocate(module)
    files, parameters = causal_lm.FileTensors(module), {name for name, _ in module.named_parameters()}
    buffers = {part for name, parts in files.parts.items() if name not in parameters for part in parts}
    carried = {n: h for n, h in tensor_headers(path).items() if n in buffers or files.left_out(n)}
    tied = causal_lm.tied_to(module)

    def read() -> Tensors:
        source = causal_lm.read(path, trust)
        return {**dict(source.named_parameters()), **dict(source.named_buffers())}

    return TorchModel(
        path=path,
        config=check_folder(path),
        module=module,
        layers=causal_lm.layers(module),
        methods=[(module, "plain_logprobs")],
        read=read,
        tied_to=tied and next(iter(files.parts[tied])),
        files=files,
        carried={name: header.shape for name, header in carried.items()},
        wide=frozenset(name for name, header in carried.items() if header.dtype == "F32"),
    )


def allocate(model: nn.Module) -> None:
    """Replace parameters and buffers on the meta device by uninitialized ones in host memory, of which the system
    provides what is written. Shared ones stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                made.setdefault(id(p), nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad))
                module._parameters[name] = cast(nn.Parameter, made[id(p)])
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                module._buffers[name] = made.setdefault(id(b), torch.empty_like(b, device="cpu"))


def _first_to_all(parameter: DTensor, value: Tensor | None, rank: int) -> None:
    """Fill a sharded parameter with rank 0's whole ``value``."""
    mesh = parameter.device_mesh
    if rank == 0:
        assert value is not None
        whole = value.detach().to(mesh.device_type, parameter.dtype)
    else:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=mesh.device_type)
    own = parameter.to_local()
    own.copy_(distribute_tensor(whole, mesh, parameter.placements).to_local())
