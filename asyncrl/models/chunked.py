"""Log-probabilities, entropies and draft losses from the head, a chunk of rows at a time, with their gradients.

Shape suffixes: R rows, C a chunk of them, M hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_HEAD_ROWS = 256


class ChunkedScores(torch.autograd.Function):
    """Log-probabilities and entropies of ``softmax(hidden @ W.T / temperature)`` without ever holding [R, V].
    ``float32``: see `head_logits`.

    Both passes go over chunks of rows; the backward pass recomputes the chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, float32: bool = False
    ) -> Any:
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        for lo in range(0, len(targets), chunk):
            rows = slice(lo, lo + chunk)
            logp_CV = _log_softmax(hidden[rows], weight, temperature, float32)
            logprobs[rows], entropy[rows] = _scores(logp_CV, targets[rows])
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature, ctx.chunk, ctx.float32 = temperature, chunk, float32
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, g: Tensor, e: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, targets, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for lo in range(0, len(targets), ctx.chunk):
            rows = slice(lo, lo + ctx.chunk)
            logp_CV = _log_softmax(hidden[rows], weight, ctx.temperature, ctx.float32)
            dz_CV = _logits_gradient(logp_CV, targets[rows], entropy[rows], g[rows], e[rows])
            dz_CV = dz_CV.div_(ctx.temperature).to(weight.dtype)
            d_hidden[rows] = dz_CV @ weight
            if d_weight is not None:
                d_weight += dz_CV.t() @ hidden[rows]
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None, None


class TargetScores(torch.autograd.Function):
    """Log-probabilities of targets [C], and entropies, of ``softmax(logits / temperature)`` for logits [C, V]."""

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, targets: Tensor, temperature: float) -> Any:
        logp_CV = torch.log_softmax(logits_CV / temperature if temperature != 1.0 else logits_CV, -1)
        logprobs, entropy = _scores(logp_CV, targets)
        ctx.save_for_backward(logp_CV, targets, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, g: Tensor, e: Tensor) -> Any:  # type: ignore[override]
        logp_CV, targets, entropy = ctx.saved_tensors
        return _logits_gradient(logp_CV, targets, entropy, g, e).div_(ctx.temperature), None, None


class SumOverRows(torch.autograd.Function):
    """A sum over rows whose forward pass also computes the gradient for ``hidden`` [R, M] and ``weight`` [V, M].

    The gradient of a sum is known up to a factor when the sum is, so each chunk's logits are computed only once."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        d_hidden, d_weight = ctx.saved_tensors
        return (
            None if d_hidden is None else d_hidden * g.to(d_hidden.dtype),
            None if d_weight is None else (d_weight * g).to(ctx.weight_dtype),
            *[None] * (len(ctx.needs_input_grad) - 2),
        )


class _Gradients:
    """Gradients that `SumOverRows` saves, accumulated by chunk from the gradient of the scaled logits."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor, temperature: float) -> None:
        self._hidden, self._weight, self._temperature = hidden, weight, temperature
        self._d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        self._d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        self.wanted = any(ctx.needs_input_grad[:2])

    def add(self, rows: slice, dz_CV: Tensor) -> None:
        dz_CV = dz_CV.div_(self._temperature).to(self._weight.dtype)
        if self._d_hidden is not None:
            self._d_hidden[rows] = dz_CV @ self._weight
        if self._d_weight is not None:
            self._d_weight += dz_CV.t() @ self._hidden[rows]

    def save(self, ctx: Any) -> None:
        ctx.save_for_backward(self._d_hidden, self._d_weight)
        ctx.weight_dtype = self._weight.dtype


class ChunkedCrossEntropy(SumOverRows):
    """Sum over rows of −log softmax(hidden @ W.T / temperature)[target], and the number of targets that are the
    likeliest token, without ever holding [R, V]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, float32: bool = False
    ) -> Any:
        loss, hits = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
        gradients = _Gradients(ctx, hidden, weight, temperature)
        for lo in range(0, len(targets), chunk):
            rows = slice(lo, lo + chunk)
            targets_C1 = targets[rows, None]
            logp_CV = _log_softmax(hidden[rows], weight, temperature, float32)
            loss -= logp_CV.gather(1, targets_C1).sum()
            hits += (logp_CV.argmax(1, keepdim=True) == targets_C1).sum()
            if gradients.wanted:
                dz_CV = logp_CV.exp_()
                dz_CV.scatter_add_(1, targets_C1, dz_CV.new_full((), -1.0).expand_as(targets_C1))
                gradients.add(rows, dz_CV)
        gradients.save(ctx)
        ctx.mark_non_differentiable(hits)
        return loss, hits


class ChunkedAcceptance(SumOverRows):
    """Sum over rows of −log α, and the number of ``targets`` that are q's likeliest token, without ever holding [R, V].

    α is the probability that rejection sampling accepts a token drafted from q for the target distribution p: their
    overlap, one minus their total variation (Leviathan et al. 2023, arXiv 2211.17192, corollary 3.6)::

        q = softmax(hidden @ W.T / temperature),  p = softmax(target_hidden @ W.T / temperature),  held constant
        α = Σ min(p, q),   d(−log α)/dz = q · (Σ q·[q < p] − [q < p]) / α      for the scaled logits z of q

    For a deterministic p this is the cross-entropy; otherwise it maximizes the overlap itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target_hidden: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        float32: bool = False,
    ) -> Any:
        loss, hits = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
        gradients = _Gradients(ctx, hidden, weight, temperature)
        for lo in range(0, len(targets), chunk):
            rows = slice(lo, lo + chunk)
            q_CV = _log_softmax(hidden[rows], weight, temperature, float32).exp_()
            p_CV = _log_softmax(target_hidden[rows], weight, temperature, float32).exp_()
            hits += (q_CV.argmax(1) == targets[rows]).sum()
            below_CV = q_CV < p_CV
            overlap_C1 = p_CV.minimum(q_CV).sum(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
            loss -= overlap_C1.log().sum()
            if gradients.wanted:
                under_C1 = (q_CV * below_CV).sum(1, keepdim=True)
                gradients.add(rows, q_CV.mul_(under_C1 - below_CV.float()).div_(overlap_C1))
        gradients.save(ctx)
        ctx.mark_non_differentiable(hits)
        return loss, hits


def head_logits(hidden_RM: Tensor, weight_VM: Tensor, float32: bool) -> Tensor:
    """Logits [R, V] in float32. Of bfloat16 operands the sums are rounded to bfloat16 before, unless ``float32``
    (model.float32_head): half of a unit in the last place is 0.06 nats for logits between 16 and 32."""
    if not float32 or weight_VM.dtype is torch.float32:
        return F.linear(hidden_RM, weight_VM).float()
    if weight_VM.is_cuda:  # without a copy of the weights
        return torch.mm(hidden_RM, weight_VM.t(), out_dtype=torch.float32)
    hidden_RM = hidden_RM.float()
    logits_RV = hidden_RM.new_empty(len(hidden_RM), len(weight_VM))
    for lo in range(0, len(weight_VM), _HEAD_ROWS):  # converted rows stay in the cache
        logits_RV[:, lo : lo + _HEAD_ROWS] = F.linear(hidden_RM, weight_VM[lo : lo + _HEAD_ROWS].float())
    return logits_RV


def _log_softmax(hidden_CM: Tensor, weight_VM: Tensor, temperature: float, float32: bool) -> Tensor:
    logits_CV = head_logits(hidden_CM, weight_VM, float32)
    return torch.log_softmax(logits_CV.div_(temperature) if temperature != 1.0 else logits_CV, -1)


def _scores(logp_CV: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and entropies."""
    return logp_CV.gather(1, targets[:, None]).squeeze(1), -(logp_CV.exp() * logp_CV).sum(-1)


def _logits_gradient(logp_CV: Tensor, targets: Tensor, entropy: Tensor, g: Tensor, e: Tensor) -> Tensor:
    """Gradient [C, V] of the scaled logits z, for the gradients g and e of `_scores`. With p the softmax of z and H its
    entropy::

        dz = g · (onehot − p) − e · p · (log p + H)
    """
    p_CV = logp_CV.exp()
    entropy_term = (e[:, None] * p_CV).mul_(logp_CV + entropy[:, None])
    dz_CV = p_CV.mul_(-g[:, None]).sub_(entropy_term)
    return dz_CV.scatter_add_(1, targets[:, None], g[:, None])
