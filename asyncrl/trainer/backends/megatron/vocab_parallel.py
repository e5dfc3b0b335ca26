"""Log-probabilities, entropies and draft losses from a vocabulary-parallel head, a chunk of rows at a time.

Computes the same as `asyncrl.models.chunked`. Every rank of the group has the same rows, and gets the same results and
gradients. Rows of the head that pad the vocabulary to an even division enter no sum. Shape suffixes: R rows, C a chunk
of them, M hidden size, W this rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.models.chunked import SumOverRows, head_logits


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's slice ``first``:``end`` of the vocabulary; its head may have padding rows beyond. ``group``: all
    ranks that share the vocabulary. ``float32``: see `asyncrl.models.chunked.head_logits`."""

    first: int
    end: int
    group: dist.ProcessGroup
    float32: bool = False

    @classmethod
    def of(cls, vocab_size: int, rows: int, group: dist.ProcessGroup, float32: bool = False) -> VocabularyPart:
        """The part of a rank whose head has ``rows`` rows, like every head of the group."""
        first = min(dist.get_rank(group) * rows, vocab_size)
        return cls(first, min(first + rows, vocab_size), group, float32)

    def sum(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the group, in place."""
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def place(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(row of the head, whether this rank has it) for each token; row 0 if it does not."""
        here = (tokens >= self.first) & (tokens < self.end)
        return (tokens - self.first).where(here, 0), here

    def logits(self, hidden_CM: Tensor, weight_WM: Tensor, temperature: float) -> Tensor:
        """float32 [C, W], divided by the temperature."""
        logits_CW = head_logits(hidden_CM.to(weight_WM.dtype), weight_WM[: self.end - self.first], self.float32)
        return logits_CW.div_(temperature) if temperature != 1.0 else logits_CW


@dataclass(frozen=True)
class _Chunk:
    """``p_CW``: probabilities; ``log_sum_C``: log-sum-exp of all logits; ``target_C``: the target's logit; ``mean_C``:
    the mean logit under p."""

    p_CW: Tensor
    logits_CW: Tensor
    log_sum_C: Tensor
    target_C: Tensor
    mean_C: Tensor


def _chunk(part: VocabularyPart, hidden_CM: Tensor, weight: Tensor, targets_C: Tensor, temperature: float) -> _Chunk:
    logits_CW = part.logits(hidden_CM, weight, temperature)
    some = logits_CW.shape[1] > 0  # else this rank has only padding
    highest_C = logits_CW.amax(1) if some else logits_CW.new_full((len(targets_C),), -torch.inf)
    part.sum(highest_C, dist.ReduceOp.MAX)
    e_CW = (logits_CW - highest_C[:, None]).exp_()
    row_C, here_C = part.place(targets_C)
    target_C = (logits_CW.gather(1, row_C[:, None]).squeeze(1) if some else highest_C).where(here_C, 0)
    sums = part.sum(torch.stack([e_CW.sum(1), (e_CW * logits_CW).sum(1), target_C]))
    p_CW = e_CW.div_(sums[0, :, None])
    return _Chunk(p_CW, logits_CW, sums[0].log() + highest_C, sums[2], sums[1] / sums[0])


class VocabParallelScores(torch.autograd.Function):
    """Log-probabilities and entropies, float32 [R] each. With z the scaled logits, p the softmax, H the entropy and
    g, e the gradients of logprob and entropy: dz = g · (onehot − p) − e · p · (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, part: VocabularyPart, temperature: float, chunk: int
    ) -> Any:
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        for lo in range(0, len(targets), chunk):
            rows = slice(lo, lo + chunk)
            found = _chunk(part, hidden[rows], weight, targets[rows], temperature)
            logprobs[rows] = found.target_C - found.log_sum_C
            entropy[rows] = found.log_sum_C - found.mean_C
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.part, ctx.temperature, ctx.chunk = part, temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, g: Tensor, e: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, targets, entropy = ctx.saved_tensors
        part: VocabularyPart = ctx.part
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        tokens = slice(part.end - part.first)
        for lo in range(0, len(targets), ctx.chunk):
            rows = slice(lo, lo + ctx.chunk)
            found = _chunk(part, hidden[rows], weight, targets[rows], ctx.temperature)
            log_p_CW = found.logits_CW - found.log_sum_C[:, None]
            dz_CW = -g[rows, None] * found.p_CW - e[rows, None] * found.p_CW * (log_p_CW + entropy[rows, None])
            dz_CW = _of_logits(part, dz_CW, targets[rows], g[rows], ctx.temperature, weight.dtype)
            d_hidden[rows] = dz_CW @ weight[tokens]
            if d_weight is not None:
                d_weight[tokens] += dz_CW.t() @ hidden[rows].to(weight.dtype)
        part.sum(d_hidden)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None, None


class _Gradients:
    """Gradients that `SumOverRows` saves, accumulated by chunk from the gradient of the logits, [C, W]."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor, part: VocabularyPart) -> None:
        self._hidden, self._weight, self._part = hidden, weight, part
        self._d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        self._d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None

    def add(self, rows: slice, dz_CW: Tensor) -> None:
        tokens = slice(self._part.end - self._part.first)
        if self._d_hidden is not None:
            self._d_hidden[rows] = dz_CW @ self._weight[tokens]
        if self._d_weight is not None:
            self._d_weight[tokens] += dz_CW.t() @ self._hidden[rows].to(self._weight.dtype)

    def save(self, ctx: Any) -> None:
        ctx.save_for_backward(None if self._d_hidden is None else self._part.sum(self._d_hidden), self._d_weight)
        ctx.weight_dtype = self._weight.dtype


class VocabParallelCrossEntropy(SumOverRows):
    """Sum over rows of −log softmax(z)[target], and number of targets that are the likeliest token; float32 scalars."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, part: VocabularyPart, temperature: float, chunk: int
    ) -> Any:
        loss, hits = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
        gradients = _Gradients(ctx, hidden, weight, part)
        for lo in range(0, len(targets), chunk):
            rows = slice(lo, lo + chunk)
            found = _chunk(part, hidden[rows], weight, targets[rows], temperature)
            loss += (found.log_sum_C - found.target_C).sum()
            hits += _likeliest(part, found)
            ones = torch.ones_like(found.target_C)
            gradients.add(rows, _of_logits(part, found.p_CW, targets[rows], -ones, temperature, weight.dtype))
        gradients.save(ctx)
        ctx.mark_non_differentiable(hits)
        return loss, hits


class VocabParallelAcceptance(SumOverRows):
    """Sum over rows of −log α, and number of ``targets`` that are the draft's likeliest token; float32 scalars. For α,
    its gradient and ``target_hidden`` see `asyncrl.models.chunked.ChunkedAcceptance`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target_hidden: Tensor,
        targets: Tensor,
        part: VocabularyPart,
        temperature: float,
        chunk: int,
    ) -> Any:
        loss, hits = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
        gradients = _Gradients(ctx, hidden, weight, part)
        for lo in range(0, len(targets), chunk):
            rows = slice(lo, lo + chunk)
            draft = _chunk(part, hidden[rows], weight, targets[rows], temperature)
            hits += _likeliest(part, draft)
            q_CW, p_CW = draft.p_CW, _chunk(part, target_hidden[rows], weight, targets[rows], temperature).p_CW
            below_CW = q_CW < p_CW
            sums = part.sum(torch.stack([p_CW.minimum(q_CW).sum(1), (q_CW * below_CW).sum(1)]))
            overlap_C1, under_C1 = sums[0, :, None].clamp(min=torch.finfo(torch.float32).tiny), sums[1, :, None]
            loss -= overlap_C1.log().sum()
            dz_CW = q_CW.mul_(under_C1 - below_CW.float()).div_(overlap_C1 * temperature)
            gradients.add(rows, dz_CW.to(weight.dtype))
        gradients.save(ctx)
        ctx.mark_non_differentiable(hits)
        return loss, hits


def _likeliest(part: VocabularyPart, found: _Chunk) -> Tensor:
    """Number of targets with the highest logit."""
    likelier_C = part.sum((found.logits_CW > found.target_C[:, None]).sum(1))
    return (likelier_C == 0).sum()


def _of_logits(
    part: VocabularyPart,
    dz_CW: Tensor,
    targets_C: Tensor,
    at_target_C: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits from that of the scaled ones, with ``at_target_C`` added in the targets' columns. Modifies
    ``dz_CW``."""
    row_C, here_C = part.place(targets_C)
    if dz_CW.shape[1]:
        dz_CW.scatter_add_(1, row_C[:, None], (at_target_C * here_C)[:, None])
    return dz_CW.div_(temperature).to(dtype)
