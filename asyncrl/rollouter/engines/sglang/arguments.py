"""From our options to SGLang's server arguments and sampling parameters."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.models.config import ModelConfig
from asyncrl.param_sync.manifest import DTYPE_BYTES
from asyncrl.rollouter.engine import EngineError, Request
from asyncrl.rollouter.engines.adapters import adapted_leaves, adapter_slots
from asyncrl.rollouter.engines.sglang.serve import UNPINNED

_OLDEST = (0, 5, 20)  # with the pause modes, and spans of weight versions in the outputs
SESSIONS_SINCE = (0, 5, 22)  # updates of weights stand between begin and end
_SLACK_TOKENS = 8  # SGLang ends a request a little before its context is full

#: what the adapter stands on; `rollout.engine.args` may not change it
_OURS = frozenset(
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
        "enable_lora",
        "lora_paths",
        "max_lora_rank",
        "lora_target_modules",
        "max_loras_per_batch",
    }
)


def check_version() -> tuple[int, ...]:
    """SGLang's version. Raises EngineError for one that the adapter does not know."""
    try:
        said = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise EngineError(
            "SGLang is not installed in this environment, see runtime_env/ for replicas with one of their own"
        ) from None
    version = tuple(int(part) for part in said.split(".")[:3] if part.isdigit())
    if version < _OLDEST:
        raise EngineError(f"SGLang {said}: expected at least {'.'.join(map(str, _OLDEST))}, which tells versions")
    return version


def server_arguments(config: Config, device: str) -> dict[str, Any]:
    """By SGLang's names. Raises EngineError for arguments that are ours to set."""
    engine, mtp = config.rollout.engine, config.mtp
    if taken := sorted(_OURS & engine.args.keys()):
        raise EngineError(f"rollout.engine.args: {', '.join(taken)} follow from other options; leave them out")
    if {"dp_size", "data_parallel_size"} & engine.args.keys() and not engine.args.get("enable_dp_attention"):
        raise EngineError("rollout.engine.args: dp_size goes with enable_dp_attention; else raise rollout.replicas")
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
        "enable_memory_saver": device == "cuda" and config.param_sync.kv == "unload",  # what can free the KV cache
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
    """What the server's processes find in their environment, beside ours."""
    engine = config.rollout.engine
    wanted = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    wanted["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # by the slack
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
        # Where to stop is the request's to say. But told to ignore the checkpoint's own end, SGLang ignores these too.
        "ignore_eos": not s.stop_token_ids,
        "stream_interval": stream_interval,
    }


def lora_slots(config: Config) -> int:
    """SGLang never puts one adapter in the place of another, so there is always room for two."""
    return max(2, adapter_slots(config))


def context_tokens(config: Config) -> int:
    model = ModelConfig.load(config.model.path)
    return config.rollout.engine.max_context_tokens or model.max_position_embeddings


def kv_token_bytes(config: Config) -> int:
    """Of one token in the KV cache, over all layers."""
    model = ModelConfig.load(config.model.path)
    layers = model.num_layers + (model.num_mtp_layers if config.mtp.enable_rollout else 0)
    element = DTYPE_BYTES[model.engine_dtype(config.rollout.engine.dtype)]
    return 2 * layers * model.num_kv_heads * model.head_dim * element


def resolve_device(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
