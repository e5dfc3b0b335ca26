"""The learning rate as a function of the optimizer step."""

from __future__ import annotations

import math

from asyncrl.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int, position: int | None = None) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``total_steps``.

    Warmup is linear and never zero: step 0 takes lr / warmup_steps. Then ``constant`` holds the rate; ``linear`` and
    ``cosine`` decay to ``min_lr_ratio`` · lr at ``total_steps`` and hold that. ``position``: of the decay, if it is not
    ``step``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decaying = max((step if position is None else position) - config.warmup_steps, 0)
    done = min(decaying / max(total_steps - config.warmup_steps, 1), 1.0)
    if config.schedule == "constant":
        left = 1.0
    elif config.schedule == "linear":
        left = 1.0 - done
    else:
        left = (1.0 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)
