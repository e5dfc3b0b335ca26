"""SGLang's server arguments, environment and sampling parameters from the config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.config.secrets import revealed
from asyncrl.models.config import ModelConfig
from asyncrl.rollouter.engines.adapters import adapted_leaves, adapter_slots
from asyncrl.rollouter.engines.base import Request
from asyncrl.rollouter.engines.sglang.serve import UNPINNED

#: arguments that make the server quantise the weights it receives
QUANTIZING = frozenset({"quantization", "torchao_config", "modelopt_quant"})
_GRAMMARS = {"json_schema": "json_schema", "regex": "regex", "gbnf": "ebnf"}  # SGLang's names
_SLACK_TOKENS = 8  # SGLang ends a request a little before its context is full


def _context_length(config: Config) -> int:
    """With room for the tokens that SGLang reserves for a verification."""
    verified = config.mtp.num_speculative_tokens + 1 if config.mtp.enable_rollout else 0
    return context_tokens(config) + _SLACK_TOKENS + verified


def server_arguments(config: Config, device: str) -> dict[str, Any]:
    """SGLang's server arguments, by its names. `spec` refuses those that a user may not set. Raises MissingSecret."""
    engine, mtp = config.rollout.engine, config.mtp
    model = ModelConfig.load(config.model.path)
    arguments: dict[str, Any] = {
        "model_path": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "device": device,
        "dtype": model.engine_dtype(engine.dtype),
        "random_seed": config.seed,
        "max_running_requests": engine.slots,
        "context_length": _context_length(config),
        "tp_size": engine.tensor_parallel_size,
        "pp_size": engine.pipeline_parallel_size,
        "incremental_streaming_output": True,
        "enable_priority_scheduling": True,
        "schedule_low_priority_values_first": True,
        "enable_memory_saver": device == "cuda" and config.param_sync.kv == "unload",  # needed to free the KV cache
        "log_level": "error",
        "skip_server_warmup": True,  # its request might still run during the first sync
        "enable_fp32_lm_head": config.model.float32_head,
    }
    if mtp.enable_rollout:
        arguments |= {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": mtp.num_speculative_tokens,
            "speculative_eagle_topk": 1,  # a chain
            "speculative_num_draft_tokens": mtp.num_speculative_tokens + 1,  # and the token before them
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
        arguments["base_gpu_id"] = 1  # GPU 0 is this process's
    sync = config.param_sync
    if (sync.pause, sync.kv) == ("keep", "keep") and sync.in_flight != "finish":
        # With overlap, a pause leaves a step in flight. It would run while weights arrive, and its tokens, sampled from
        # the old weights, would be attributed to the new version. Only this pair needs it off: the others drain the
        # step, and requests that finish on their adapter do not change version.
        arguments["disable_overlap_schedule"] = True
    if device == "cpu":
        arguments |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            # a full context in every slot
            "max_total_tokens": engine.slots * _context_length(config),
            "mem_fraction_static": 0.2,  # of the machine's memory, if the cache had no bound
        }
    return arguments | revealed("rollout.engine.args", engine.args)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The arguments as SGLang's parser reads them. False and None are left out."""
    words: list[str] = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, (list, tuple)):
            words += [option, *map(str, value)]
        elif value is not None and value is not False:
            # one word, because a value may begin with a dash
            words.append(f"{option}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


def server_environment(config: Config, device: str) -> dict[str, str]:
    """Environment of the server's processes, in addition to this one's."""
    engine = config.rollout.engine
    wanted = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    wanted["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for the slack
    wanted["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"  # behaviour logprobs are after temperature
    if engine.delivery == "gloo":
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # the interface that this process joins the group on
    if device == "cpu" and sends_adapters(config):
        wanted[UNPINNED] = "1"
    if device == "cpu":
        # no binding: it would put the workers of all replicas on the same cores
        cores = "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * engine.tensor_parallel_size)
        wanted |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores}
        wanted["OMP_NUM_THREADS"] = str(engine.threads)
    return wanted


def sampling_parameters(request: Request, stream_interval: int) -> dict[str, Any]:
    s = request.sampling
    grammar = {} if s.grammar is None else {_GRAMMARS[s.grammar.kind]: s.grammar.text}
    return grammar | {
        "max_new_tokens": request.max_new_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k or -1,
        "min_p": s.min_p,
        "stop_token_ids": list(s.stop_token_ids) or None,
        "stop": list(s.stop_strings) or None,
        # would ignore the request's own stop tokens too; `stops` hides the model's
        "ignore_eos": not s.stop_token_ids,
        "stream_interval": stream_interval,
        "logit_bias": {str(token): bias for token, bias in s.logit_bias} or None,
    }


def lora_slots(config: Config) -> int:
    """Number of adapter slots: at least two, because SGLang never replaces an adapter in place."""
    return max(2, adapter_slots(config))


def context_tokens(config: Config) -> int:
    model = ModelConfig.load(config.model.path)
    return config.rollout.engine.max_context_tokens or model.max_position_embeddings
