"""Every patch that lets megatron-core run without CUDA: what happens without it, and that it does not with it."""

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
from tests.support.trainer import make_checkpoint, make_config, make_groups, started_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.skipif(torch.cuda.is_available(), reason="patches are for CPUs alone")]
megatron_cpu.activate()

#: torch's, built without CUDA and with it
NO_CUDA = (AssertionError, RuntimeError)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start():
    yield from started_ranks()


def test_every_patch_says_why_and_is_applied_once():
    before = [len(patch.replaced) for patch in megatron_cpu.PATCHES]
    megatron_cpu.activate()
    assert [len(patch.replaced) for patch in megatron_cpu.PATCHES] == before
    assert all(patch.why for patch in megatron_cpu.PATCHES)
    assert [bool(patch.replaced) for patch in megatron_cpu.PATCHES] == [
        patch.wanted() for patch in megatron_cpu.PATCHES
    ]
    assert len({patch.name for patch in megatron_cpu.PATCHES}) == len(megatron_cpu.PATCHES)


def test_nobody_finds_transformer_engine_or_triton_where_the_bridge_was_given_stand_ins():
    found = {name: sys.modules[name] for name in ("transformer_engine", "triton") if name in sys.modules}
    assert all(module.__version__ != "0.0.0" for module in found.values())
    believers = [
        n for n, m in sys.modules.items() if n.startswith("megatron.") and getattr(m, "HAVE_TE", False) is True
    ]
    assert not believers


@pytest.mark.parametrize("name", ["current_device", "tensor_types", "device_in_source", "random_state"])
def test_without_it_no_trainer_starts_and_with_it_one_trains(name, checkpoint, start):
    config = make_config(checkpoint, backend="megatron")
    with (
        megatron_cpu.patch_named(name).suspended(),
        pytest.raises((AssertionError, RuntimeError, TypeError, AttributeError)),
    ):
        start(config).train(0, make_groups())
    leave_groups()
    assert start(config).train(0, make_groups())["actor/grad_norm"] > 0


def test_gradients_are_summed_without_a_stream_to_wait_on(checkpoint, start):
    only_where_wanted("gradients_stream")
    config = make_config(checkpoint, backend="megatron")
    with megatron_cpu.patch_named("gradients_stream").suspended(), pytest.raises(NO_CUDA):
        start(config).train(0, make_groups())
    assert start(config).train(0, make_groups())["actor/grad_norm"] > 0


def test_moves_to_cuda_stay_where_they_are():
    tensor, module = torch.zeros(2), torch.nn.Linear(1, 1)
    assert tensor.cuda() is tensor
    assert module.cuda() is module
    with megatron_cpu.patch_named("moves").suspended(), pytest.raises(NO_CUDA):
        tensor.cuda()


def test_the_device_of_stages_is_never_waited_for():
    torch.cuda.synchronize()
    with megatron_cpu.patch_named("synchronize").suspended(), pytest.raises(NO_CUDA):
        torch.cuda.synchronize()


def test_types_are_named_as_on_cuda_only_while_the_optimizer_is_made(checkpoint, start):
    start(make_config(checkpoint, backend="megatron"))
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_the_routers_product_is_found(tmp_path):
    from megatron.core.transformer.moe import moe_utils

    inputs, weight = torch.randn(3, 4), torch.randn(2, 4)
    found = moe_utils.router_gating_linear(inputs, weight, None, torch.float32)
    assert torch.allclose(found, inputs @ weight.t())
    only_where_wanted("router_kernel")
    with megatron_cpu.patch_named("router_kernel").suspended(), pytest.raises(NameError, match="te_general_gemm"):
        moe_utils.router_gating_linear(inputs, weight, None, torch.float32)


def scatter_shards(rank, checkpoint, folder):
    """Loads o_proj, of whose columns each rank has half, with and without the patch."""
    torch.set_num_threads(1)
    with process_group(rank, 2, f"file://{folder}/rendezvous", cut="tensor"):
        name, found = "model.layers.0.self_attn.o_proj.weight", {}
        for patched in (True, False):
            with contextlib.nullcontext() if patched else megatron_cpu.patch_named("scatter").suspended():
                (model,), _ = built(checkpoint, cut="tensor")
            found[patched] = model.decoder.layers[0].self_attention.linear_proj.weight.detach().clone()
        torch.save((name, found), folder / f"{rank}.pt")


def test_without_it_row_parallel_shards_are_other_weights_and_nothing_says_so(tmp_path):
    only_where_wanted("scatter")
    checkpoint = make_checkpoint(tmp_path / "model", num_attention_heads=2, num_key_value_heads=2)
    in_processes(2, scatter_shards, checkpoint, tmp_path)
    for rank in range(2):
        name, found = torch.load(tmp_path / f"{rank}.pt")
        whole = read_tensors(checkpoint)[name]
        assert torch.equal(found[True], whole.chunk(2, 1)[rank])
        assert found[False].shape == found[True].shape
    assert not torch.equal(found[False], whole.chunk(2, 1)[1]), "gloo scatters views right now: drop the patch"


def test_without_it_no_experts_are_made_and_with_it_their_tokens_are_counted_here(tmp_path):
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
