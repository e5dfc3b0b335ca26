"""What the head says of many rows, a chunk at a time: log-probabilities, entropies, cross-entropy, and their gradients.

Shape suffixes: R rows, C a chunk of them, M hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class ChunkedScores(torch.autograd.Function):
    """Log-probabilities and entropies of ``softmax(hidden @ W.T / temperature)`` without ever holding [R, V].

    Both passes go over chunks of rows; the backward computes the chunk's logits again. With p the softmax, z the scaled
    logits, H the entropy and g, e the gradients of logprob and entropy::

        dz = g · (onehot − p) − e · p · (log p + H)
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int) -> Any:
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        for lo in range(0, len(targets), chunk):
            rows = slice(lo, lo + chunk)
            logp_CV = _log_softmax(hidden[rows], weight, temperature)
            logprobs[rows] = logp_CV.gather(1, targets[rows, None]).squeeze(1)
            entropy[rows] = -(logp_CV.exp() * logp_CV).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, g: Tensor, e: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, targets, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for lo in range(0, len(targets), ctx.chunk):
            rows = slice(lo, lo + ctx.chunk)
            logp_CV = _log_softmax(hidden[rows], weight, ctx.temperature)
            p_CV = logp_CV.exp()
            entropy_term = (e[rows, None] * p_CV).mul_(logp_CV + entropy[rows, None])
            dz_CV = p_CV.mul_(-g[rows, None]).sub_(entropy_term)
            dz_CV.scatter_add_(1, targets[rows, None], g[rows, None])
            dz_CV = dz_CV.div_(ctx.temperature).to(weight.dtype)
            d_hidden[rows] = dz_CV @ weight
            d_weight += dz_CV.t() @ hidden[rows]
        return d_hidden, d_weight.to(weight.dtype), None, None, None


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over rows of −log softmax(hidden @ W.T / temperature)[target], and how many targets are the likeliest token,
    without ever holding [R, V].

    The gradient of a sum is known up to one factor when the sum is, so each chunk's logits are computed once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int) -> Any:
        loss, hits = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for lo in range(0, len(targets), chunk):
            rows = slice(lo, lo + chunk)
            targets_C1 = targets[rows, None]
            logp_CV = _log_softmax(hidden[rows], weight, temperature)
            loss -= logp_CV.gather(1, targets_C1).sum()
            hits += (logp_CV.argmax(1, keepdim=True) == targets_C1).sum()
            if d_hidden is not None or d_weight is not None:
                dz_CV = logp_CV.exp_()
                dz_CV.scatter_add_(1, targets_C1, dz_CV.new_full((), -1.0).expand_as(targets_C1))
                dz_CV = dz_CV.div_(temperature).to(weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = dz_CV @ weight
            if d_weight is not None:
                d_weight += dz_CV.t() @ hidden[rows]
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        d_hidden, d_weight = ctx.saved_tensors
        return (
            None if d_hidden is None else d_hidden * g.to(d_hidden.dtype),
            None if d_weight is None else (d_weight * g).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def _log_softmax(hidden_CM: Tensor, weight_VM: Tensor, temperature: float) -> Tensor:
    logits_CV = F.linear(hidden_CM, weight_VM).float()
    return torch.log_softmax(logits_CV.div_(temperature) if temperature != 1.0 else logits_CV, -1)
