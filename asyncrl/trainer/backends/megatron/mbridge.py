"""mbridge in place of Megatron-Bridge (``model.bridge: mbridge``).

mbridge turns config.json into a configuration of megatron-core, and maps, joins, splits and shards tensors. It could
also build and load models, but only with Transformer Engine; here they are built as with the other bridge, and layers
without Transformer Engine are presented to mbridge under the names of those with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.models.config import CheckpointError
from asyncrl.trainer.backends.megatron import packages
from asyncrl.trainer.backends.megatron.expert_names import of_rank
from asyncrl.trainer.backends.megatron.packages import check_packages, layer_in_mtp

packages.prepare()
check_packages("mbridge")

import mbridge  # noqa: E402, F401  (the import registers its families)
from mbridge.core import LLMBridge  # noqa: E402
from mbridge.core.bridge import _MODEL_REGISTRY  # noqa: E402
from mbridge.core.util import broadcast_from_megatron_pp  # noqa: E402
from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

#: name in a layer without Transformer Engine → name where norms are part of the following linear layers
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
#: weights of MiMo's MTP layer beside those of its trunk layer
MTP_ONLY = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "final_layernorm.weight": "final_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
}
#: sharding settings of mbridge's configuration, left to the code that builds models
PLACEMENT = {"sequence_parallel", "overlap_p2p_comm", "batch_p2p_comm", "expert_tensor_parallel_size"}


def mbridge_of(hf_config: Any, path: Any) -> tuple[GPTModelProvider, MBridgeConverter]:
    """(mbridge's configuration of megatron-core for ``hf_config``, its converter of weights)

    Raises CheckpointError for a family that mbridge lacks, or does not build as megatron-core's plain GPT model."""
    if hf_config.model_type not in _MODEL_REGISTRY:
        raise CheckpointError(
            f"{path}: mbridge has no bridge for {hf_config.model_type} (it has: {', '.join(sorted(_MODEL_REGISTRY))}); "
            "use model.bridge=megatron_bridge, or another model"
        )
    family = _MODEL_REGISTRY[hf_config.model_type]
    plain = getattr(family, "_model_provider", None) is LLMBridge._model_provider
    if not plain or family.TransformerConfigClass is not TransformerConfig:
        raise CheckpointError(
            f"{path}: {hf_config.model_type} is built by mbridge's {family.__name__}, which this backend cannot run "
            "(it runs megatron-core's plain GPT model); use another model"
        )
    bridge = family(hf_config, dtype=torch.float32)
    # a copy, because a model with a tied head changes the mapping of its whole family
    bridge._DIRECT_MAPPING = {**bridge._DIRECT_MAPPING, "output_layer.weight": "lm_head.weight"}
    facts = {f.name: value for f in fields(TransformerConfig) if (value := getattr(bridge.config, f.name)) != _unset(f)}
    provider = GPTModelProvider(
        **{name: value for name, value in facts.items() if name not in PLACEMENT},
        vocab_size=hf_config.vocab_size,
        position_embedding_type="rope",
        seq_length=hf_config.max_position_embeddings,
        share_embeddings_and_output_weights=bool(getattr(hf_config, "tie_word_embeddings", False)),
    )
    return provider, MBridgeConverter(bridge, provider)


def _unset(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


class MBridgeConverter:
    """mbridge behind the part of Megatron-Bridge's converter interface that
    `asyncrl.trainer.backends.megatron.weights` uses."""

    def __init__(self, bridge: LLMBridge, provider: GPTModelProvider) -> None:
        self._bridge, self._tied = bridge, provider.share_embeddings_and_output_weights

    def build_conversion_tasks(self, folder: Any, chunks: Sequence[Any]) -> list[Task]:
        """A task for each parameter of the model, including other stages', in the order of layers; collective."""
        here = {
            _global(name, chunk): (chunk, name, p)
            for chunk in chunks
            for name, p in chunk.named_parameters()
            if ".adapter." not in name  # LoRA pairs have no tensors in the checkpoint
        }
        cuts = {name: _cut(p) for name, (_, _, p) in here.items()}
        group = parallel_state.get_pipeline_model_parallel_group()
        by_stage: list[Any] = [None] * group.size()
        dist.all_gather_object(by_stage, cuts, group=group)
        cuts = {name: cut for stage in by_stage for name, cut in stage.items()}
        if self._tied:
            cuts.pop("output_layer.weight", None)
        tasks = []
        for name in sorted(cuts, key=_in_order):
            chunk, local, parameter = here.get(name, (None, name, None))
            module = chunk and chunk.get_submodule(local.rpartition(".")[0])
            mapping = Mapping(self._bridge, name, cuts[name], dense=_dense(name, cuts), parameter=parameter)
            tasks.append(Task(name, local, module, parameter, mapping))
        return tasks


@dataclass(frozen=True)
class Task:
    """See Megatron-Bridge's WeightConversionTask; module and weight are None on the ranks of other stages."""

    global_param_name: str
    param_name: str
    megatron_module: torch.nn.Module | None
    param_weight: torch.nn.Parameter | None
    mapping: Mapping


class Mapping:
    """See Megatron-Bridge's MegatronParamMapping. ``cut``: the dimension sharded by tensor parallelism, or None."""

    def __init__(self, bridge: LLMBridge, name: str, cut: int | None, dense: bool, parameter: Any) -> None:
        self._bridge, self._cut, self._parameter = bridge, cut, parameter
        self.is_expert = ".mlp.experts." in name
        self._swapped = name.endswith(".eh_proj.weight")
        self._name, names = self._names(name, dense)
        self.hf_param: Any = names[0] if len(names) == 1 else {str(i): hf_name for i, hf_name in enumerate(names)}
        if self.is_expert:  # its name has the expert's number on this rank
            rank = parallel_state.get_expert_model_parallel_rank()
            self.hf_param = of_rank(rank, self._experts_of_rank, self.hf_param)

    def hf_to_megatron(self, tensors: Tensor | dict[str, Tensor], module: Any) -> Tensor:
        """This rank's part of the parameter that the tensors make up."""
        parts = [tensors] if isinstance(tensors, Tensor) else list(tensors.values())
        whole, group = self._halves(self._bridge._weight_to_mcore_format(self._name, parts)), self._group()
        cut = self._bridge._weight_split_across_tp(self._name, whole, self._parameter, group.size())
        return list(cut)[group.rank()]

    def megatron_to_hf(self, part: Tensor | None, module: Any) -> dict[str, Tensor]:
        """The whole tensors, an expert's with those of its peers on other ranks; collective."""
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            part = broadcast_from_megatron_pp(part)
        assert part is not None
        if self._cut is not None:
            about = torch.empty(0)
            about.tensor_model_parallel, about.partition_dim = True, self._cut  # type: ignore[attr-defined]
            part = self._bridge._weight_merge_across_tp(self._name, _gathered(part, self._group()), about)
        if isinstance(self.hf_param, str):
            found = [(self.hf_param, self._halves(part))]
        else:
            found = list(
                zip(self.hf_param.values(), self._bridge._weight_to_hf_format(self._name, part)[1], strict=True)
            )
        return dict(self._with_peers(found)) if self.is_expert else dict(found)

    def _with_peers(self, tensors: Any) -> Iterator[tuple[str, Tensor]]:
        group = parallel_state.get_expert_model_parallel_group()
        for name, tensor in tensors:
            for rank, of_peer in enumerate(_gathered(tensor, group)):
                yield of_rank(rank, self._experts_of_rank, name), of_peer

    @property
    def _experts_of_rank(self) -> int:
        return int(self._bridge.config.num_moe_experts) // parallel_state.get_expert_model_parallel_world_size()

    def _group(self) -> dist.ProcessGroup:
        if self.is_expert:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    def _halves(self, weight: Tensor) -> Tensor:
        """MiMo's input_proj reads cat(hidden, embedding), megatron-core's eh_proj cat(embedding, hidden)."""
        return weight.roll(weight.shape[1] // 2, 1) if self._swapped else weight

    def _names(self, name: str, dense: bool) -> tuple[str, list[str]]:
        """(mbridge's name of the parameter, names of its tensors). MTP layers have MiMo's names on any trunk; the trunk
        layer that each contains is mapped under the name of a layer of the trunk."""
        hf_layers = "model.layers."
        if mtp := re.match(r"mtp\.layers\.(\d+)\.", name):
            number, rest = mtp[1], name[mtp.end() :]
            if rest in MTP_ONLY:
                return name, [f"model.mtp_layers.{number}.{MTP_ONLY[rest]}"]
            of_trunk = rest.removeprefix(f"{layer_in_mtp()}.")
            hf_layers, name = "model.mtp_layers.", f"decoder.layers.{number}.{of_trunk}"
        name = re.sub(r"\.local_experts\.(\d+)\.(.*)\.weight$", r".\2.weight\1", name)
        norm = name.split(".", 3)[-1]
        if norm == "input_layernorm.weight" or (norm == "pre_mlp_layernorm.weight" and dense):
            name = name.removesuffix(norm) + FUSED_NORMS[norm]
        try:
            names = self._bridge._weight_name_mapping_mcore_to_hf(name)
        except NotImplementedError:
            raise CheckpointError(f"mbridge's {type(self._bridge).__name__} has no tensor for {name}") from None
        return name, [hf_name.replace("model.layers.", hf_layers) for hf_name in names]


def _global(name: str, chunk: Any) -> str:
    """A parameter's name with its layer's number in the whole model."""
    if found := re.match(r"decoder\.layers\.(\d+)\.", name):
        number = chunk.decoder.layers[int(found[1])].layer_number - 1
        return f"decoder.layers.{number}.{name[found.end() :]}"
    return name


def _dense(name: str, names: Any) -> bool:
    """True if this parameter's layer has no experts."""
    return f"{name.rpartition('pre_mlp_layernorm')[0]}mlp.router.weight" not in names


def _cut(parameter: torch.nn.Parameter) -> int | None:
    cut = getattr(parameter, "tensor_model_parallel", False)
    return parameter.partition_dim if cut else None  # type: ignore[attr-defined]


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sort key: numbers numerically, the embedding first, then layers, then the rest."""
    first = ("embedding.", "decoder.layers.", "decoder.", "output_layer.", "mtp.")
    parts = re.split(r"(\d+)", name)
    numbered = [(int(part), "") if part.isdigit() else (0, part) for part in parts]
    return [(next(i for i, start in enumerate(first) if name.startswith(start)), ""), *numbered]


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
