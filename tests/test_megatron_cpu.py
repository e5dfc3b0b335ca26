"""Patches that let megatron-core run without CUDA: each failure occurs without its patch, and not with it."""

import contextlib
import sys

import pytest
import torch
import torch.distributed as dist

from asyncrl.cpu import megatron as megatron_cpu
from asyncrl.models.checkpoint import read_tensors
from tests.support.megatron import (
    built,
    in_processes,
    make_experts,
    only_where_wanted,
    process_group,
    random_tokens,
    states,
)
from tests.support.trainer import make_checkpoint, make_config, make_groups

pytestmark = [pytest.mark.megatron, pytest.mark.skipif(torch.cuda.is_available(), reason="patches are for CPUs only")]
megatron_cpu.activate()

#: raised by torch without a GPU: when built without CUDA, and with it
NO_CUDA = (AssertionError, RuntimeError)


def test_every_patch_says_why_and_is_applied_once():
    before = [len(patch.replaced) for patch in megatron_cpu.PATCHES]
    megatron_cpu.activate()
    assert [len(patch.replaced) for patch in megatron_cpu.PATCHES] == before
    assert all(patch.why for patch in megatron_cpu.PATCHES)
    assert [bool(patch.replaced) for patch in megatron_cpu.PATCHES] == [
        patch.wanted() for patch in megatron_cpu.PATCHES
    ]
    assert len({patch.name for patch in megatron_cpu.PATCHES}) == len(megatron_cpu.PATCHES)


def test_only_the_bridge_sees_stand_ins_for_transformer_engine_and_triton():
    found = {name: sys.modules[name] for name in ("transformer_engine", "triton") if name in sys.modules}
    assert all(module.__version__ != "0.0.0" for module in found.values())
    believers = [
        n for n, m in sys.modules.items() if n.startswith("megatron.") and getattr(m, "HAVE_TE", False) is True
    ]
    assert not believers


@pytest.mark.parametrize("name", ["current_device", "tensor_types", "device_in_source", "random_state"])
def test_a_trainer_trains_only_with_the_patch(name, checkpoint, start_rank):
    config = make_config(checkpoint, backend="megatron")
    with (
        megatron_cpu.patch_named(name).suspended(),
        pytest.raises((AssertionError, RuntimeError, TypeError, AttributeError)),
    ):
        start_rank(config).train(0, make_groups())
    leave_groups()
    assert start_rank(config).train(0, make_groups())["actor/grad_norm"] > 0


def test_gradients_are_summed_without_a_stream_to_wait_on(checkpoint, start_rank):
    only_where_wanted("gradients_stream")
    config = make_config(checkpoint, backend="megatron")
    with megatron_cpu.patch_named("gradients_stream").suspended(), pytest.raises(NO_CUDA):
        start_rank(config).train(0, make_groups())
    assert start_rank(config).train(0, make_groups())["actor/grad_norm"] > 0


def test_moves_to_cuda_leave_tensors_in_place():
    tensor, module = torch.zeros(2), torch.nn.Linear(1, 1)
    assert tensor.cuda() is tensor
    assert module.cuda() is module
    with megatron_cpu.patch_named("moves").suspended(), pytest.raises(NO_CUDA):
        tensor.cuda()


def test_pipeline_stages_do_not_synchronize_a_device():
    torch.cuda.synchronize()
    with megatron_cpu.patch_named("synchronize").suspended(), pytest.raises(NO_CUDA):
        torch.cuda.synchronize()


def test_tensor_types_have_cuda_names_only_while_the_optimizer_is_built(checkpoint, start_rank):
    start_rank(make_config(checkpoint, backend="megatron"))
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_the_router_s_product_is_computed_without_transformer_engine(tmp_path):
    from megatron.core.transformer.moe import moe_utils

    inputs, weight = torch.randn(3, 4), torch.randn(2, 4)
    found = moe_utils.router_gating_linear(inputs, weight, None, torch.float32)
    assert torch.allclose(found, inputs @ weight.t())
    only_where_wanted("router_kernel")
    with megatron_cpu.patch_named("router_kernel").suspended(), pytest.raises(NameError, match="te_general_gemm"):
        moe_utils.router_gating_linear(inputs, weight, None, torch.float32)


def scatter_shards(rank, checkpoint, folder):
    """Load o_proj, whose columns are split between two ranks, with and without the patch."""
    torch.set_num_threads(1)
    with process_group(rank, 2, f"file://{folder}/rendezvous", cut="tensor"):
        name, found = "model.layers.0.self_attn.o_proj.weight", {}
        for patched in (True, False):
            with contextlib.nullcontext() if patched else megatron_cpu.patch_named("scatter").suspended():
                (model,), _ = built(checkpoint, cut="tensor")
            found[patched] = model.decoder.layers[0].self_attention.linear_proj.weight.detach().clone()
        torch.save((name, found), folder / f"{rank}.pt")


def test_without_the_patch_row_parallel_shards_are_silently_wrong(tmp_path):
    only_where_wanted("scatter")
    checkpoint = make_checkpoint(tmp_path / "model", num_attention_heads=2, num_key_value_heads=2)
    in_processes(2, scatter_shards, checkpoint, tmp_path)
    for rank in range(2):
        name, found = torch.load(tmp_path / f"{rank}.pt")
        whole = read_tensors(checkpoint)[name]
        assert torch.equal(found[True], whole.chunk(2, 1)[rank])
        assert found[False].shape == found[True].shape
    assert not torch.equal(found[False], whole.chunk(2, 1)[1]), "gloo now scatters views correctly: remove the patch"


def test_experts_are_built_and_count_their_tokens_only_with_the_patch(tmp_path):
    make_experts(tmp_path)
    with process_group():
        with (
            megatron_cpu.patch_named("token_dispatcher").suspended(),
            pytest.raises((AssertionError, RuntimeError, TypeError)),
        ):
            states(built(tmp_path)[0][0], random_tokens(64))
        (hidden,) = states(built(tmp_path)[0][0], random_tokens(64))
    assert hidden.isfinite().all()


def leave_groups():
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
