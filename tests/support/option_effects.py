"""Which option of an algorithm changes what: alternatives of each that must give different gradients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from asyncrl.algorithms.rewards import FilterOptions
from asyncrl.config.schema import AlgorithmConfig, Config, RolloutConfig
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.batches import shape_rewards, tokens_of_sequences
from asyncrl.trainer.objective import Objective

PROXIMAL = {"anchor": "proximal"}
TIS, MIS, REJECT = ({**PROXIMAL, "corrections": [name]} for name in ("tis", "mis", "reject"))
KL = {"kl_coef": 0.1}
LEVELS = ("token", "sequence", "geometric")

#: option of the loss → (other options, value); each of these must give another gradient
CHANGES_THE_GRADIENT: dict[str, list[tuple[dict[str, Any], Any]]] = {
    "advantage": [({}, name) for name in ("grpo", "rloo", "reinforce_pp", "pass_at_k")],
    "surrogate": [({}, name) for name in ("clip", "gspo", "cispo", "sapo")],
    "anchor": [({}, "behaviour"), ({}, "proximal"), ({}, "loglinear")],
    "corrections": [
        ({**PROXIMAL, "reject_level": "token", "reject_low": 0.9}, names)
        for names in ([], ["tis"], ["mis"], ["reject"], ["tis", "reject"])
    ],
    "normalize_by_std": [({}, True), ({}, False)],
    "std_ddof": [({}, 1), ({}, 0)],
    "group_baseline": [({"advantage": "reinforce_pp"}, False), ({"advantage": "reinforce_pp"}, True)],
    "clip_low": [({}, 0.2), ({}, 0.9)],
    "clip_high": [({}, 0.2), ({}, 9.0)],
    "dual_clip": [({"clip_high": 0.05}, 0.0), ({"clip_high": 0.05}, 1.1)],
    "sapo_tau_positive": [({"surrogate": "sapo"}, 1.0), ({"surrogate": "sapo"}, 0.5)],
    "sapo_tau_negative": [({"surrogate": "sapo"}, 1.05), ({"surrogate": "sapo"}, 2.0)],
    "tis_cap": [(TIS, 1.1), (TIS, 2.0)],
    "tis_level": [(TIS, level) for level in LEVELS],
    "mis_low": [(MIS, 0.0), (MIS, 0.9)],
    "mis_high": [(MIS, 1.1), (MIS, 9.0)],
    "mis_level": [(MIS, level) for level in LEVELS],
    "reject_low": [({**REJECT, "reject_level": "token"}, 0.0), ({**REJECT, "reject_level": "token"}, 0.9)],
    "reject_high": [({**REJECT, "reject_level": "token"}, 1.1), ({**REJECT, "reject_level": "token"}, 9.0)],
    "reject_level": [({**REJECT, "reject_low": 0.75, "reject_high": 1.35}, level) for level in LEVELS],
    "loss_aggregation": [({}, how) for how in ("token_mean", "sequence_mean", "sample_mean", "constant")],
    "denominators": [({"overlong": "mask"}, "owned"), ({"overlong": "mask"}, "trained")],
    "kl_coef": [({}, 0.0), ({}, 0.1)],
    "kl_estimator": [({**KL, "kl_unbiased": True}, "k1"), (KL, "k2"), (KL, "k3")],
    "kl_unbiased": [(KL, False), (KL, True)],
    "kl_reward_coef": [({}, 0.0), ({}, 0.1)],
    "entropy_coef": [({}, 0.0), ({}, 0.1)],
    "entropy_target": [({"entropy_coef": 0.1}, 0.0), ({"entropy_coef": 0.1}, 0.01), ({"entropy_coef": 0.1}, 9.0)],
    "entropy_step": [({"entropy_target": 9.0}, 0.005), ({"entropy_target": 9.0}, 0.5)],
    "overlong": [({}, "keep"), ({}, "mask"), ({}, "penalize")],
    "overlong_buffer": [({"overlong": "penalize"}, 0), ({"overlong": "penalize"}, 40)],
    "length_penalty": [({}, 0.0), ({}, 0.5)],
    "overlong_penalty": [({"overlong": "penalize"}, 0.5), ({"overlong": "penalize"}, 2.0)],
}
#: options that select passes and groups, and those of items from elsewhere
NOT_OF_THE_LOSS = {"args", "epochs", "reference_path", *(f.name for f in dataclasses.fields(FilterOptions))}


def gradient(
    config: AlgorithmConfig,
    batch: TrainBatch,
    logprobs: np.ndarray,
    entropy: np.ndarray,
    max_tokens: int,
    version: float,
) -> np.ndarray:
    """float32 [2, R]: of the loss of a whole batch with its columns of logprobs, with respect to logprobs and entropy.
    ``version``: position of the weights in versions. The train step before had the same entropy."""
    batch = dataclasses.replace(batch, columns=dict(batch.columns))
    batch = shape_rewards(batch, config, max_tokens)
    objective = Objective(Config(algorithm=config, rollout=RolloutConfig(max_response_tokens=max_tokens)))
    shares = objective.prepare(batch, version)
    objective.entropy.observe(float(entropy[batch.loss_mask].mean()))
    x, h = (torch.tensor(values, dtype=torch.float32, requires_grad=True) for values in (logprobs, entropy))
    (objective.loss({"logprobs": x, "entropy": h}, batch).loss / shares.sum()).backward()
    return torch.stack([x.grad, torch.zeros_like(x) if h.grad is None else h.grad]).numpy()


def effects(option: str, gradient_of: Callable[[AlgorithmConfig], np.ndarray]) -> list[float]:
    """The difference that each pair of an option's alternatives makes: the largest of any element, relative to the
    largest element."""
    found = [
        gradient_of(AlgorithmConfig(**{**others, option: value})) for others, value in CHANGES_THE_GRADIENT[option]
    ]
    largest = max(np.abs(one).max() for one in found)
    return [float(np.abs(one - other).max() / largest) for one, other in itertools.combinations(found, 2)]


def random_batch(seed: int = 0) -> tuple[TrainBatch, np.ndarray, np.ndarray]:
    """A stale batch, current logprobs and entropies: two groups of three samples, two of which have two sequences."""
    rng = np.random.default_rng(seed)
    lengths = np.array([4, 2, 5, 3, 6, 2, 3, 4])
    size, row_offsets = int(lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])
    behaviour = rng.uniform(-3, -0.1, size)
    proximal, reference, current = (np.minimum(behaviour + rng.normal(0, 0.5, size), 0) for _ in range(3))
    batch = TrainBatch(
        tokens=np.zeros(size + 8, np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths + 1)]),
        rows=np.arange(size),
        targets=np.zeros(size, np.int32),
        row_offsets=row_offsets,
        loss_mask=rng.random(size) > 0.1,
        columns={
            "behaviour_logprobs": behaviour.astype(np.float32),
            "proximal_logprobs": proximal.astype(np.float32),
            "reference_logprobs": reference.astype(np.float32),
            "version": rng.integers(0, 4, size).astype(np.int32),
            "token_rewards": np.zeros(size, np.float32),
        },
        sequence_columns={
            "group": np.array([0, 0, 0, 0, 1, 1, 1, 1]),
            "sample": np.array([0, 0, 1, 2, 3, 4, 5, 5]),
            "rewards": np.array([0, 0, 1, 3, 1, 0, 0.5, 0.5], np.float32),
            "finish": np.array([0, 0, 0, 1, 0, 0, 0, 0], np.uint8),
        },
    )
    batch.sequence_columns["owned"] = tokens_of_sequences(batch, batch.loss_mask)
    return batch, current, rng.uniform(0, 2, size)
