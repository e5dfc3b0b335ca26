"""Checks of model, data, environments and import paths, before any actor starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
import xxhash

from asyncrl.config.checks import Derived
from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.config.secrets import missing_secrets
from asyncrl.data.load import RunPrompts, load_run_prompts
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import DataError
from asyncrl.models.checkpoint import check_checkpoint, without_draft
from asyncrl.models.config import CheckpointError, ModelConfig, text_part
from asyncrl.models.lora import linear_shapes_at
from asyncrl.models.overridden import FOLDER as OVERRIDDEN
from asyncrl.models.overridden import overridden
from asyncrl.param_sync.lora.adapters import adapter_spec
from asyncrl.param_sync.manifest import DTYPE_BYTES, ManifestError
from asyncrl.plugins.registry import UnknownPart
from asyncrl.rollouter.agents.base import find_agent_loop
from asyncrl.rollouter.engines.base import ENGINES
from asyncrl.rollouter.rewards.base import COLUMN
from asyncrl.rollouter.rewards.environment import unset_secrets
from asyncrl.rollouter.rewards.pool import RewardError, tried
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.run.checks import check
from asyncrl.run.environments import environment_problems
from asyncrl.run.machine import local_memory_bytes
from asyncrl.sandbox.service import sandbox_problem
from asyncrl.trainer.backends.base import BACKENDS
from asyncrl.types.prompts import Prompt

#: key of the prompts' fingerprint in the ledger; ledgers without it are of versions with another fingerprint
FINGERPRINT = "prompt_rows"
MEMORY_SHARE = 0.8  # of the machine's memory may be KV cache; weights, optimizer and Ray need the rest


@dataclass(frozen=True)
class Preflight:
    """Figures derived from config, model and data.

    ``context_tokens``: maximum of prompt and response together; ``max_prompt_tokens``: of the prompt alone.
    ``prompts_fingerprint``: equal for the same training prompts, with all their columns, in the same order."""

    derived: Derived
    model: ModelConfig
    tokenizer: PromptTokenizer
    context_tokens: int
    max_prompt_tokens: int
    train_prompts: int
    validation_prompts: int
    prompts_fingerprint: str


def preflight(config: Config, cpus: int | None, trains: bool = True) -> Preflight:
    """Raises ConfigError with one line per problem, each beginning with an option's key.

    ``cpus``: of the one machine that runs everything; None on a cluster. ``trains``: ranks will start, which need their
    environment."""
    derived = check(config, cpus)
    engine = ENGINES.find(config.rollout.engine.name)
    problems: list[str] = []
    model: ModelConfig | None = None
    backend = BACKENDS.find(config.trainer.backend)
    tokenizer: PromptTokenizer | None = None
    try:
        model = backend.check_model(config, config.model.path, config.mtp.init_from_trunk)
        if engine.native_decoder:
            check_checkpoint(config.model.path, config.mtp.init_from_trunk)
        tokenizer = PromptTokenizer.of(config)
    except CheckpointError as e:
        problems.append(f"model.path: {e}")
    problems += _draft_problems(config, model)
    problems += _lora_problems(config, model)
    if model:
        problems += backend.model_problems(config, text_part(model.raw))
    if cpus is not None:  # on a cluster, this machine needs neither
        problems += environment_problems(config, trains)
        problems += missing_secrets(config)
    problems += _reference_problems(config, model)
    prompts = RunPrompts([], [])
    try:
        prompts = load_run_prompts(config.data)
        # checks them
        PromptOrder(prompts.train, config.seed, mixture=config.data.mixture, curriculum=config.data.curriculum)
    except DataError as e:
        problems.append(str(e))
    problems += _reward_problems(config, cpus, [*prompts.train, *prompts.held_out])
    try:
        find_agent_loop(config.rollout.agent_loop, config.rollout.agent_loop_args)
    except UnknownPart as e:
        problems.append(str(e))
    context = config.rollout.engine.max_context_tokens or (model.max_position_embeddings if model else 0)
    if model and context > model.max_position_embeddings:
        problems.append(
            f"rollout.engine.max_context_tokens: {context} is more than the model's {model.max_position_embeddings}"
        )
    room = context - config.rollout.max_response_tokens
    if model and room < 1:
        problems.append(
            f"rollout.max_response_tokens: {config.rollout.max_response_tokens} leaves no room for a prompt in "
            f"a context of {context}"
        )
    elif model and config.data.max_prompt_tokens > room:
        problems.append(
            f"data.max_prompt_tokens: {config.data.max_prompt_tokens} is more than the {room} left beside a response"
        )
    if model and cpus is not None:
        replicas = max(config.rollout.replicas, config.rollout.autoscale.max)
        problems += filter(None, [memory_problem(config, model, context, replicas)])
    if problems or model is None or tokenizer is None:
        raise ConfigError(problems)
    return Preflight(
        derived=derived,
        model=model,
        tokenizer=tokenizer,
        context_tokens=context,
        max_prompt_tokens=config.data.max_prompt_tokens or room,
        train_prompts=len(prompts.train),
        validation_prompts=len(prompts.held_out),
        prompts_fingerprint=prompts_fingerprint(prompts.train),
    )


def with_overridden_model(config: Config, folder: Path) -> Config:
    """Config whose model.path is in ``folder``, the run's, with model.overrides applied; unchanged without overrides.
    Raises ConfigError."""
    if not config.model.overrides:
        return config
    try:
        made = overridden(config.model.path, config.model.overrides, folder.absolute() / OVERRIDDEN)
    except CheckpointError as e:
        raise ConfigError([str(e)]) from None
    return replace(config, model=replace(config.model, path=str(made)))


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = xxhash.xxh3_64()
    for prompt in prompts:
        row = [prompt.prompt_id, prompt.text, prompt.messages, prompt.answer, prompt.data_source]
        digest.update(json.dumps([*row, sorted(prompt.extra.items())], default=_json, skipkeys=True).encode())
    return f"{len(prompts)} prompts, {digest.hexdigest()}"


def _json(value: Any) -> str:
    """For a value that JSON has no form of: those of Parquet files, and objects of data sources, whose text may differ
    from process to process."""
    return repr(value) if isinstance(value, bytes | date | time | timedelta | Decimal) else type(value).__name__


def kv_cache_bytes(model: ModelConfig, slots: int, context_tokens: int, dtype: str, draft: bool = False) -> int:
    """Bytes of one replica's preallocated KV cache: keys and values of all layers, for every slot up to the end of the
    context; with ``draft`` also those of the MTP layers, and the hidden states that they read."""
    drafting = model.num_mtp_layers if draft else 0
    width = 2 * (model.num_layers + drafting) * model.num_kv_heads * model.head_dim + drafting * model.hidden_size
    return slots * context_tokens * width * DTYPE_BYTES[dtype]


def _draft_problems(config: Config, model: ModelConfig | None) -> list[str]:
    if model is None or model.num_mtp_layers:
        return []
    wanted = {"mtp.enable_train": config.mtp.enable_train, "mtp.enable_rollout": config.mtp.enable_rollout}
    return [f"{key}: {without_draft(config.model.path)}" for key, value in wanted.items() if value][:1]


def _lora_problems(config: Config, model: ModelConfig | None) -> list[str]:
    if model is None or not config.model.lora.rank:
        return []
    try:
        adapter_spec(config.model.lora, linear_shapes_at(config.model.path), model.dtype)
    except ManifestError as e:
        return [f"model.lora.target_modules: {e}"]
    return []


def _reference_problems(config: Config, policy: ModelConfig | None) -> list[str]:
    path = config.algorithm.reference_path
    if not path:
        return []
    try:
        reference = BACKENDS.find(config.trainer.backend).check_model(config, path, mtp_from_trunk=False)
    except CheckpointError as e:
        return [f"algorithm.reference_path: {e}"]
    if policy and reference.vocab_size != policy.vocab_size:
        return [
            f"algorithm.reference_path: {path} has a vocabulary of {reference.vocab_size}, the policy of "
            f"{policy.vocab_size}; their logprobs cannot be compared"
        ]
    return []


def _reward_problems(config: Config, cpus: int | None, prompts: Sequence[Prompt]) -> list[str]:
    """A reward function that does not load, tried in a worker: its code must not run where all secrets are. Or one that
    needs sandboxes where there are none, or columns that a prompt lacks."""
    if missing := unset_secrets(config.reward.secrets):
        # a cluster may set them where the rollouter runs, which checks too
        return [missing] if cpus is not None else []
    try:
        taken = tried(config.reward) if config.reward.has_function else frozenset()
    except RewardError as e:
        return [str(e)]
    if config.rollout.agent_loop == "single_turn" and not config.rollout.agent.enabled:  # else it may not be asked
        columns = {name.removeprefix(COLUMN) for name in taken if name.startswith(COLUMN)}
        for prompt in prompts:
            if lacking := columns - prompt.extra.keys():
                return [
                    f"reward.function: {config.reward.function} scores prompts with the columns "
                    f"{', '.join(sorted(columns))}; prompt {prompt.prompt_id} has no {', '.join(sorted(lacking))}"
                ]
    needed = "sandboxes" in taken or config.rollout.agent.sandbox
    if not needed or cpus is None:  # likewise
        return []
    return list(filter(None, [sandbox_problem(config.sandbox)]))


def memory_problem(config: Config, model: ModelConfig, context_tokens: int, replicas: int) -> str | None:
    """Whether KV caches of so many replicas exceed this machine's memory; those on a GPU do not count."""
    engine = config.rollout.engine
    if engine.device == "cuda" or (engine.device == "auto" and torch.cuda.is_available()):
        return None
    dtype = model.engine_dtype(engine.dtype)
    each = kv_cache_bytes(model, engine.slots, context_tokens, dtype, config.mtp.enable_rollout)
    memory = local_memory_bytes()
    if each * replicas <= MEMORY_SHARE * memory:
        return None
    return (
        f"rollout.engine.max_context_tokens: {replicas} × {engine.slots} slots of {context_tokens} tokens hold "
        f"{each * replicas / 2**30:.1f} GiB of KV cache, more than {MEMORY_SHARE:.0%} of this machine's "
        f"{memory / 2**30:.1f} GiB; lower it (0 is the model's own maximum), rollout.engine.slots or the replicas"
    )
