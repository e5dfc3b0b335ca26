"""Triton kernels of the head on a GPU: scores of logits, and their gradient, in one pass each.

Eager torch passes over float32 copies of [C, V] logits a dozen times, which takes as long as the head's products.
Here logits are read as the product leaves them, in bfloat16 or float32; everything else is float32.

Shape suffixes: C a chunk of rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # logits that a program holds at once
_WARPS = 8


def scores(logits_CV: Tensor, targets_C: Tensor, temperature: float, into_C: Sequence[Tensor]) -> None:
    """Fill four float32 [C]: log-probabilities of the targets and entropies of ``softmax(logits / temperature)``; and
    for `gradient`, the largest logits and the binary logarithms of Σ exp((logits − largest) / temperature). The
    log-probability of a target outside the vocabulary is NaN. A logit of −inf adds nothing to the entropy, which is NaN
    in the eager code."""
    assert logits_CV.stride(1) == 1
    assert _dense(targets_C, *into_C)
    with torch.cuda.device_of(logits_CV):  # else on the thread's current device
        _scores[(len(logits_CV),)](
            logits_CV, targets_C, *into_C, logits_CV.shape[1], logits_CV.stride(0), math.log2(math.e) / temperature,
            _BLOCK, num_warps=_WARPS,
        )  # fmt: skip


def gradient(
    logits_CV: Tensor,
    targets_C: Tensor,
    found_C: Sequence[Tensor],
    g_C: Tensor,
    e_C: Tensor | None,
    temperature: float,
    out_CV: Tensor,
) -> Tensor:
    """Fill ``out``, which may be the logits themselves, with their gradient, for the gradients ``g`` of the
    log-probabilities and ``e`` of the entropies (None: they have none). ``found``: what `scores` filled, but the
    log-probabilities. The formula is that of `asyncrl.models.chunked`."""
    e_C, entropy = (g_C, False) if e_C is None else (e_C, True)
    assert logits_CV.stride(1) == out_CV.stride(1) == 1
    assert _dense(targets_C, *found_C, g_C, e_C)
    rows, size = logits_CV.shape
    with torch.cuda.device_of(logits_CV):
        _gradient[(rows, triton.cdiv(size, _BLOCK))](
            logits_CV, targets_C, *found_C, g_C, e_C, out_CV, size, logits_CV.stride(0), out_CV.stride(0),
            math.log2(math.e) / temperature, 1 / temperature, entropy, _BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return out_CV


def _dense(*vectors_C: Tensor) -> bool:
    return all(vector.is_contiguous() for vector in vectors_C)


# Powers of two, as the hardware has them. Logits are taken from the largest before they are scaled: for large ones that
# is exact, while a scaled logit is rounded. A NaN among the logits reaches the sum, though not the maximum.
# A logit may be −inf, or so low that its power is. 2^−1e4 is zero all the same, and zero times it is no NaN. So the
# largest starts at the lowest finite number: the difference of two infinities would be a NaN.
# fmt: off
@triton.jit
def _scores(logits, targets, logprobs, entropies, largest, logs, size, stride, slope, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    start = logits + row * stride
    most = tl.maximum(tl.load(start).to(tl.float32), -3.4028234663852886e38)
    total = tl.zeros((BLOCK,), tl.float32)  # Σ p, and Σ p · log₂ p, of each lane up to the sum's factor
    weighted = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, size, BLOCK):
        inside = first + lane < size
        logit = tl.load(start + first + lane, inside, -float("inf")).to(tl.float32)
        new = tl.maximum(most, tl.max(logit))
        fall = tl.maximum((most - new) * slope, -1e4)
        fade = tl.exp2(fall)
        power = (logit - new) * slope
        power = tl.where(power < -1e4, -1e4, power)  # a NaN stays
        share = tl.exp2(power)
        weighted = (weighted + total * fall) * fade + share * power
        total = total * fade + share
        most = new
    norm = tl.sum(total)
    log = tl.log2(norm)
    target = tl.load(targets + row)
    logit = tl.load(start + target, (target >= 0) & (target < size), float("nan")).to(tl.float32)
    tl.store(logprobs + row, ((logit - most) * slope - log) * 0.6931471805599453)
    tl.store(entropies + row, (log - tl.sum(weighted) / norm) * 0.6931471805599453)
    tl.store(largest + row, most)
    tl.store(logs + row, log)


@triton.jit
def _gradient(
    logits, targets, entropies, largest, logs, g, e, out, size, stride, out_stride, slope, scale,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    logit = tl.load(logits + row * stride + column, inside, 0.0).to(tl.float32)
    power = (logit - tl.load(largest + row)) * slope - tl.load(logs + row)
    power = tl.where(power < -1e4, -1e4, power)
    hit = tl.load(g + row)
    factor = hit
    if ENTROPY:
        factor += tl.load(e + row) * (power * 0.6931471805599453 + tl.load(entropies + row))
    gradient = tl.where(column == tl.load(targets + row), hit, 0.0) - tl.exp2(power) * factor
    tl.store(out + row * out_stride + column, gradient * scale, inside)
# fmt: on
