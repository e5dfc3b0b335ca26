"""Backends and algorithms are found by name, and refuse options that they do not support."""

import pytest

from asyncrl.algorithms.items import ADVANTAGES, CORRECTIONS, SURROGATES
from asyncrl.config.load import load_config
from asyncrl.plugins.registry import UnknownPart
from asyncrl.trainer.backends.base import BACKENDS

KEY = "trainer.megatron"
TENSOR, PIPELINE = f"{KEY}.tensor_model_parallel_size", f"{KEY}.pipeline_model_parallel_size"
CONTEXT, EXPERT = f"{KEY}.context_parallel_size", f"{KEY}.expert_model_parallel_size"


def options(*overrides):
    return load_config(None, ["model.path=m", "reward.function=a:b", *overrides])


def test_the_backends_are_found_by_name_and_import_path():
    assert BACKENDS.names() == ["megatron", "torch"]
    assert BACKENDS.find("asyncrl.trainer.backends.torch.spec:BACKEND") is BACKENDS.find("torch")
    with pytest.raises(UnknownPart, match=r"^trainer.backend: expected one of megatron, torch, or an import path"):
        BACKENDS.find("jax")


def test_the_items_of_algorithms_are_found_by_name_and_import_path():
    assert ADVANTAGES.names() == ["grpo", "pass_at_k", "reinforce_pp", "rloo"]
    assert SURROGATES.names() == ["cispo", "clip", "gspo", "sapo"]
    assert CORRECTIONS.names() == ["mis", "reject", "tis"]
    assert ADVANTAGES.find("asyncrl.algorithms.advantages.grpo:ADVANTAGE") is ADVANTAGES.find("grpo")


def test_a_backend_that_lacks_a_method_is_refused_by_its_name():
    with pytest.raises(UnknownPart, match=r"lacks check_model, .*weight_shards, which every backend has$"):
        BACKENDS.find("math:pi")


def test_ranks_share_a_copy_of_the_model_only_if_the_backend_shards_it():
    config = options("trainer.ranks=16", f"{TENSOR}=2", f"{PIPELINE}=2", f"{CONTEXT}=2")
    megatron, torch = BACKENDS.find("megatron"), BACKENDS.find("torch")
    assert (megatron.ranks_per_copy(config), megatron.weight_shards(config)) == (8, 4)
    assert (torch.ranks_per_copy(config), torch.weight_shards(config)) == (1, 16)


@pytest.mark.parametrize(
    ("backend", "overrides", "expected"),
    [
        (
            "megatron",
            ["model.bridge=nemo"],
            "model.bridge: expected one of auto, megatron_bridge, mbridge; found",
        ),
        ("megatron", ["trainer.ranks=3", f"{TENSOR}=2"], "trainer.ranks: expected a multiple of the 2"),
        ("megatron", ["trainer.ranks=3", f"{CONTEXT}=2"], "trainer.ranks: expected a multiple of the 2"),
        (
            "megatron",
            ["trainer.ranks=2", f"{PIPELINE}=2", f"{KEY}.virtual_pipeline_model_parallel_size=2"],
            f"{KEY}.virtual_pipeline_model_parallel_size: 2 chunks per stage need {PIPELINE} of at least 3, found 2",
        ),
        ("megatron", [f"{KEY}.sequence_parallel=true"], f"{KEY}.sequence_parallel: needs tensor parallel ranks"),
        ("megatron", [f"{EXPERT}=2"], f"{EXPERT}: expected a divisor of the 1 ranks of a pipeline"),
        ("megatron", ["trainer.cpu_offload=true"], "trainer.cpu_offload: expected false; the Megatron backend has"),
    ],
)
def test_a_backend_refuses_options_that_it_does_not_support(backend, overrides, expected):
    (found,) = BACKENDS.find(backend).problems(options(*overrides))
    assert found.startswith(expected)
