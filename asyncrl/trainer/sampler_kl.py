"""KL of each sampler's policy to the trainer's, measured in a train step's own forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.algorithms.ratios import MAX_LOG_RATIO
from asyncrl.models.device_copy import on_device
from asyncrl.trainer.backends.base import LossFunction, LossOutput, Outputs, TrainBatch
from asyncrl.trainer.mismatch import SamplerKL
from asyncrl.types.versions import Sampler

MAX_TOKEN_KL = 5.0  # nats; bounds a single token's share of the mean

_KL, _RATIO, _TOKENS = "sampler_kl", "sampler_ratio", "sampler_tokens"


def with_sampler_kl(loss: LossFunction, samplers: int, part: int = 0) -> LossFunction:
    """``loss`` with sums for each of the ``samplers`` of a part of the batch, which `take_sampler_kl` reads."""
    names = [_name(kind, part) for kind in (_KL, _RATIO, _TOKENS)]

    def measured(outputs: Outputs, batch: TrainBatch) -> LossOutput:
        output, logprobs = loss(outputs, batch), outputs["logprobs"]
        sampler = batch.columns["sampler"]
        counted = np.flatnonzero(batch.loss_mask & (sampler >= 0))
        device = logprobs.device
        behaviour = on_device(batch.columns["behaviour_logprobs"][counted], device)
        d = logprobs.detach()[on_device(counted, device)].float() - behaviour
        kl = (torch.expm1(d) - d).clamp(max=MAX_TOKEN_KL)
        ratio = d.clamp(max=MAX_LOG_RATIO).exp()
        sums = torch.zeros(3, samplers, dtype=torch.float64, device=device)
        sums.index_add_(1, on_device(sampler[counted], device), torch.stack([kl, ratio, torch.ones_like(kl)]).double())
        return dataclasses.replace(output, counts={**output.counts, **dict(zip(names, sums, strict=True))})

    return measured


def take_sampler_kl(figures: dict[str, float], parts: Sequence[Sequence[Sampler]]) -> list[SamplerKL]:
    """Remove the sums of `with_sampler_kl` from a train step's metrics. ``parts``: the samplers of each."""
    sums: dict[Sampler, np.ndarray] = {}
    for part, samplers in enumerate(parts):
        for i, sampler in enumerate(samplers):
            found = [figures.pop(f"{_name(kind, part)}/{i}", 0.0) for kind in (_KL, _RATIO, _TOKENS)]
            sums[sampler] = sums.get(sampler, 0.0) + np.array(found)
    return [
        SamplerKL(sampler, round(tokens), kl / tokens, ratio / tokens)
        for sampler, (kl, ratio, tokens) in sorted(sums.items())
        if tokens
    ]


def _name(kind: str, part: int) -> str:
    return f"{kind}/{part}"
