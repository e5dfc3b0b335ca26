"""Options that may change when a run is resumed; queued groups and checkpoints depend on all others."""

from __future__ import annotations

import dataclasses
from operator import attrgetter

from asyncrl.config.options import known_keys
from asyncrl.config.schema import Config

#: options, and groups of options (with a final dot), that may differ in a resumed run
MAY_CHANGE = (
    "name",
    "model.implementation",
    "model.attention",
    "model.float32_head",
    "run_dir",
    "journal_dir",
    "data.validation_files",
    "data.epochs",
    "rollout.replicas",
    "rollout.autoscale.",
    "rollout.shards",
    "rollout.max_concurrent_groups",
    "rollout.max_consecutive_drops",
    "rollout.max_attempts",
    "rollout.agent_timeout_s",
    "rollout.agent.python",
    "rollout.agent.secrets",
    "rollout.agent.processes",
    "rollout.agent.memory_mb",
    "rollout.agent.unresponsive_s",
    "rollout.agent.retries",
    "rollout.agent.host",
    "rollout.agent.port",
    "rollout.pacing",
    "rollout.snapshot_every_s",
    "rollout.engine.",
    "reward.workers",
    "reward.secrets",
    "reward.timeout_s",
    "reward.memory_mb",
    "reward.file_mb",
    "sandbox.",  # where code runs, and within which limits
    "trainer.",  # ranks, batch size, steps, optimizer, precision
    "algorithm.",
    "async_training.",
    "mtp.loss",
    "mtp.loss_scaling_factor",
    "mtp.detach_encoder",
    "mtp.learning_rate",
    "mtp.passes",
    "mtp.updates_per_pass",
    "mtp.enable_rollout",
    "mtp.num_speculative_tokens",
    "mtp.guard",
    "param_sync.",
    "validation.",
    "checkpoint.",
    "supervision.",
    "reporting.",
    "ray.",
)
#: exceptions within those groups
MUST_STAY = ("trainer.backend", "rollout.engine.deterministic", "algorithm.reference_path")


def may_change(key: str) -> bool:
    listed = any(key == option or (option.endswith(".") and key.startswith(option)) for option in MAY_CHANGE)
    return listed and key not in MUST_STAY


def refused_changes(before: Config, now: Config) -> list[str]:
    """One line per changed option that must stay: queued groups depend on prompts, rewards, sampling and model."""
    return [
        f"{key}: the run to resume has {attrgetter(key)(before)!r}, found {attrgetter(key)(now)!r}; resume with the "
        "former, or start a new run in another run_dir"
        for key in leaves()
        if not may_change(key) and attrgetter(key)(before) != attrgetter(key)(now)
    ]


def leaves() -> list[str]:
    """The dotted key of every option."""
    return [key for key, kind in known_keys().items() if not dataclasses.is_dataclass(kind)]
