"""SGLang's engine spec: its limits and how it starts."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engines.base import Engine
from asyncrl.rollouter.engines.sglang.release import DISTRIBUTIONS
from asyncrl.rollouter.engines.streaming_spec import StreamingSpec

#: arguments that follow from other options or conflict with them
_DERIVED = frozenset(
    {
        "model_path",
        "trust_remote_code",
        "device",
        "dtype",
        "host",
        "port",
        "api_key",
        "admin_api_key",
        "random_seed",
        "enable_fp32_lm_head",
        "max_running_requests",
        "context_length",
        "tp_size",
        "tensor_parallel_size",
        "pp_size",
        "pipeline_parallel_size",
        "tokenizer_worker_num",
        "skip_tokenizer_init",
        "incremental_streaming_output",
        "enable_priority_scheduling",
        "schedule_low_priority_values_first",
        "enable_memory_saver",
        "weight_version",
        "speculative_algorithm",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_accept_threshold_single",  # below 1, tokens do not follow the distribution of their logprobs
        "speculative_accept_threshold_acc",
        "preferred_sampling_params",
        "enable_eplb",  # it moves experts, and an update may miss them
        "enable_lora",
        "lora_paths",
        "max_lora_rank",
        "lora_target_modules",
        "max_loras_per_batch",
    }
)


class SGLangSpec(StreamingSpec):
    distributions = DISTRIBUTIONS
    memory_share = "mem_fraction_static"
    deliveries = frozenset({"memory", "gloo", "nccl"})

    def served_sampling(self, config: Config) -> frozenset[str]:
        """SGLang applies no min_p while it verifies drafts."""
        return super().served_sampling(config) - ({"min_p"} if config.mtp.enable_rollout else set())

    def problems(self, config: Config) -> Iterator[str]:
        yield from super().problems(config)
        engine = config.rollout.engine
        if config.mtp.enable_rollout and config.validation.min_p:
            yield f"validation.min_p: sglang offers none with mtp.enable_rollout; found {config.validation.min_p:g}"
        if taken := sorted(_DERIVED & engine.args.keys()):
            yield (
                f"rollout.engine.args: {', '.join(taken)} follow from other options or conflict with them; leave them "
                "out"
            )
        if not engine.args.get("disable_overlap_schedule", True):
            yield "rollout.engine.args: disable_overlap_schedule follows from other options; leave it out"
        if {"dp_size", "data_parallel_size"} & engine.args.keys() and not engine.args.get("enable_dp_attention"):
            yield "rollout.engine.args: dp_size needs enable_dp_attention; without it, raise rollout.replicas"
        if engine.delivery == "nccl" and engine.device == "cpu":
            yield "rollout.engine.delivery: nccl joins GPUs; expected memory or gloo, or rollout.engine.device=cuda"
        if engine.device == "cpu" and config.mtp.enable_rollout:
            yield (
                "mtp.enable_rollout: sglang's speculation on the CPU is greedy at any temperature; expected false, or "
                "rollout.engine.device=cuda"
            )
        if engine.data_parallel_size > 1:
            yield (
                "rollout.engine.data_parallel_size: sglang cannot sync separate copies of a model; expected 1 and more "
                f"rollout.replicas, found {engine.data_parallel_size}"
            )
        if engine.pipeline_parallel_size > 1:
            yield (
                "rollout.engine.pipeline_parallel_size: sglang gives all stages one handle to a sync's weights, which "
                f"can be opened only once; expected 1, found {engine.pipeline_parallel_size}"
            )
        if sends_adapters(config):
            if config.param_sync.pause == "keep" and config.param_sync.in_flight != "finish":
                yield (
                    "param_sync.in_flight: sglang cannot move a request to another adapter; expected finish with "
                    "param_sync.pause=keep, or another pause, or param_sync.adapters=merged"
                )
            if engine.delivery != "memory":
                yield (
                    f"rollout.engine.delivery: sglang's server takes adapters only from memory; expected memory, or "
                    f"param_sync.adapters=merged, found {engine.delivery}"
                )

    async def start(self, config: Config, recorder: Recorder) -> Engine:
        from asyncrl.rollouter.engines.sglang.engine import SGLangEngine

        return await SGLangEngine.start(config, recorder=recorder)


ENGINE = SGLangSpec()
