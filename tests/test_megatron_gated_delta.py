"""Gated DeltaNet: the tensors of Qwen3-Next and Qwen3.5 in megatron-core's layer; models with it refused by name."""

import contextlib
import importlib
import json
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from asyncrl.models.config import CheckpointError
from tests.support.megatron import in_processes, process_group

pytestmark = pytest.mark.megatron

SIZES = {
    "hidden_size": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet", ("in_proj_qkvz", "in_proj_ba")),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
}
HF = "model.layers.0.linear_attn."


def transformers_layer(family):
    """transformers' own, with random weights."""
    config, layer, _ = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    made = getattr(module, layer)(getattr(transformers, config)(**SIZES), 0).float()
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name == "norm.weight"), std=0.3)
    return made.requires_grad_(False)


class ZeroCentered(torch.nn.Module):
    """A norm that keeps its weight less one, as Transformer Engine's does for these models."""

    def __init__(self, config, hidden_size, eps):
        super().__init__()
        self.weight, self.eps, self.config = torch.nn.Parameter(torch.zeros(hidden_size)), eps, config

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


@contextlib.contextmanager
def megatron_layer():
    """megatron-core's, alone. It wants flash-linear-attention, which no CPU runs, for its norm of q and k and for the
    recurrence; of the latter it has a second one in torch."""
    module = importlib.import_module("megatron.core.ssm.gated_delta_net")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=4,
        tensor_model_parallel_size=groups.tp.size(),
        use_cpu_initialization=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        deterministic_mode=True,
        **SIZES,
    )
    parts = module.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=ZeroCentered, out_proj=RowParallelLinear
    )
    norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    with mock.patch.multiple(module, HAVE_FLA=True, l2norm=norm, create=True):
        yield module.GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)


@torch.no_grad()
def there_and_back(rank, ranks, family, folder):
    """Fills megatron-core's layer from the checkpoint's tensors, takes them out again, compares what it computes."""
    meet = None if ranks == 1 else f"file://{folder}/rendezvous"
    with process_group(rank, ranks, meet, "one" if ranks == 1 else "tensor"), megatron_layer() as ours:
        from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
        from megatron.bridge.models.conversion.param_mapping import AutoMapping

        from asyncrl.trainer.backends.megatron.gated_delta import delta_net_mappings

        AutoMapping.register_module_type("GatedDeltaNet", "column")
        AutoMapping.register_module_type("ZeroCentered", "replicated")
        theirs = transformers_layer(family)
        tensors = {f"{HF}{name}": p for name, p in theirs.named_parameters()}
        here = "decoder.layers.*.self_attention."
        registry = MegatronMappingRegistry(*delta_net_mappings(here, "model.layers.*.linear_attn.", tensors))
        back = {}
        for name, parameter in ours.named_parameters():
            mapping = registry.megatron_to_hf_lookup(f"decoder.layers.0.self_attention.{name}")
            module = ours.get_submodule(name.rpartition(".")[0])
            module.config = ours.config
            names = mapping.hf_param
            wanted = tensors[names] if isinstance(names, str) else {k: tensors[v] for k, v in names.items()}
            parameter.copy_(mapping.hf_to_megatron(wanted, module))
            back |= mapping.megatron_to_hf(parameter, module)
        assert {f"{HF}{name}.weight" for name in FAMILIES[family][2]} < back.keys()
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            if name.endswith("linear_attn.norm.weight"):  # kept less one
                torch.testing.assert_close(back[name], tensor, rtol=0, atol=1e-7)
            else:
                assert torch.equal(back[name], tensor), name
        hidden_BSM = torch.randn(2, 20, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
        found_SBM, _ = ours(hidden_BSM.transpose(0, 1).contiguous(), None)
        torch.testing.assert_close(found_SBM.transpose(0, 1), theirs(hidden_BSM), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_computes_what_transformers_does_and_gives_its_tensors_back(family, tmp_path):
    there_and_back(0, 1, family, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_so_do_two_ranks_that_share_its_heads(family, tmp_path):
    in_processes(2, there_and_back, 2, family, tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_with_such_layers_is_refused_with_the_reason(nested, tmp_path):
    from asyncrl.trainer.backends.megatron.bridges import bridge_of, read_source

    text = {**SIZES, "num_hidden_layers": 2, "mtp_num_hidden_layers": 1}
    raw = {"architectures": ["Qwen3_5ForConditionalGeneration"], **({"text_config": text} if nested else text)}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({"mtp.fc.weight": torch.zeros(2)}, str(tmp_path / "model.safetensors"))
    source = read_source(tmp_path, needs_draft=True)
    assert source.num_mtp_layers == 1
    with pytest.raises(CheckpointError, match="has Gated DeltaNet layers; those of megatron-core"):
        bridge_of(source)
