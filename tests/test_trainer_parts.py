"""Backends and algorithms are found by name, and refuse options that they do not support."""

import pytest

from asyncrl.config.load import load_config
from asyncrl.plugins.registry import UnknownPart
from asyncrl.trainer.algorithms.base import ALGORITHMS
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


def test_the_algorithms_are_found_by_name_and_import_path():
    assert ALGORITHMS.names() == ["grpo"]
    assert ALGORITHMS.find("asyncrl.trainer.algorithms.grpo:ALGORITHM") is ALGORITHMS.find("grpo")


def test_a_backend_that_lacks_a_method_is_refused_by_its_name():
    with pytest.raises(UnknownPart, match=r"lacks distributions, .*weight_shards, which every backend has$"):
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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["rollout.n=1", "rollout.min_group_size=1"],
            "rollout.n: grpo compares the samples of a group and needs at least 2, found 1",
        ),
        (
            ["algorithm.anchor=proximal", "algorithm.importance_cap=0.5"],
            "algorithm.importance_cap: expected 0 or at least 1",
        ),
        (["algorithm.importance_cap=2"], "algorithm.importance_cap: the ratio to algorithm.anchor=behaviour already"),
        (
            ["algorithm.anchor=proximal", "async_training.staleness_threshold=1"],
            "algorithm.importance_cap: with algorithm.anchor=proximal and 0 nothing corrects stale tokens",
        ),
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"], "algorithm.kl_estimator: as a loss, k1's gradient"),
    ],
)
def test_grpo_refuses_options_that_contradict_each_other(overrides, expected):
    (found,) = ALGORITHMS.find("grpo").problems(options(*overrides))
    assert found.startswith(expected)
