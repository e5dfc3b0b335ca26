"""SGLang's server arguments, environment and sampling parameters from the config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.models.config import ModelConfig
from asyncrl.rollouter.engines.adapters import adapted_leaves, adapter_slots
from asyncrl.rollouter.engines.base import Request
from asyncrl.rollouter.engines.sglang.serve import UNPINNED

#: arguments with which the server keeps weights of fewer bits than it is sent
QUANTIZING = frozenset({"quantization", "torchao_config", "modelopt_quant"})
_SLACK_TOKENS = 8  # SGLang ends a request a little before its context is full


def server_arguments(config: Config, device: str) -> dict[str, Any]:
    """By SGLang's names."""
    engine, mtp = config.rollout.engine, config.mtp
    model = ModelConfig.load(config.model.path)
    arguments: dict[str, Any] = {
        "model_path": config.model.path,
        "device": device,
        "dtype": model.engine_dtype(engine.dtype),
        "random_seed": config.seed,
        "max_running_requests": engine.slots,
        "context_length": context_tokens(config) + _SLACK_TOKENS,
        "tp_size": engine.tensor_parallel_size,
        "pp_size": engine.pipeline_parallel_size,
        "incremental_streaming_output": True,
        "enable_priority_scheduling": True,
        "schedule_low_priority_values_first": True,
        "enable_memory_saver": device == "cuda" and config.param_sync.kv == "unload",  # needed to free the KV cache
        "log_level": "error",
        "skip_server_warmup": True,  # its request might still run when the first sync comes
    }
    if mtp.enable_rollout:
        arguments |= {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": mtp.num_speculative_tokens,
            "speculative_eagle_topk": 1,  # a chain
            "speculative_num_draft_tokens": mtp.num_speculative_tokens + 1,  # and the token that they follow
        }
    if sends_adapters(config):
        arguments |= {
            "enable_lora": True,
            "max_loras_per_batch": lora_slots(config),
            "max_lora_rank": config.model.lora.rank,
            "lora_target_modules": adapted_leaves(config),
        }
        if device == "cpu":
            arguments["lora_backend"] = "torch_native"
    if engine.delivery == "nccl":
        arguments["base_gpu_id"] = 1  # the first one is this process's
    sync = config.param_sync
    if (sync.pause, sync.kv) == ("keep", "keep") and sync.in_flight != "finish":
        # With it a pause leaves a step in flight: it would run on while weights arrive, and its tokens, drawn from the
        # old ones, would be counted to the new version. Only this pair pays for that: all others drain the step, and
        # requests that finish on their adapter do not change version.
        arguments["disable_overlap_schedule"] = True
    if device == "cpu":
        arguments |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            # as much as every slot's whole context takes
            "max_total_tokens": engine.slots * (context_tokens(config) + _SLACK_TOKENS),
            "mem_fraction_static": 0.2,  # of the machine's memory may the cache take, if it had no bound
        }
    return arguments | engine.args


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """As SGLang's parser reads them; False and None are left out."""
    words: list[str] = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, (list, tuple)):
            words += [option, *map(str, value)]
        elif value is not None and value is not False:
            # in one word: a value may begin with a dash
            words.append(f"{option}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


def server_environment(config: Config, device: str) -> dict[str, str]:
    """Environment of the server's processes, in addition to this one's."""
    engine = config.rollout.engine
    wanted = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    wanted["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # by the slack
    wanted["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"  # the behaviour logprob is that after temperature
    if engine.delivery == "gloo":
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # where this process is in the group
    if device == "cpu" and sends_adapters(config):
        wanted[UNPINNED] = "1"
    if device == "cpu":
        # every worker may run on every core; bound, those of all replicas would be on the same ones
        cores = "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * engine.tensor_parallel_size)
        wanted |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores}
        wanted["OMP_NUM_THREADS"] = str(engine.threads)
    return wanted


def sampling_parameters(request: Request, stream_interval: int) -> dict[str, Any]:
    s = request.sampling
    return {
        "max_new_tokens": request.max_new_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k or -1,
        "min_p": s.min_p,
        "stop_token_ids": list(s.stop_token_ids) or None,
        "stop": list(s.stop_strings) or None,
        # it ignores the request's own stop tokens too; `stops` hides the model's
        "ignore_eos": not s.stop_token_ids,
        "stream_interval": stream_interval,
    }


def lora_slots(config: Config) -> int:
    """SGLang never replaces an adapter in place, so there is always room for two."""
    return max(2, adapter_slots(config))


def context_tokens(config: Config) -> int:
    model = ModelConfig.load(config.model.path)
    return config.rollout.engine.max_context_tokens or model.max_position_embeddings
