"""Sampling parameters of training and validation, and the random keys of samples."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from asyncrl.config.schema import Config
from asyncrl.rollouter.engines.base import SamplingParams


def training_sampling(config: Config, stop_token_ids: Sequence[int]) -> SamplingParams:
    """From the whole vocabulary: behaviour logprobs are those of the distribution from which tokens were drawn."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        stop_token_ids=tuple(stop_token_ids),
        stop_strings=tuple(rollout.stop_strings),
    )


def validation_sampling(config: Config, stop_token_ids: Sequence[int]) -> SamplingParams:
    """Samples end as in training."""
    validation = config.validation
    return SamplingParams(
        temperature=validation.temperature,
        top_p=validation.top_p,
        top_k=validation.top_k,
        min_p=validation.min_p,
        stop_token_ids=tuple(stop_token_ids),
        stop_strings=tuple(config.rollout.stop_strings),
    )


def random_key(seed: int, uid: str, sample: int, attempt: int = 0) -> int:
    """63-bit key of one sample's random stream, equal in every process and run."""
    suffix = f"/{attempt}" if attempt else ""
    return xxhash.xxh3_64_intdigest(f"{seed}/{uid}/{sample}{suffix}".encode()) >> 1


def limits_digest(max_new_tokens: int | None, stop_strings: Sequence[str]) -> int:
    """64-bit digest of the limits that a call of ``generate`` brings of its own, equal in every process."""
    return xxhash.xxh3_64_intdigest(f"{max_new_tokens}/{list(stop_strings)}".encode())


def call_key(sample_key: int, context: int, ordinal: int) -> int:
    """63-bit key of one call of ``generate``: of its context (a digest), and its number among calls with equal ones."""
    return xxhash.xxh3_64_intdigest(f"{sample_key}/{context}/{ordinal}".encode()) >> 1
