"""What the values of a `Config` must fulfil, and what follows from them: decided before any actor starts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from asyncrl.config.load import ConfigError, known_keys
from asyncrl.config.schema import Config, MegatronConfig

_NATIVE_PAUSE_KV = frozenset(
    {
        ("abort", "recompute"),
        ("abort", "unload"),
        ("keep", "keep"),
        ("keep", "recompute"),
        ("wait", "keep"),
        ("wait", "recompute"),
        ("wait", "unload"),
    }
)
#: engine → the (pause, kv) pairs of a sync that it can do, see `asyncrl.rollouter.engine.Capabilities`
PAUSE_KV = {
    "native": _NATIVE_PAUSE_KV,
    "vllm": _NATIVE_PAUSE_KV | {("abort", "keep")},  # its prefix cache is keyed by version
    "sglang": _NATIVE_PAUSE_KV | {("abort", "keep")},  # so is its
}

#: engines that take LoRA adapters; the others take merged weights
TAKES_ADAPTERS = frozenset({"native", "vllm", "sglang"})
_VLLM_MAX_LORA_RANK = 512

#: what `asyncrl.trainer.algorithms` knows; no leaf may import it
ALGORITHMS = ("grpo",)

CHOICES = {
    "rollout.engine.name": tuple(PAUSE_KV),
    "rollout.engine.dtype": ("auto", "float32", "bfloat16"),
    "rollout.engine.device": ("auto", "cpu", "cuda"),
    "rollout.engine.cpu_priority": ("normal", "low", "idle"),
    "rollout.engine.delivery": ("memory", "gloo", "nccl"),
    "trainer.backend": ("torch", "megatron"),
    "model.bridge": ("megatron_bridge", "mbridge"),
    "trainer.mixed_precision": ("no", "bfloat16"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.optimizer.schedule": ("constant", "linear", "cosine"),
    "mtp.loss": ("acceptance", "cross_entropy"),
    "algorithm.name": ALGORITHMS,
    "algorithm.loss_aggregation": ("token_mean", "sequence_mean"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "algorithm.overlong": ("keep", "mask", "penalize"),
    "param_sync.transport": ("auto", "cuda_ipc", "nccl", "shared_memory", "gloo"),
    "param_sync.staging": ("bucket", "full"),
    "param_sync.rollout_update": ("all_at_once", "rolling"),
    "param_sync.pause": ("auto", "abort", "keep", "wait"),
    "param_sync.kv": ("keep", "recompute", "unload"),
    "param_sync.adapters": ("adapter", "merged"),
    "param_sync.in_flight": ("move", "finish"),
    "async_training.queue_policy": ("fifo", "ready_first"),
    "async_training.overdue": ("wait", "mask", "drop"),
    "checkpoint.best_is": ("highest", "lowest"),
    "checkpoint.export_hf": ("none", "final", "all"),
    "checkpoint.export_lora": ("adapter", "merged"),
    "ray.trainer_strategy": ("pack", "spread", "strict_pack", "strict_spread"),
    "ray.rollout_strategy": ("auto", "pack", "spread", "strict_pack", "strict_spread"),
    "reporting.log_level": ("debug", "info", "warning", "error"),
    "reporting.wandb.mode": ("offline", "online", "disabled"),
}

_AT_LEAST = {
    "seed": 0,
    "model.lora.rank": 0,
    "reporting.prometheus.port": 0,
    "reporting.wandb.table_every_steps": 0,
    "data.epochs": 0,
    "data.max_prompt_tokens": 0,
    "rollout.n": 1,
    "rollout.min_group_size": 1,
    "rollout.replicas": 1,
    "rollout.max_response_tokens": 1,
    "rollout.top_k": 0,
    "rollout.engine.slots": 1,
    "rollout.engine.max_context_tokens": 0,
    "rollout.engine.prefill_chunk_tokens": 1,
    "rollout.engine.threads": 1,
    "rollout.engine.tensor_parallel_size": 1,
    "rollout.engine.pipeline_parallel_size": 1,
    "rollout.engine.data_parallel_size": 1,
    "rollout.max_concurrent_groups": 0,
    "rollout.max_consecutive_drops": 1,
    "reward.workers": 1,
    "trainer.ranks": 1,
    "trainer.total_steps": 1,
    "trainer.mini_batch_groups": 1,
    "trainer.max_tokens_per_micro_batch": 1,
    "trainer.logprob_chunk_tokens": 1,
    "trainer.threads": 1,
    "trainer.megatron.tensor_model_parallel_size": 1,
    "trainer.megatron.pipeline_model_parallel_size": 1,
    "trainer.megatron.virtual_pipeline_model_parallel_size": 1,
    "trainer.megatron.context_parallel_size": 1,
    "trainer.megatron.expert_model_parallel_size": 1,
    "trainer.optimizer.lr": 0,
    "trainer.optimizer.weight_decay": 0,
    "trainer.optimizer.warmup_steps": 0,
    "trainer.optimizer.min_lr_ratio": 0,
    "trainer.optimizer.grad_clip": 0,
    "algorithm.epochs": 1,
    "algorithm.clip_low": 0,
    "algorithm.clip_high": 0,
    "algorithm.importance_cap": 0,
    "algorithm.kl_coef": 0,
    "async_training.staleness_threshold": 0,
    "async_training.trigger_parameter_sync_step": 1,
    "async_training.require_batches": 1,
    "mtp.loss_scaling_factor": 0,
    "mtp.learning_rate": 0,
    "mtp.passes": 1,
    "mtp.updates_per_pass": 0,
    "mtp.num_speculative_tokens": 1,
    "param_sync.bucket_bytes": 0,
    "validation.every_versions": 0,
    "validation.samples": 1,
    "validation.temperature": 0,
    "validation.max_prompts": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.keep_last": 0,
    "checkpoint.keep_best": 0,
    "supervision.max_restarts": 0,
    "supervision.backoff_s": 0,
    "supervision.max_backoff_s": 0,
    "reporting.console_every_s": 0,
    "reporting.trajectories_per_step": 0,
}

_POSITIVE = [
    "model.lora.alpha",
    "rollout.snapshot_every_s",
    "reward.timeout_s",
    "trainer.optimizer.eps",
    "ray.cpus_per_rank",
    "ray.cpus_per_replica",
    "ray.placement_timeout_s",
    "supervision.window_s",
    "supervision.progress_s",
    "supervision.answer_s",
    *(key for key in known_keys() if key.startswith("param_sync.deadlines.")),
]


@dataclass(frozen=True)
class Derived:
    """Figures that follow from a Config, in one place.

    ``groups_per_step``: what one train step consumes. ``groups_per_version``: G of the admission formula.
    ``staleness_bound``: no trained token is older by more versions than this. ``pause``: with auto resolved."""

    groups_per_step: int
    groups_per_version: int
    staleness_threshold: Fraction
    staleness_bound: int
    total_groups: int
    pause: str
    slots: int


def derive(config: Config) -> Derived:
    per_step = config.trainer.mini_batch_groups * config.async_training.require_batches
    threshold = Fraction(str(config.async_training.staleness_threshold))
    pause = config.param_sync.pause
    if pause == "auto":
        pause = "abort" if config.async_training.partial_rollout else "wait"
    return Derived(
        groups_per_step=per_step,
        groups_per_version=per_step * config.async_training.trigger_parameter_sync_step,
        staleness_threshold=threshold,
        staleness_bound=math.ceil(threshold),
        total_groups=per_step * config.trainer.total_steps,
        pause=pause,
        slots=config.rollout.engine.slots * config.rollout.replicas,
    )


def check(config: Config, cpus: int | None = None) -> Derived:
    """Raise ConfigError with every problem found, else return the derived figures.

    ``cpus``: those of the machine that is to run everything; None when the run joins a cluster (placement judges)."""
    problems = list(_problems(config, cpus))
    if problems:
        raise ConfigError(problems)
    return derive(config)


def local_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_memory_bytes() -> int:
    """Memory that this machine has, or the container's limit where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def _problems(c: Config, cpus: int | None) -> Iterator[str]:
    if not_numbers := list(_not_finite(c)):  # comparisons and formulas say nothing sensible of these
        yield from not_numbers
        return
    for key, choices in CHOICES.items():
        if (value := _get(c, key)) not in choices:
            yield f"{key}: expected one of {', '.join(choices)}; found {value!r}"
    for key, least in _AT_LEAST.items():
        if (value := _get(c, key)) < least:
            yield f"{key}: expected at least {least}, found {value}"
    for key in _POSITIVE:
        if (value := _get(c, key)) <= 0:
            yield f"{key}: expected more than 0{' seconds' if key.endswith('_s') else ''}, found {value}"
    if not c.name.strip() or "/" in c.name or c.name in (".", ".."):
        yield f"name: expected a word that can name a folder, found {c.name!r}"
    yield from _rollout_problems(c)
    yield from _speculation_problems(c)
    yield from _megatron_problems(c)
    yield from _lora_problems(c)
    yield from _engine_problems(c)
    yield from _file_problems(c)
    yield from _draft_training_problems(c)
    for key in ("reward.function", "rollout.agent_loop"):
        if str(_get(c, key)).count(":") != 1:
            yield f"{key}: expected an import path package.module:name, found {_get(c, key)!r}"
    if not (c.param_sync.reload_draft or c.param_sync.allow_stale_draft):
        yield (
            "param_sync.reload_draft: a draft that stays behind the policy loses acceptance step by step; expected "
            "true, or with param_sync.allow_stale_draft=true, to measure it, false"
        )
    if 0 < c.param_sync.bucket_bytes < 4096:
        yield f"param_sync.bucket_bytes: expected 0 or at least 4096, found {c.param_sync.bucket_bytes}"
    if c.param_sync.rollout_update == "rolling" and c.param_sync.staging != "full":
        yield (
            f"param_sync.rollout_update: rolling replicas load from a copy on their host; expected param_sync.staging "
            f"full, found {c.param_sync.staging}"
        )
    pause = c.param_sync.pause
    if pause != "auto" and pause in ("abort", "keep") and not c.async_training.partial_rollout:
        yield (
            f"param_sync.pause: {pause} leaves samples that span versions, but async_training.partial_rollout is "
            "false; use wait (or auto)"
        )
    if pause == "auto":
        pause = "abort" if c.async_training.partial_rollout else "wait"
    legal = PAUSE_KV.get(c.rollout.engine.name)
    known = all(getattr(c.param_sync, key) in CHOICES[f"param_sync.{key}"] for key in ("pause", "kv"))
    if known and legal is not None and (pause, c.param_sync.kv) not in legal:
        fitting = ", ".join(kv for kv in CHOICES["param_sync.kv"] if (pause, kv) in legal)
        yield (
            f"param_sync.kv: {c.param_sync.kv} does not go with pause {pause} in the {c.rollout.engine.name} engine; "
            f"expected one of {fitting}"
        )
    if cpus is not None:
        yield from _cpu_problems(c, cpus)


def _not_finite(c: Config) -> Iterator[str]:
    for key, kind in known_keys().items():
        if kind in (float, list[float]):
            value = _get(c, key)
            if not all(map(math.isfinite, [value] if kind is float else value)):
                yield f"{key}: expected {'a finite number' if kind is float else 'finite numbers'}, found {value}"


def _rollout_problems(c: Config) -> Iterator[str]:
    r, a = c.rollout, c.algorithm
    if not 0 < r.top_p <= 1:
        yield f"rollout.top_p: expected 0 < top_p ≤ 1, found {r.top_p}"
    if not 0 <= r.min_p < 1:
        yield f"rollout.min_p: expected 0 ≤ min_p < 1, found {r.min_p}"
    if r.temperature <= 0:
        yield f"rollout.temperature: expected more than 0 (training samples must be drawn), found {r.temperature}"
    if r.min_group_size > r.n:
        yield f"rollout.min_group_size: expected at most rollout.n = {r.n}, found {r.min_group_size}"
    if a.name == "grpo" and r.n < 2:
        yield f"rollout.n: grpo compares the samples of a group and needs at least 2, found {r.n}"
    if not 0 <= a.clip_low < 1:
        yield f"algorithm.clip_low: expected 0 ≤ clip_low < 1, found {a.clip_low}"
    betas = c.trainer.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"trainer.optimizer.betas: expected two numbers, 0 ≤ beta < 1, found {betas}"
    if "" in r.stop_strings:
        yield f"rollout.stop_strings: expected texts, found an empty one (it is in every response): {r.stop_strings}"
    need = c.trainer.mini_batch_groups * c.async_training.require_batches * r.min_group_size
    copies = c.trainer.ranks // ranks_per_copy(c)
    if need < copies:
        yield f"trainer.ranks: a step of at least {need} samples cannot feed {copies} ranks that share them out"


def ranks_per_copy(config: Config) -> int:
    """Trainer ranks that hold one copy of the model together, and train on the same sequences."""
    cut = config.trainer.megatron
    one = cut.tensor_model_parallel_size * cut.pipeline_model_parallel_size * cut.context_parallel_size
    return max(one, 1) if config.trainer.backend == "megatron" else 1


def _megatron_problems(c: Config) -> Iterator[str]:
    t, cut = c.trainer, c.trainer.megatron
    if t.backend != "megatron":
        if cut != MegatronConfig():
            yield f"trainer.megatron: cuts the model of trainer.backend=megatron, found trainer.backend={t.backend}"
        if c.model.bridge != "megatron_bridge":
            yield f"model.bridge: {c.model.bridge} is for trainer.backend=megatron, found trainer.backend={t.backend}"
        return
    if t.ranks % ranks_per_copy(c):
        yield (
            f"trainer.ranks: expected a multiple of the {ranks_per_copy(c)} ranks that hold one copy of the model "
            f"(tensor {cut.tensor_model_parallel_size} × pipeline {cut.pipeline_model_parallel_size} × context "
            f"{cut.context_parallel_size}), found {t.ranks}"
        )
    sharing = t.ranks // max(cut.pipeline_model_parallel_size, 1)
    if sharing % max(cut.expert_model_parallel_size, 1):
        yield (
            f"trainer.megatron.expert_model_parallel_size: expected a divisor of the {sharing} ranks of a pipeline "
            f"stage, which share the experts, found {cut.expert_model_parallel_size}"
        )
    if cut.sequence_parallel and cut.tensor_model_parallel_size == 1:
        yield (
            "trainer.megatron.sequence_parallel: it is for tensor parallel ranks; expected false with "
            "trainer.megatron.tensor_model_parallel_size=1"
        )
    virtual, stages = cut.virtual_pipeline_model_parallel_size, cut.pipeline_model_parallel_size
    if virtual > 1 and stages < 3:  # of two stages each is before and after the other: their messages would be mixed up
        yield (
            f"trainer.megatron.virtual_pipeline_model_parallel_size: {virtual} chunks per stage need "
            f"trainer.megatron.pipeline_model_parallel_size of at least 3, found {stages}"
        )
    if t.cpu_offload:
        yield "trainer.cpu_offload: expected false; the Megatron backend has trainer.megatron.param_offload and others"


def sends_adapters(config: Config) -> bool:
    """Whether LoRA is on, and its adapters are sent as such: not in merged weights."""
    return config.model.lora.rank > 0 and config.param_sync.adapters == "adapter"


def _lora_problems(c: Config) -> Iterator[str]:
    """Whether the targets are modules of the model is for `asyncrl.preflight` to see."""
    lora, engine = c.model.lora, c.rollout.engine
    if c.param_sync.in_flight == "finish":
        found = (engine.name in ("vllm", "sglang"), sends_adapters(c), c.param_sync.pause, c.param_sync.kv)
        if found != (True, True, "keep", "keep"):
            yield (
                "param_sync.in_flight: requests can finish on their own adapter where vllm or sglang takes adapters "
                "and keeps requests with their KV; expected move, or model.lora, rollout.engine.name=vllm or sglang, "
                "param_sync.pause=keep and param_sync.kv=keep"
            )
        if c.async_training.overdue != "wait":
            yield (
                f"param_sync.in_flight: how many adapters are in use is bounded where no group outstays its deadline; "
                f"expected move, or async_training.overdue=wait, found {c.async_training.overdue}"
            )
    if not lora.rank:
        return
    if not lora.target_modules:
        yield "model.lora.target_modules: expected all-linear or ends of module names such as q_proj, found none"
    if sends_adapters(c):
        if engine.name not in TAKES_ADAPTERS:
            yield f"param_sync.adapters: the {engine.name} engine takes no adapters; expected merged"
        elif engine.name == "vllm" and engine.pipeline_parallel_size > 1:
            yield "param_sync.adapters: vllm's pipeline stages are not given adapters; expected merged"
        elif engine.name == "sglang" and c.param_sync.pause == "keep" and c.param_sync.in_flight != "finish":
            yield (
                "param_sync.in_flight: sglang cannot move a request to another adapter; expected finish with "
                "param_sync.pause=keep, or another pause, or param_sync.adapters=merged"
            )
        elif engine.name == "sglang" and engine.delivery != "memory":
            yield (
                f"rollout.engine.delivery: sglang's server takes adapters from memory alone; expected memory, or "
                f"param_sync.adapters=merged, found {engine.delivery}"
            )
        elif engine.name == "vllm" and lora.rank > _VLLM_MAX_LORA_RANK:
            yield f"model.lora.rank: vllm's adapters have at most {_VLLM_MAX_LORA_RANK}, found {lora.rank}"
    exports = c.checkpoint.export_hf != "none" and c.checkpoint.export_lora == "adapter"
    if c.mtp.enable_train and exports:
        yield "checkpoint.export_lora: PEFT's format has no place for the draft of mtp.enable_train; expected merged"


def _speculation_problems(c: Config) -> Iterator[str]:
    if not c.mtp.enable_rollout:
        return
    if c.rollout.engine.deterministic:
        yield (
            "mtp.enable_rollout: does not go with rollout.engine.deterministic, as how many drafted tokens hold "
            "decides which shapes are computed; expected one of the two to be false"
        )
    drafted, context = c.mtp.num_speculative_tokens, c.rollout.engine.max_context_tokens
    if context and drafted > context - 2:
        yield (
            f"mtp.num_speculative_tokens: expected at most {max(context - 2, 0)}, as a context of {context} tokens "
            f"(rollout.engine.max_context_tokens) holds a prompt and a token beside them; found {drafted}"
        )


def _engine_problems(c: Config) -> Iterator[str]:
    """What one engine offers and another does not."""
    engine, name = c.rollout.engine, c.rollout.engine.name
    if name == "native":
        for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(engine, key) > 1:
                yield f"rollout.engine.{key}: the native engine has one device per replica; expected 1, or vllm"
        if engine.args:
            yield f"rollout.engine.args: the native engine takes none beside its options, found {sorted(engine.args)}"
    if name in ("vllm", "sglang"):
        if engine.deterministic:
            yield f"rollout.engine.deterministic: {name}'s results depend on what else is in the batch; expected native"
        if c.param_sync.staging == "full":
            does = "workers do nothing else while they receive" if name == "vllm" else "server keeps no copy"
            yield f"param_sync.staging: {name}'s {does}; expected bucket, found full"
        if c.rollout.top_p < 1 or c.rollout.top_k or c.rollout.min_p:
            yield (
                f"rollout.top_p: with top_p, top_k or min_p {name} tells the logprobs of what they leave, training "
                "needs those of the whole vocabulary; expected top_p=1, top_k=0 and min_p=0, or the native engine"
            )
        if c.mtp.init_from_trunk and c.mtp.enable_rollout:
            yield (
                f"mtp.init_from_trunk: {name} reads the draft's layers from the checkpoint, which has none then; "
                "expected false, or a checkpoint into which the draft was exported"
            )
    if engine.delivery != "memory" and name != "sglang":
        yield f"rollout.engine.delivery: {name} has no server to give weights on to; expected memory"
    if engine.delivery == "nccl" and engine.device == "cpu":
        yield "rollout.engine.delivery: nccl joins GPUs; expected memory or gloo, or rollout.engine.device=cuda"
    if name == "sglang" and engine.device == "cpu" and c.mtp.enable_rollout:
        yield (
            "mtp.enable_rollout: sglang's speculation on the CPU takes the likeliest token whatever the temperature; "
            "expected false, or rollout.engine.device=cuda"
        )
    if name == "vllm" and engine.data_parallel_size > engine.slots:
        yield (
            f"rollout.engine.data_parallel_size: expected at most one copy of the model for each of the replica's "
            f"{engine.slots} slots (rollout.engine.slots), found {engine.data_parallel_size}"
        )
    if name == "sglang" and engine.data_parallel_size > 1:
        yield (
            "rollout.engine.data_parallel_size: sglang takes no weights where its copies are apart; expected 1 and "
            f"more rollout.replicas, found {engine.data_parallel_size}"
        )
    if name == "sglang" and engine.pipeline_parallel_size > 1:
        yield (
            "rollout.engine.pipeline_parallel_size: sglang gives all stages one handle to what a sync brings, which "
            f"can be opened once; expected 1, found {engine.pipeline_parallel_size}"
        )


def _file_problems(c: Config) -> Iterator[str]:
    if not (Path(c.model.path) / "config.json").is_file():
        yield (
            f"model.path: no checkpoint at {c.model.path} (expected a folder with config.json); "
            "`python -m asyncrl.models.make_checkpoint --out DIR` makes a small one"
        )
    if c.algorithm.reference_path and not (Path(c.algorithm.reference_path) / "config.json").is_file():
        yield f"algorithm.reference_path: no checkpoint at {c.algorithm.reference_path}"
    if not c.data.train_files:
        yield "data.train_files: expected at least one JSONL or Parquet file, found none"
    for key in ("train_files", "validation_files"):
        for file in getattr(c.data, key):
            if not Path(file).is_file():
                yield f"data.{key}: no such file: {file}"


def _draft_training_problems(c: Config) -> Iterator[str]:
    if c.mtp.enable_train and c.mtp.loss_scaling_factor == 0:
        yield "mtp.loss_scaling_factor: 0 trains no draft; expected more than 0, or mtp.enable_train=false"
    for key, found in (("passes", c.mtp.passes), ("updates_per_pass", c.mtp.updates_per_pass)):
        if found > 1 and not c.mtp.detach_encoder:
            yield (
                f"mtp.{key}: {found} does not go with mtp.detach_encoder=false, where the draft learns in the one step "
                "of the trunk; expected 1, or mtp.detach_encoder=true"
            )
    if c.mtp.init_from_trunk and not (c.mtp.enable_train or c.mtp.enable_rollout):
        yield (
            "mtp.init_from_trunk: makes a draft that nothing would use; expected mtp.enable_train=true or "
            "mtp.enable_rollout=true beside it"
        )


def _cpu_problems(c: Config, cpus: int) -> Iterator[str]:
    ranks, replicas = c.trainer.ranks * c.ray.cpus_per_rank, c.rollout.replicas * c.ray.cpus_per_replica
    if ranks > cpus:
        yield (
            f"trainer.ranks: {c.trainer.ranks} ranks of {c.ray.cpus_per_rank:g} CPUs need {ranks:g}, this machine has "
            f"{cpus}; use fewer ranks or a smaller ray.cpus_per_rank"
        )
    elif ranks + replicas > cpus:
        yield (
            f"rollout.replicas: {ranks:g} CPUs of ranks and {replicas:g} of replicas are more than this machine's "
            f"{cpus}; use fewer of them, or smaller ray.cpus_per_rank and ray.cpus_per_replica"
        )


def _get(config: Config, key: str):  # type: ignore[no-untyped-def]
    value = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
