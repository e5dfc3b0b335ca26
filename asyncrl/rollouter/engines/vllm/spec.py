"""vLLM's engine spec: its limits and how it starts."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engines.base import LEAST_TEMPERATURE, Engine
from asyncrl.rollouter.engines.streaming_spec import StreamingSpec
from asyncrl.rollouter.engines.vllm.release import DISTRIBUTIONS

_MAX_LORA_RANK = 512
_TEMPERATURES = 0.01, 2.0  # vLLM raises lower ones but 0, and refuses higher ones

#: arguments that follow from other options
_DERIVED = frozenset(
    {
        "model",
        "trust_remote_code",
        "logprobs_mode",
        "weight_transfer_config",
        "worker_extension_cls",
        "speculative_config",
        "scheduling_policy",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "max_num_seqs",
        "max_model_len",
        "dtype",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "lora_target_modules",
        "lora_dtype",
        "spec_method",
        "spec_model",
        "spec_tokens",
        "stream_interval",
    }
)

_OTHER_DISTRIBUTION = "tokens would come from another distribution than the logprobs that training uses"
_MOVED_EXPERTS = "it moves experts between workers, and a sync would load them into their original places"
#: argument → why it is refused
_REFUSED = {
    "generation_config": _OTHER_DISTRIBUTION,
    "override_generation_config": _OTHER_DISTRIBUTION,
    "logits_processors": _OTHER_DISTRIBUTION,
    "watermark_config": _OTHER_DISTRIBUTION,
    "enable_eplb": _MOVED_EXPERTS,
    "eplb_config": _MOVED_EXPERTS,
}


class VLLMSpec(StreamingSpec):
    distributions = DISTRIBUTIONS
    memory_share = "gpu_memory_utilization"

    def served_sampling(self, config: Config) -> frozenset[str]:
        """vLLM applies neither of two while it verifies drafts."""
        return super().served_sampling(config) - ({"min_p", "logit_bias"} if config.mtp.enable_rollout else set())

    def problems(self, config: Config) -> Iterator[str]:
        yield from super().problems(config)
        engine = config.rollout.engine
        if taken := sorted(_DERIVED & engine.args.keys()):
            yield f"rollout.engine.args: {', '.join(taken)} follow from other options; leave them out"
        for name in sorted(_REFUSED.keys() & engine.args.keys()):
            yield f"rollout.engine.args: leave {name} out: {_REFUSED[name]}"
        if engine.data_parallel_size > engine.slots:
            yield (
                f"rollout.engine.data_parallel_size: expected at most one copy of the model for each of the replica's "
                f"{engine.slots} slots (rollout.engine.slots), found {engine.data_parallel_size}"
            )
        for key, temperature in (
            ("rollout.temperature", config.rollout.temperature),
            ("validation.temperature", config.validation.temperature),
        ):
            lowest, highest = _TEMPERATURES
            if temperature >= LEAST_TEMPERATURE and not lowest <= temperature <= highest:
                yield f"{key}: vllm samples at temperatures from {lowest} to {highest}, found {temperature:g}"
        if config.mtp.enable_rollout and config.validation.min_p:
            yield f"validation.min_p: vllm offers none with mtp.enable_rollout; found {config.validation.min_p:g}"
        if sends_adapters(config):
            if engine.pipeline_parallel_size > 1:
                yield "param_sync.adapters: vllm takes no adapters with pipeline stages; expected merged"
            if config.model.lora.rank > _MAX_LORA_RANK:
                yield f"model.lora.rank: vllm supports ranks up to {_MAX_LORA_RANK}, found {config.model.lora.rank}"

    async def start(self, config: Config, recorder: Recorder) -> Engine:
        from asyncrl.rollouter.engines.vllm.engine import VLLMEngine

        return await VLLMEngine.start(config, recorder=recorder)


ENGINE = VLLMSpec()
