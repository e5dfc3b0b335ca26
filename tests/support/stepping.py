"""Steps the native engine's core by hand: requests in, their tokens and logprobs out."""

import numpy as np
import torch

from asyncrl.models.decoder import Decoder
from asyncrl.models.layout import PackedLayout
from asyncrl.rollouter.engines.base import Request, SamplingParams
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.types.samples import FinishReason


def make_request(id, tokens, new=12, *, key=0, group=None, shared=0, position=0, priority=0, **sampling) -> Request:
    tokens = np.asarray(tokens, dtype=np.int32)
    return Request(id, group or id, tokens, shared, key, position, new, SamplingParams(**sampling), priority)


def run_all(core: Core, requests=()) -> dict[str, tuple[list[int], np.ndarray, FinishReason]]:
    """Submit the requests, step until none is active, and return what `read` gives."""
    core.submit(requests)
    while core.active:
        core.step()
    return read(core.drain())


def full_forward(decoder: Decoder, request: Request, tokens: list[int]) -> np.ndarray:
    """Logprobs of ``tokens`` from one forward pass without a cache, on the decoder's device."""
    device = decoder.lm_head.weight.device
    row = torch.tensor([*request.tokens.tolist(), *tokens], device=device)
    with torch.no_grad():
        logits = decoder.logits(row, PackedLayout.from_lengths([len(row)], device)) / request.sampling.temperature
    drawn = logits.log_softmax(-1)[len(request.tokens) - 1 : -1].gather(1, torch.tensor(tokens, device=device)[:, None])
    return drawn.squeeze(1).cpu().numpy()


def read(events):
    """By request id: tokens, logprobs, finish reason (None: still running)."""
    collected = {}
    for e, id in enumerate(events.ids):
        part = slice(events.offsets[e], events.offsets[e + 1])
        tokens, logprobs, _ = collected.get(id, ([], np.empty(0, np.float32), None))
        collected[id] = (
            tokens + events.tokens[part].tolist(),
            np.concatenate([logprobs, events.logprobs[part]]),
            events.finish[e],
        )
    return collected
