"""Sampling of tokens: counter-based random numbers, exact filters, inverse CDF.

Pure functions of values. Shape suffixes: N rows (slots), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.rollouter.engines.base import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 64  # tokens per block of the two-level search
_BELOW_ONE = 1.0 - 2.0**-24  # the largest uniform; x · _BELOW_ONE < x for every positive float32 x


def _mix(z: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer on uint64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(key: int, position: int, count: int, purpose: int = 0) -> np.ndarray:
    """float32 [count] in [0, 1): uniforms for tokens ``position`` … ``position + count - 1`` of ``key``.

    Depends only on (key, position, purpose); 24 random bits. Each purpose has its own stream; 0 draws the token itself.
    The key is mixed first, so that keys which differ by a multiple of the counter's stride do not share a stream.
    """
    stream = _mix(np.array([key & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
    if purpose:
        stream = _mix(stream + np.uint64(purpose))
    counter = np.arange(position + 1, position + 1 + count, dtype=np.uint64)
    return (_mix(stream + counter * _GOLDEN) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


class SamplingColumns(NamedTuple):
    """Sampling parameters of N rows. A column without effect is None, which is the fast path.

    ``temperature`` float32 [N, 1] (1 where greedy), ``greedy`` bool [N], ``filters`` (top_k int64 [N, 1], top_p float64
    [N, 1], min_p float32 [N, 1]). ``all_greedy``: True if all rows are greedy, known without a device sync.
    ``biases``, B of them in all rows: (rows int64 [B], tokens int64 [B], what is added to their logits float32 [B])."""

    temperature: Tensor | None
    greedy: Tensor | None
    filters: tuple[Tensor, Tensor, Tensor] | None
    all_greedy: bool
    biases: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, rows: Sequence[SamplingParams | None], device: torch.device | str = "cpu") -> SamplingColumns:
        """Columns for these rows. None: a row whose token is not read."""
        params = [row or SamplingParams() for row in rows]

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        temperature = greedy = filters = biases = None
        if any(p.temperature not in (0.0, 1.0) for p in params):
            temperature = column([p.temperature or 1.0 for p in params], torch.float32)
        if any(p.temperature == 0.0 for p in params):
            greedy = column([p.temperature == 0.0 for p in params], torch.bool).squeeze(1)
        if any(p.temperature and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0) for p in params):
            filters = (
                column([p.top_k for p in params], torch.int64),
                column([p.top_p for p in params], torch.float64),
                column([p.min_p for p in params], torch.float32),
            )
        if added := [(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias]:
            rows_B, tokens_B, values_B = zip(*added)
            biases = (
                torch.tensor(rows_B, device=device),
                torch.tensor(tokens_B, device=device),
                torch.tensor(values_B, dtype=torch.float32, device=device),
            )
        return cls(temperature, greedy, filters, all(p.temperature == 0.0 for p in params), biases)

    @property
    def kind(self) -> tuple[bool, ...]:
        """Which columns have an effect."""
        return *(column is not None for column in self[:3]), self.all_greedy, self.biases is not None

    def tensors(self) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], SamplingColumns]]:
        """The columns without biases, and a function that makes the same of other tensors in their place."""
        scaled, mixed = self.temperature is not None, self.greedy is not None
        own = [column for column in (self.temperature, self.greedy, *(self.filters or ())) if column is not None]

        def rebuilt(others: Sequence[Tensor]) -> SamplingColumns:
            left = list(others)
            temperature = left.pop(0) if scaled else None
            greedy = left.pop(0) if mixed else None
            filters = None if self.filters is None else (left[0], left[1], left[2])
            return SamplingColumns(temperature, greedy, filters, self.all_greedy)

        return own, rebuilt

    def repeated(self, times: int) -> SamplingColumns:
        """Each row repeated ``times`` times, consecutively. Without biases: steps that have any do not draft."""

        def repeat(column: Tensor | None) -> Tensor | None:
            return None if column is None else column.repeat_interleave(times, 0)

        filters = None if self.filters is None else tuple(c.repeat_interleave(times, 0) for c in self.filters)
        return SamplingColumns(repeat(self.temperature), repeat(self.greedy), filters, self.all_greedy)  # type: ignore[arg-type]


class TokenMasks(NamedTuple):
    """Tokens that G of the rows may draw; the others may draw any. ``rows`` int64 [G]; ``words`` int32 [G, W]: bit b of
    word w for token 32 · w + b."""

    rows: Tensor
    words: Tensor

    def apply(self, logits_NV: Tensor) -> Tensor:
        """A copy in which the logits of all other tokens are −∞."""
        bits_GW32 = self.words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=self.words.device)
        allowed_GV = (bits_GW32 & 1).bool().flatten(1)[:, : logits_NV.shape[1]]
        masked_GV = logits_NV.index_select(0, self.rows).masked_fill(~allowed_GV, -torch.inf)
        return logits_NV.index_copy(0, self.rows, masked_GV)


def sample(
    logits_NV: Tensor,
    columns: SamplingColumns,
    uniforms_N: Tensor,
    masks: TokenMasks | None = None,
    alike: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: (tokens int64 [N], behaviour logprobs float32 [N]).

    The logprob is that of ``softmax(logits / temperature)`` over the full vocabulary, whatever the filters remove. A
    greedy row reports it at temperature 1. Biases and masks change the logits before all else, so the logprob is of the
    changed distribution. ``alike``: a row's bits never depend on other rows' parameters; slower on a GPU.
    """
    plain = columns.filters is None and columns.biases is None and masks is None
    if logits_NV.is_cuda and plain and not alike:
        from asyncrl.rollouter.engines.native import fused  # triton comes with torch for GPUs only

        return fused.draw(logits_NV, columns.temperature, columns.greedy, uniforms_N)
    scaled_NV = logits_NV.float()
    if columns.biases is not None:
        rows_B, tokens_B, values_B = columns.biases
        scaled_NV = scaled_NV.index_put((rows_B, tokens_B), values_B, accumulate=True)
    if masks is not None:
        scaled_NV = masks.apply(scaled_NV)
    if columns.temperature is not None:
        scaled_NV = scaled_NV / columns.temperature
    probs_NV = torch.softmax(scaled_NV, -1)
    kept_NV = probs_NV if columns.filters is None else keep_likely(probs_NV, *columns.filters)
    tokens_N1 = inverse_cdf(kept_NV, uniforms_N.unsqueeze(1))
    if columns.greedy is not None:
        tokens_N1 = torch.where(columns.greedy.unsqueeze(1), scaled_NV.argmax(-1, keepdim=True), tokens_N1)
    return tokens_N1.squeeze(1), probs_NV.gather(1, tokens_N1).log_().squeeze(1)


def distributions(logits_NV: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    """Two distributions [N, V]: softmax(logits / temperature), whose logarithm is the behaviour logprob; and the one
    that `sample` draws from: filtered and renormalised, or all on the most likely token of a greedy row."""
    scaled_NV = logits_NV.float()
    if columns.temperature is not None:
        scaled_NV = scaled_NV / columns.temperature
    probs_NV = drawn_NV = torch.softmax(scaled_NV, -1)
    if columns.filters is not None:
        kept_NV = keep_likely(probs_NV, *columns.filters)
        drawn_NV = kept_NV.div_(kept_NV.sum(-1, keepdim=True))
    if columns.greedy is not None:
        one_NV = torch.zeros_like(probs_NV).scatter_(1, scaled_NV.argmax(-1, keepdim=True), 1.0)
        drawn_NV = one_NV if columns.all_greedy else one_NV.where(columns.greedy.unsqueeze(1), drawn_NV)
    return probs_NV, drawn_NV


def keep_likely(probs_NV: Tensor, top_k_N1: Tensor, top_p_N1: Tensor, min_p_N1: Tensor) -> Tensor:
    """``probs`` with zeros for tokens that the filters remove, not renormalised.

    min-p keeps tokens of at least min_p times the largest probability, top-k those at least as likely as the k-th. Of
    the rest, renormalised, top-p keeps the smallest set of most likely tokens (ties: lower id first) that reaches
    top_p. This is vLLM's order.
    """
    size = probs_NV.shape[-1]
    kept_NV = probs_NV.masked_fill(probs_NV < min_p_N1 * probs_NV.amax(-1, keepdim=True), 0.0)
    ordered_NV, order_NV = kept_NV.sort(dim=-1, descending=True, stable=True)
    last_N1 = torch.where((top_k_N1 > 0) & (top_k_N1 < size), top_k_N1, size) - 1
    ordered_NV = ordered_NV.masked_fill(ordered_NV < ordered_NV.gather(1, last_N1), 0.0)
    reached_NV = ordered_NV.double().cumsum(-1)  # float32 sums over a large vocabulary are too coarse
    enough_NV = (reached_NV - ordered_NV >= top_p_N1 * reached_NV[:, -1:]) & (top_p_N1 < 1.0)
    return torch.zeros_like(probs_NV).scatter_(1, order_NV, ordered_NV.masked_fill_(enough_NV, 0.0))


def inverse_cdf(weights_NV: Tensor, uniforms_N1: Tensor) -> Tensor:
    """int64 [N, 1]: the first token whose cumulative weight exceeds u · total. Its weight is never zero.

    A large vocabulary is searched in two levels, blocks then tokens: sums are several times cheaper than running sums,
    and no long running sum is rounded in float32. ``torch.multinomial`` costs more than the head.
    """
    size = weights_NV.shape[-1]
    if size <= 16 * _BLOCK:
        cdf_NV = _running_sum(weights_NV)
        # clamp: only for rows of NaN, here and below
        return torch.searchsorted(cdf_NV, cdf_NV[:, -1:] * uniforms_N1, right=True).clamp_(max=size - 1)
    if size % _BLOCK:
        weights_NV = F.pad(weights_NV, (0, -size % _BLOCK))
    blocks_NXB = weights_NV.unflatten(1, (-1, _BLOCK))
    block_N1, rest_N1 = _search(_running_sum(blocks_NXB.sum(-1)), uniforms_N1)
    chosen_NB = blocks_NXB.gather(1, block_N1.unsqueeze(2).expand(-1, 1, _BLOCK)).squeeze(1)
    cdf_NB = _running_sum(chosen_NB)
    # the block's sum may be rounded differently here: stay below it
    rest_N1 = torch.minimum(rest_N1, cdf_NB[:, -1:] * _BELOW_ONE)
    inner_N1 = torch.searchsorted(cdf_NB, rest_N1, right=True)
    return (block_N1 * _BLOCK + inner_N1).clamp_(max=size - 1)  # the last block is padded


def _running_sum(weights_NX: Tensor) -> Tensor:
    """Cumulative sum along the last dimension. float64 on CUDA, where each place sums in another order: in float32,
    rounding would move the sum up or down between tokens of zero weight, and one of them could be drawn."""
    return weights_NX.cumsum(-1, dtype=torch.float64 if weights_NX.is_cuda else None)


def _search(cdf_NX: Tensor, uniforms_N1: Tensor) -> tuple[Tensor, Tensor]:
    """(index [N, 1] of the first entry above u · total, u · total minus the entry before it [N, 1]).

    The clamp is only for rows of NaN; the core rejects their tokens by the logprob."""
    target_N1 = cdf_NX[:, -1:] * uniforms_N1
    index_N1 = torch.searchsorted(cdf_NX, target_N1, right=True).clamp_(max=cdf_NX.shape[-1] - 1)
    before_N1 = cdf_NX.gather(1, (index_N1 - 1).clamp_(min=0)).mul_(index_N1 > 0)
    return index_N1, target_N1.sub_(before_N1)
