"""Drives the native engine's core without asyncio, for several benchmarks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from asyncrl.models.config import DecoderConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engines.base import Request
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.rollouter.engines.native.speculation import Speculation
from asyncrl.types.versions import PolicyVersion

SLOTS, CONTEXT_TOKENS = 32, 256


def load_model(
    folder: str | Path, context_tokens: int = CONTEXT_TOKENS, dtype: str = "float32", device: str = "cpu"
) -> NativeModel:
    """Load a checkpoint. ``dtype``: a value of `rollout.engine.dtype`."""
    config = DecoderConfig.load(folder)
    model = NativeModel(config, context_tokens, getattr(torch, config.engine_dtype(dtype)), device)
    model.load(folder)
    return model


def make_core(
    model: NativeModel,
    k: int,
    recorder: Recorder,
    slots: int = SLOTS,
    context_tokens: int = CONTEXT_TOKENS,
    guard: bool = False,
) -> Core:
    """A started core that drafts ``k`` tokens in every step (0: no speculation), or with ``guard`` at most so many."""
    speculation = Speculation(k, guard) if k else None
    core = Core(
        model,
        slots=slots,
        context_tokens=context_tokens,
        prefill_chunk_tokens=512,
        recorder=recorder,
        speculation=speculation,
    )
    core.start(PolicyVersion(0, 0))
    return core


@torch.inference_mode()
def generate(core: Core, requests: Sequence[Request]) -> tuple[dict[str, tuple[list[int], list[float]]], float]:
    """Tokens and logprobs by request, and the seconds taken."""
    core.submit(requests)
    began = time.perf_counter()
    while core.active:
        core.step()
    seconds = time.perf_counter() - began
    events = core.drain()
    responses: dict[str, tuple[list[int], list[float]]] = {r.id: ([], []) for r in requests}
    for e, name in enumerate(events.ids):
        part = slice(events.offsets[e], events.offsets[e + 1])
        responses[name][0].extend(events.tokens[part].tolist())
        responses[name][1].extend(events.logprobs[part].tolist())
    return responses, seconds
