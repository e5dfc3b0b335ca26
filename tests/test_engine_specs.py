"""Engine specs refuse unsupported options before anything starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.schema import (
    Config,
    EngineConfig,
    LoraConfig,
    MTPConfig,
    ParamSyncConfig,
    RolloutConfig,
    ValidationConfig,
)
from asyncrl.plugins.registry import UnknownPart
from asyncrl.rollouter.engines.base import ENGINES, EngineSpec


class Least(EngineSpec):
    """Nothing beyond the defaults."""

    async def start(self, config, recorder):
        raise NotImplementedError


LEAST = Least()
LACKING = type("Lacking", (), {"pause_kv": frozenset()})()


def of(**parts) -> Config:
    engine = parts.pop("engine", {})
    rollout = RolloutConfig(engine=EngineConfig(name="x", **engine), **parts.pop("rollout", {}))
    return replace(Config(), rollout=rollout, **parts)


def test_the_engines_are_found_by_name_without_their_packages():
    assert ENGINES.names() == ["native", "sglang", "vllm"]
    for name in ENGINES.names():
        assert list(ENGINES.find(name).problems(of())) == []
    assert not {"vllm", "sglang"} & sys.modules.keys()


def test_an_engine_that_lacks_a_method_is_refused_by_its_import_path():
    with pytest.raises(UnknownPart, match=r"^rollout\.engine\.name: tests\.test_engine_specs:LACKING lacks .*problems"):
        ENGINES.find("tests.test_engine_specs:LACKING")
    assert ENGINES.find("tests.test_engine_specs:LEAST") is LEAST


def test_a_spec_without_start_cannot_be_made():
    """So its module does not import, which is reported in one line."""
    with pytest.raises(TypeError, match=r"abstract class Incomplete .*start"):
        type("Incomplete", (EngineSpec,), {})()


LORA = LoraConfig(rank=8)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            of(param_sync=ParamSyncConfig(kv="keep")),
            "param_sync.kv: keep does not work with pause abort in the x engine",
        ),
        (of(param_sync=ParamSyncConfig(staging="full")), "param_sync.staging: the x engine offers bucket, found full"),
        (of(engine={"deterministic": True}), "rollout.engine.deterministic: the x engine's results depend on what"),
        (of(engine={"delivery": "gloo"}), "rollout.engine.delivery: the x engine offers memory, found gloo"),
        (of(engine={"args": {"a": 1}}), "rollout.engine.args: the x engine takes none beside its options, found ['a']"),
        (of(engine={"tensor_parallel_size": 2}), "rollout.engine.tensor_parallel_size: the x engine has one device"),
        (of(mtp=MTPConfig(enable_rollout=True)), "mtp.enable_rollout: the x engine does not speculate"),
        (of(model=replace(Config().model, float32_head=True)), "model.float32_head: the x engine rounds its logits"),
        (of(model=replace(Config().model, lora=LORA)), "param_sync.adapters: the x engine takes no adapters"),
        (of(param_sync=ParamSyncConfig(in_flight="finish")), "param_sync.in_flight: the x engine moves requests"),
    ],
)
def test_an_engine_refuses_what_it_does_not_offer(config, expected):
    (problem,) = LEAST.problems(config)
    assert problem.startswith(expected)


def test_an_engine_without_a_pause_mode_names_those_it_offers():
    spec = Least()
    spec.pause_kv = frozenset({("wait", "recompute")})
    (problem,) = spec.problems(of())
    assert problem == "param_sync.pause: the x engine offers wait, found abort"


@pytest.mark.parametrize(
    ("argument", "why"),
    [("max_num_seqs", "follow from other options"), ("generation_config", "distribution"), ("enable_eplb", "experts")],
)
def test_vllm_refuses_arguments_that_asyncrl_sets_or_cannot_allow(argument, why):
    (problem,) = ENGINES.find("vllm").problems(of(engine={"args": {argument: 1}}))
    assert problem.startswith("rollout.engine.args: ")
    assert argument in problem
    assert why in problem


def test_the_guide_shows_the_whole_example_engine():
    docs = Path(__file__).parent.parent / "docs"
    assert (docs / "examples" / "toy_engine.py").read_text() in (docs / "extending.md").read_text()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (of(rollout={"temperature": 2.5}), "rollout.temperature: vllm samples at temperatures from 0.01 to 2.0"),
        (of(rollout={"temperature": 0.001}), "rollout.temperature: vllm samples"),
        (of(validation=ValidationConfig(temperature=3.0)), "validation.temperature: vllm samples"),
        (
            of(mtp=MTPConfig(enable_rollout=True), validation=ValidationConfig(min_p=0.1)),
            "validation.min_p: vllm offers none with mtp.enable_rollout; found 0.1",
        ),
    ],
)
def test_vllm_refuses_sampling_that_it_does_not_offer(config, expected):
    (problem,) = ENGINES.find("vllm").problems(config)
    assert problem.startswith(expected)


def test_engines_say_what_a_request_may_sample_with():
    numbers = {"temperature", "top_p", "top_k", "min_p"}
    assert LEAST.served_sampling(of()) == numbers
    for name in ("native", "vllm", "sglang"):
        assert ENGINES.find(name).served_sampling(of()) == {*numbers, "logit_bias", "grammar"}
    drafting = of(mtp=MTPConfig(enable_rollout=True))
    assert ENGINES.find("vllm").served_sampling(drafting) == {"temperature", "top_p", "top_k", "grammar"}
    assert ENGINES.find("sglang").served_sampling(drafting) == {*numbers, "logit_bias", "grammar"} - {"min_p"}
    wanted = of(mtp=MTPConfig(enable_rollout=True), validation=ValidationConfig(min_p=0.1))
    expected = "validation.min_p: sglang offers none with mtp.enable_rollout; found 0.1"
    assert expected in list(ENGINES.find("sglang").problems(wanted))


@pytest.mark.parametrize("name", ["native", "vllm", "sglang"])
def test_the_built_in_engines_keep_requests_over_a_sync(name):
    """The contract skips what an engine does not declare."""
    assert {("keep", "keep"), ("keep", "recompute")} <= ENGINES.find(name).pause_kv
