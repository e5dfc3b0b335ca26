"""Constraints between sections of a `Config`, and the figures derived from it.

Constraints within one section are in `asyncrl.config.schema`, those of an algorithm's items in
`asyncrl.config.algorithm_checks`, those of an engine, backend or transport in its spec. `asyncrl.run.checks.check`
applies all of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from asyncrl.config.schema import Config

_MAX_PARTS = 8  # of a batch; more would shorten the trainer's wait for the first one by little
_SAMPLES_PER_PART = 8  # at least
_SAMPLES_PER_PART_AND_RANK = 32  # at least, with several ranks


@dataclass(frozen=True)
class Derived:
    """Figures derived from a `Config`.

    ``groups_per_step``: groups that one train step consumes; ``parts``: those of each part of a batch, which the
    trainer begins as soon as they are finished. ``groups_per_version``: G of the admission formula.
    ``staleness_bound``: maximum age of a trained token, in versions. ``pause``: param_sync.pause with auto resolved.
    ``slots``: sum over all replicas."""

    groups_per_step: int
    parts: tuple[int, ...]
    groups_per_version: int
    staleness_threshold: Fraction
    staleness_bound: int
    total_groups: int
    pause: Literal["abort", "keep", "wait"]
    slots: int


def derive(config: Config) -> Derived:
    per_step = config.trainer.mini_batch_groups * config.async_training.require_batches
    threshold = Fraction(str(config.async_training.staleness_threshold))
    pause = config.param_sync.pause
    if pause == "auto":
        pause = "abort" if config.async_training.partial_rollout else "wait"
    return Derived(
        groups_per_step=per_step,
        parts=_parts(config, per_step) if threshold < 1 else (per_step,),  # else batches wait for the trainer
        groups_per_version=per_step * config.async_training.trigger_parameter_sync_step,
        staleness_threshold=threshold,
        staleness_bound=math.ceil(threshold),
        total_groups=per_step * config.trainer.total_steps,
        pause=pause,
        slots=config.rollout.engine.slots * config.rollout.replicas,
    )


def _parts(config: Config, groups: int) -> tuple[int, ...]:
    """Parts of equal size, up to one group, as many as leave each rank enough samples to fill its micro-batches, and to
    have about as much work as the others."""
    ranks = config.trainer.ranks
    least = _SAMPLES_PER_PART if ranks == 1 else _SAMPLES_PER_PART_AND_RANK * ranks
    count = groups * config.rollout.n // least
    count = min(max(count, 1), _MAX_PARTS, groups)
    return tuple((k + 1) * groups // count - k * groups // count for k in range(count))


def sends_adapters(config: Config) -> bool:
    """True if syncs send LoRA adapters as such instead of merging them into the weights."""
    return config.model.lora.rank > 0 and config.param_sync.adapters == "adapter"


def warm_kv_bytes(config: Config) -> int:
    """Limit of the memory in which the native engine keeps finished turns' KV: none where no other turn follows, nor in
    deterministic mode, since KV of decode steps differs in its bits from that of a prefill."""
    several = config.rollout.agent.enabled or config.rollout.agent_loop != "single_turn"
    used = several and not config.rollout.engine.deterministic
    return config.rollout.engine.warm_kv_mb << 20 if used else 0


def problems(config: Config, cpus: int | None) -> Iterator[str]:
    """One line per violated constraint. ``cpus``: of the one machine that runs everything; None on a cluster, where
    placement decides."""
    yield from constraints(config)
    yield from _checkpoint_problems(config)
    yield from _file_problems(config)
    if cpus is not None:
        yield from _cpu_problems(config, cpus)


def constraints(config: Config) -> Iterator[str]:
    """Those of `problems` that neither machine nor files nor the length of a run decide."""
    yield from _sync_problems(config)
    yield from _lora_problems(config)
    yield from _speculation_problems(config)
    if config.rollout.shards > 1 and config.data.curriculum.by:
        yield (
            "rollout.shards: a curriculum draws each prompt by all earlier answers, which no single shard has; "
            f"expected 1, found {config.rollout.shards}"
        )


def _sync_problems(c: Config) -> Iterator[str]:
    if c.param_sync.pause in ("abort", "keep") and not c.async_training.partial_rollout:
        yield (
            f"param_sync.pause: {c.param_sync.pause} leaves samples that span versions, but "
            "async_training.partial_rollout is false; use wait (or auto)"
        )
    if c.param_sync.in_flight == "finish":
        if (sends_adapters(c), c.param_sync.pause, c.param_sync.kv) != (True, "keep", "keep"):
            yield (
                "param_sync.in_flight: requests can finish on their own adapter if adapters are synced and requests "
                "keep their KV cache; expected move, or model.lora with param_sync.adapters=adapter, "
                "param_sync.pause=keep and param_sync.kv=keep"
            )
        if c.async_training.overdue != "wait":
            yield (
                "param_sync.in_flight: the number of adapters in use is bounded only if no group outlives its "
                f"deadline; expected move, or async_training.overdue=wait, found {c.async_training.overdue}"
            )


def _lora_problems(c: Config) -> Iterator[str]:
    """Preflight checks that the target modules exist in the model."""
    exports_adapter = c.checkpoint.export_hf != "none" and c.checkpoint.export_lora == "adapter"
    if c.model.lora.rank and c.mtp.enable_train and exports_adapter:
        yield "checkpoint.export_lora: PEFT's format cannot hold the draft of mtp.enable_train; expected merged"


def _speculation_problems(c: Config) -> Iterator[str]:
    drafted, context = c.mtp.num_speculative_tokens, c.rollout.engine.max_context_tokens
    if c.mtp.enable_rollout and context and drafted > context - 2:
        yield (
            f"mtp.num_speculative_tokens: expected at most {max(context - 2, 0)}, as a context of {context} tokens "
            f"(rollout.engine.max_context_tokens) also holds a prompt and a token; found {drafted}"
        )


def _checkpoint_problems(c: Config) -> Iterator[str]:
    """A validation metric rates a checkpoint only if it was measured on the checkpoint's own weights."""
    if c.checkpoint.keep_last == 1:
        yield "checkpoint.keep_last: expected at least 2, as one may be damaged, or 0 for all; found 1"
    if not c.checkpoint.keep_best or not c.checkpoint.best_metric.startswith("validation/"):
        return
    saves = c.checkpoint.every_steps
    validates = c.async_training.trigger_parameter_sync_step * c.validation.every_versions
    if not (c.data.validates and saves and validates) or math.lcm(saves, validates) >= c.trainer.total_steps:
        yield (
            f"checkpoint.keep_best: no checkpoint but the last would have a {c.checkpoint.best_metric}: expected "
            "held-out prompts, and a step before trainer.total_steps that is a multiple of checkpoint.every_steps "
            "and of validation.every_versions · async_training.trigger_parameter_sync_step; or another best_metric"
        )


def _file_problems(c: Config) -> Iterator[str]:
    if not os.path.isfile(Path(c.model.path) / "config.json"):
        yield (
            f"model.path: no checkpoint at {c.model.path} (expected a folder with config.json); "
            "`python -m asyncrl.models.make_checkpoint --out DIR` makes a small one"
        )
    if c.algorithm.reference_path and not os.path.isfile(Path(c.algorithm.reference_path) / "config.json"):
        yield (
            f"algorithm.reference_path: no checkpoint at {c.algorithm.reference_path} (expected a folder with "
            "config.json)"
        )
    if not (c.data.train_files or c.data.source):
        yield "data.train_files: expected at least one JSONL or Parquet file, or data.source; found none"
    for key in ("train_files", "validation_files"):
        for file in getattr(c.data, key):
            if not os.path.isfile(file):
                yield f"data.{key}: no such file: {file}"


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


def gpus_per_replica(config: Config) -> int:
    """GPUs of the engine's workers; with ``delivery: nccl`` one more for the replica's own process, as NCCL refuses two
    members on one GPU."""
    engine = config.rollout.engine
    workers = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    return workers + (engine.delivery == "nccl")
