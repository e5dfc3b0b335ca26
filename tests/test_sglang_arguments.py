"""asyncrl's options become arguments and environment of SGLang's server; without a server."""

from __future__ import annotations

import os

import pytest

from asyncrl.config.schema import (
    Config,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    MTPConfig,
    RolloutConfig,
)
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.rollouter.engines.base import Grammar
from asyncrl.rollouter.engines.sglang.arguments import (
    command_line,
    sampling_parameters,
    server_arguments,
    server_environment,
)
from asyncrl.rollouter.engines.sglang.spec import ENGINE
from tests.support.engine_replica import request


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mimo"), seed=0, warm_start_steps=0)


@pytest.mark.parametrize(("kind", "name"), [("json_schema", "json_schema"), ("regex", "regex"), ("gbnf", "ebnf")])
def test_grammars_and_biases_have_sglangs_names(kind, name):
    sampling = {"logit_bias": ((3, 1.5), (7, -100.0)), "grammar": Grammar(kind, "text")}
    found = sampling_parameters(request("a", [1], 4, stop_token_ids=(2,), **sampling), 1)
    assert found[name] == "text"
    assert found["logit_bias"] == {"3": 1.5, "7": -100.0}
    plain = sampling_parameters(request("a", [1], 4), 1)
    assert plain["logit_bias"] is None
    assert not {"json_schema", "regex", "ebnf"} & plain.keys()


class TestArguments:
    def config(self, checkpoint, mtp=None, **engine):
        options = {"name": "sglang", "slots": 4, "max_context_tokens": 100, "device": "cpu", **engine}
        return Config(
            model=ModelConfig(path=str(checkpoint)),
            rollout=RolloutConfig(engine=EngineConfig(**options)),
            mtp=mtp or MTPConfig(),
        )

    def test_a_draft_is_a_chain_of_the_configured_length(self, checkpoint):
        plain = server_arguments(self.config(checkpoint), "cpu")
        assert not any(name.startswith("speculative") for name in plain)
        config = self.config(checkpoint, MTPConfig(enable_rollout=True, num_speculative_tokens=3))
        drafting = server_arguments(config, "cuda")
        assert drafting["speculative_algorithm"] == "NEXTN"
        assert drafting["speculative_num_steps"] == 3
        assert drafting["speculative_eagle_topk"] == 1
        assert drafting["speculative_num_draft_tokens"] == 4

    def test_lora_options_become_arguments(self, checkpoint):
        config = self.config(checkpoint)
        assert "enable_lora" not in server_arguments(config, "cpu")
        config.model.lora = LoraConfig(rank=8, target_modules=["self_attn.q_proj", "down_proj"])
        arguments = server_arguments(config, "cuda")
        assert (arguments["max_lora_rank"], arguments["max_loras_per_batch"]) == (8, 2)
        assert arguments["lora_target_modules"] == ["down_proj", "q_proj"]
        assert "lora_backend" not in arguments
        assert server_arguments(config, "cpu")["lora_backend"] == "torch_native"
        config.async_training.staleness_threshold = 2
        config.param_sync.in_flight = "finish"
        assert server_arguments(config, "cuda")["max_loras_per_batch"] == 4

    def test_a_group_over_nccl_leaves_the_first_gpu_to_the_replicas_process(self, checkpoint):
        config = self.config(checkpoint, delivery="nccl")
        assert server_arguments(config, "cuda")["base_gpu_id"] == 1

    def test_arguments_that_follow_from_other_options_are_refused(self, checkpoint):
        (problem,) = ENGINE.problems(self.config(checkpoint, args={"tp_size": 2, "api_key": "x"}))
        assert problem.startswith("rollout.engine.args: api_key, tp_size follow from other options")
        (problem,) = ENGINE.problems(self.config(checkpoint, args={"dp_size": 2}))
        assert problem.endswith("raise rollout.replicas")

    @pytest.mark.parametrize(
        "argument",
        [
            "enable_eplb",
            "speculative_accept_threshold_single",
            "speculative_accept_threshold_acc",
            "preferred_sampling_params",
        ],
    )
    def test_arguments_that_would_falsify_logprobs_or_versions_are_refused(self, checkpoint, argument):
        (problem,) = ENGINE.problems(self.config(checkpoint, args={argument: 1}))
        assert f"{argument} follow from other options or conflict with them" in problem

    def test_overlap_can_be_disabled_but_not_forced(self, checkpoint):
        config = self.config(checkpoint, args={"disable_overlap_schedule": True})
        assert not [*ENGINE.problems(config)]
        assert "--disable-overlap-schedule" in command_line(server_arguments(config, "cuda"))
        (problem,) = ENGINE.problems(self.config(checkpoint, args={"disable_overlap_schedule": False}))
        assert "disable_overlap_schedule follows from other options" in problem

    def test_logprobs_are_after_temperature_whatever_the_environment_sets(self, checkpoint, monkeypatch):
        monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
        config = self.config(checkpoint)
        for device in ("cpu", "cuda"):
            assert {**os.environ, **server_environment(config, device)}["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"

    def test_the_overlap_scheduler_is_off_if_requests_are_kept_with_their_cache(self, checkpoint):
        config = self.config(checkpoint)
        for pause, kv in ENGINE.pause_kv:
            config.param_sync.pause, config.param_sync.kv = pause, kv
            overlaps = "--disable-overlap-schedule" not in command_line(server_arguments(config, "cuda"))
            assert overlaps == ((pause, kv) != ("keep", "keep"))
        config.param_sync.pause = config.param_sync.kv = "keep"
        config.param_sync.in_flight = "finish"  # they stay on their version
        assert "disable_overlap_schedule" not in server_arguments(config, "cuda")

    def test_a_secret_reaches_the_command_line_but_not_the_config(self, checkpoint, monkeypatch):
        monkeypatch.setenv("HF", "s3cret")
        config = self.config(checkpoint, args={"loader": {"key": "${secret:HF}"}})
        assert '--loader={"key": "s3cret"}' in command_line(server_arguments(config, "cuda"))
        assert config.rollout.engine.args == {"loader": {"key": "${secret:HF}"}}

    def test_further_arguments_reach_the_command_line(self, checkpoint):
        options = {"ep_size": 2, "enable_dp_attention": True, "dp_size": 2, "disable_radix_cache": False}
        options |= {"json_model_override_args": {"a": 1}, "cuda_graph_bs_decode": [1, 2], "kv_events_config": "-x"}
        words = command_line(server_arguments(self.config(checkpoint, args=options), "cuda"))
        assert {"--ep-size=2", "--dp-size=2", '--json-model-override-args={"a": 1}', "--kv-events-config=-x"} <= {
            *words
        }
        at = words.index("--cuda-graph-bs-decode")
        assert words[at + 1 : at + 3] == ["1", "2"]
        assert "--enable-dp-attention" in words
        assert not any("radix" in word for word in words)
