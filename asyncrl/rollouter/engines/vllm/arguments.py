"""vLLM's engine arguments, environment and sampling parameters from the config."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from vllm import SamplingParams as VLLMSamplingParams
from vllm.config import WeightTransferConfig
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config, EngineConfig
from asyncrl.config.secrets import hidden, redacted, revealed
from asyncrl.cpu.vllm import mla_kernel
from asyncrl.models.config import ModelConfig, text_part
from asyncrl.param_sync.manifest import DTYPE_BYTES
from asyncrl.rollouter.engines.adapters import adapted_leaves, adapter_slots
from asyncrl.rollouter.engines.base import EngineError, Request
from asyncrl.rollouter.engines.vllm.plugin import REPLICA_MARK
from asyncrl.rollouter.engines.vllm.release import check_release

BACKEND = "asyncrl"  # the name of our weight-transfer engine in vLLM's registry
_EXTENSION = "asyncrl.rollouter.engines.vllm.worker.WorkerExtension"
_GRAMMARS = {"json_schema": "json", "regex": "regex", "gbnf": "grammar"}  # vLLM's names
_BLOCK_TOKENS = 128  # vLLM's KV cache block on the CPU


def engine_arguments(config: Config, device: str) -> AsyncEngineArgs:
    """vLLM's engine arguments. Raises EngineError for ``rollout.engine.args`` that vLLM refuses; `spec` refuses those
    that a user may not set. Raises MissingSecret."""
    engine, mtp, model = config.rollout.engine, config.mtp, ModelConfig.load(config.model.path)
    dtype = str(model.engine_dtype(engine.dtype))
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": dtype,
        "seed": config.seed,
        "max_num_seqs": _slots_each(engine),
        "max_model_len": engine.max_context_tokens or None,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "data_parallel_size": engine.data_parallel_size,
        "logprobs_mode": "processed_logprobs",  # after temperature
        "scheduling_policy": "priority",
        "worker_extension_cls": _EXTENSION,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "enable_log_requests": False,
        "generation_config": "vllm",  # ignore the checkpoint's sampling defaults
    }
    if engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"  # within a Ray actor, vLLM's default is actors of its own
    if mtp.enable_rollout:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": mtp.num_speculative_tokens}
    if sends_adapters(config):
        arguments |= _lora_arguments(config)
    if device == "cpu":
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": _kv_bytes(config)}
        if engine.args.keys().isdisjoint({"attention_backend", "attention_config"}):
            arguments["attention_backend"] = mla_kernel(model.raw, dtype)
    else:
        arguments["enable_sleep_mode"] = config.param_sync.kv == "unload"  # needed to free the KV cache
    arguments |= revealed("rollout.engine.args", engine.args)
    try:
        if config.model.float32_head:
            arguments["hf_overrides"] = {**arguments.get("hf_overrides", {}), "head_dtype": "float32"}
        return AsyncEngineArgs(**arguments)
    except (TypeError, ValueError) as e:
        raise EngineError(f"rollout.engine.args: vLLM {check_release()} says {reason(e, engine)}") from None


def reason(error: Exception, engine: EngineConfig) -> str:
    """Text of an error of vLLM, without secrets."""
    text = str(error)
    if isinstance(error, ValidationError):  # its own text has the refused values, abridged: `redacted` misses those
        problems = error.errors(include_input=False, include_url=False)
        text = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems)
    return redacted(text, hidden(engine.args))


def _lora_arguments(config: Config) -> dict[str, Any]:
    """Adapter slots, only for the modules that adapters target."""
    return {
        "enable_lora": True,
        "max_loras": adapter_slots(config),
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= config.model.lora.rank),
        "lora_target_modules": adapted_leaves(config),
    }


def prepare_environment(device: str, threads: int, sockets: Path) -> None:
    """Set environment variables that vLLM reads when it is first imported, and the folder of an engine's sockets."""
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", REPLICA_MARK: "1"}
    if device == "cpu":
        # the cluster counts one core per thread; binding would put all replicas on the same cores
        wanted |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    for key, value in wanted.items():
        os.environ.setdefault(key, value)
    os.environ["VLLM_RPC_BASE_PATH"] = str(sockets)


def sampling_parameters(request: Request) -> VLLMSamplingParams:
    s, grammar = request.sampling, request.sampling.grammar
    return VLLMSamplingParams(
        max_tokens=request.max_new_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        stop_token_ids=list(s.stop_token_ids),
        ignore_eos=True,  # the request decides where it stops, not the checkpoint
        logprobs=0,  # only of the sampled token
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,  # stop strings are found in `asyncrl.rollouter.engines.streaming`
        logit_bias=dict(s.logit_bias) or None,
        structured_outputs=grammar and StructuredOutputsParams(**{_GRAMMARS[grammar.kind]: grammar.text}),
    )


def _slots_each(engine: EngineConfig) -> int:
    return math.ceil(engine.slots / engine.data_parallel_size)


def _kv_bytes(config: Config) -> int:
    """Bytes of KV cache that one copy of the model needs for a full context in every slot.

    A linear attention layer has a state instead. vLLM stores it in a block of the same size as the other layers', which
    it enlarges to hold a state. Two states per layer cover that and rounding."""
    model, engine = ModelConfig.load(config.model.path), config.rollout.engine
    context = engine.max_context_tokens or model.max_position_embeddings
    layers = model.num_layers + (model.num_mtp_layers if config.mtp.enable_rollout else 0)
    token = 2 * layers * model.num_kv_heads * model.head_dim * DTYPE_BYTES[model.engine_dtype(engine.dtype)]
    tokens = math.ceil(context / _BLOCK_TOKENS + 1) * _BLOCK_TOKENS
    return _slots_each(engine) * (tokens * token + 2 * layers * _state_bytes(model.raw))


def _state_bytes(raw: Mapping[str, Any]) -> int:
    """Bytes of the float32 state of a Gated DeltaNet layer (Qwen3-Next, Qwen3.5): keys × values per head, and the
    convolution's last tokens. 0 for models without such layers."""
    text = text_part(raw)
    if not (heads := int(text.get("linear_num_value_heads") or 0)):
        return 0
    key, value = int(text["linear_key_head_dim"]), int(text["linear_value_head_dim"])
    channels = 2 * int(text["linear_num_key_heads"]) * key + heads * value
    return 4 * (heads * key * value + channels * (int(text["linear_conv_kernel_dim"]) - 1))
