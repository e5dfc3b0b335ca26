"""Sampling parameters of training and validation, and the random keys of samples."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from asyncrl.config.schema import Config
from asyncrl.rollouter.engines.base import SamplingParams


def training_sampling(config: Config, stop_token_ids: Sequence[int]) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=tuple(stop_token_ids),
        stop_strings=tuple(rollout.stop_strings),
    )


def validation_sampling(config: Config, stop_token_ids: Sequence[int]) -> SamplingParams:
    """Samples end as in training, but are drawn at ``validation.temperature`` from the whole vocabulary."""
    return SamplingParams(
        temperature=config.validation.temperature,
        stop_token_ids=tuple(stop_token_ids),
        stop_strings=tuple(config.rollout.stop_strings),
    )


def truncations(sampling: SamplingParams) -> list[str]:
    """The options that truncate the sampling distribution, as ``name=value``."""
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return [f"{name}={getattr(sampling, name)}" for name, value in off.items() if getattr(sampling, name) != value]


def random_key(seed: int, uid: str, sample: int, attempt: int = 0) -> int:
    """63-bit key of one sample's random stream, equal in every process and run."""
    suffix = f"/{attempt}" if attempt else ""
    return xxhash.xxh3_64_intdigest(f"{seed}/{uid}/{sample}{suffix}".encode()) >> 1


def call_key(sample_key: int, context: int, ordinal: int) -> int:
    """63-bit key of one call of ``generate``: of its context (a digest), and its number among calls with equal ones."""
    return xxhash.xxh3_64_intdigest(f"{sample_key}/{context}/{ordinal}".encode()) >> 1
