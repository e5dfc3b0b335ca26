"""Which options may change when a run is resumed, and which would make what it holds mean something else."""

from __future__ import annotations

from asyncrl.config.load import known_keys
from asyncrl.config.schema import Config

#: options, or groups of them (ending with a dot), that a resumed run may have other values of
MAY_CHANGE = (
    "name",
    "run_dir",
    "journal_dir",
    "data.validation_files",
    "data.epochs",
    "rollout.replicas",
    "rollout.max_concurrent_groups",
    "rollout.max_consecutive_drops",
    "rollout.pacing",
    "rollout.snapshot_every_s",
    "rollout.engine.",
    "reward.workers",
    "reward.timeout_s",
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
#: and these of the groups above may not
MUST_STAY = ("trainer.backend", "rollout.engine.deterministic", "algorithm.reference_path")


def may_change(key: str) -> bool:
    listed = any(key == option or (option.endswith(".") and key.startswith(option)) for option in MAY_CHANGE)
    return listed and key not in MUST_STAY


def refused_changes(before: Config, now: Config) -> list[str]:
    """One line for each option that differs and must not: prompts, rewards, sampling and model of what is queued."""
    return [
        f"{key}: the run to resume has {_get(before, key)!r}, found {_get(now, key)!r}; resume with the former, or "
        "start a new run in another run_dir"
        for key in leaves()
        if not may_change(key) and _get(before, key) != _get(now, key)
    ]


def leaves() -> list[str]:
    """The dotted path of every option that has a value of its own."""
    keys = list(known_keys())
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


def _get(config: Config, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
