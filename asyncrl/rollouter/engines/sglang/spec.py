"""SGLang's limits, and its start."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engines.base import Engine
from asyncrl.rollouter.engines.sglang.release import DISTRIBUTIONS
from asyncrl.rollouter.engines.streaming_spec import StreamingSpec

#: arguments that follow from other options, or do not go with them
_DERIVED = frozenset(
    {
        "model_path",
        "device",
        "dtype",
        "host",
        "port",
        "api_key",
        "admin_api_key",
        "random_seed",
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
        "speculative_accept_threshold_single",  # below 1 tokens are not of the policy that their logprobs are of
        "speculative_accept_threshold_acc",
        "preferred_sampling_params",
        "disable_overlap_schedule",
        "enable_eplb",  # experts move meanwhile, and an update need not find them
        "enable_lora",
        "lora_paths",
        "max_lora_rank",
        "lora_target_modules",
        "max_loras_per_batch",
    }
)


class SGLangSpec(StreamingSpec):
    distributions = DISTRIBUTIONS
    deliveries = frozenset({"memory", "gloo", "nccl"})

    def problems(self, config: Config) -> Iterator[str]:
        yield from super().problems(config)
        engine = config.rollout.engine
        if taken := sorted(_DERIVED & engine.args.keys()):
            yield (
                f"rollout.engine.args: {', '.join(taken)} follow from other options or do not go with them; leave them "
                "out"
            )
        if {"dp_size", "data_parallel_size"} & engine.args.keys() and not engine.args.get("enable_dp_attention"):
            yield "rollout.engine.args: dp_size goes with enable_dp_attention; else raise rollout.replicas"
        if engine.delivery == "nccl" and engine.device == "cpu":
            yield "rollout.engine.delivery: nccl joins GPUs; expected memory or gloo, or rollout.engine.device=cuda"
        if engine.device == "cpu" and config.mtp.enable_rollout:
            yield (
                "mtp.enable_rollout: sglang's speculation on the CPU takes the likeliest token whatever the "
                "temperature; expected false, or rollout.engine.device=cuda"
            )
        if engine.data_parallel_size > 1:
            yield (
                "rollout.engine.data_parallel_size: sglang takes no weights where its copies are apart; expected 1 and "
                f"more rollout.replicas, found {engine.data_parallel_size}"
            )
        if engine.pipeline_parallel_size > 1:
            yield (
                "rollout.engine.pipeline_parallel_size: sglang gives all stages one handle to what a sync brings, "
                f"which can be opened once; expected 1, found {engine.pipeline_parallel_size}"
            )
        if sends_adapters(config):
            if config.param_sync.pause == "keep" and config.param_sync.in_flight != "finish":
                yield (
                    "param_sync.in_flight: sglang cannot move a request to another adapter; expected finish with "
                    "param_sync.pause=keep, or another pause, or param_sync.adapters=merged"
                )
            if engine.delivery != "memory":
                yield (
                    f"rollout.engine.delivery: sglang's server takes adapters from memory alone; expected memory, or "
                    f"param_sync.adapters=merged, found {engine.delivery}"
                )

    async def start(self, config: Config, recorder: Recorder) -> Engine:
        from asyncrl.rollouter.engines.sglang.engine import SGLangEngine

        return await SGLangEngine.start(config, recorder=recorder)


ENGINE = SGLangSpec()
