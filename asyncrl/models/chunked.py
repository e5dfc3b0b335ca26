"""Log-probabilities, entropies and draft losses from the head, a chunk of rows at a time, with their gradients.

On a GPU `asyncrl.models.head_kernels` computes scores and cross-entropies from the logits, equal to the eager code here
up to rounding. `ChunkedAcceptance` is eager everywhere.

Shape suffixes: R rows, C a chunk of them, M hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.models.kernels import fuses

_HEAD_ROWS = 256
_EAGER_BYTES = 16  # per logit of a chunk, at the peak of the eager code: four float32 tensors


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
        found = [entropy]
        if fuses(hidden):
            targets = targets.contiguous()
            found += [torch.empty_like(logprobs), torch.empty_like(logprobs)]
            for rows in _chunks(len(targets), _fused_rows(chunk, weight, float32)):
                logits_CV = _product(hidden[rows], weight, float32)
                _kernels().scores(logits_CV, targets[rows], temperature, [x[rows] for x in (logprobs, *found)])
                del logits_CV  # before the next chunk's
        else:
            for rows in _chunks(len(targets), chunk):
                logp_CV = _log_softmax(hidden[rows], weight, temperature, float32)
                logprobs[rows], entropy[rows] = _scores(logp_CV, targets[rows])
        ctx.save_for_backward(hidden, weight, targets, *found)
        ctx.temperature, ctx.chunk, ctx.float32 = temperature, chunk, float32
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor, e: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, targets, *found = ctx.saved_tensors
        gradients = _Gradients(ctx, hidden, weight, ctx.temperature)
        if fuses(hidden):
            g, e = g.contiguous(), e.contiguous()
            for rows in _chunks(len(targets), _fused_rows(ctx.chunk, weight, ctx.float32)):
                logits_CV = _product(hidden[rows], weight, ctx.float32)
                gradients.add_fused(rows, logits_CV, targets[rows], [x[rows] for x in found], g[rows], e[rows])
                del logits_CV
        else:
            for rows in _chunks(len(targets), ctx.chunk):
                logp_CV = _log_softmax(hidden[rows], weight, ctx.temperature, ctx.float32)
                gradients.add(rows, _logits_gradient(logp_CV, targets[rows], found[0][rows], g[rows], e[rows]))
        d_weight = gradients.d_weight
        return gradients.d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None, None


class TargetScores(torch.autograd.Function):
    """Log-probabilities of targets [C], and entropies, of ``softmax(logits / temperature)`` for logits [C, V]."""

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, targets: Tensor, temperature: float) -> Any:
        ctx.temperature = temperature
        if fuses(logits_CV):
            found = logits_CV.new_empty(4, len(targets), dtype=torch.float32)
            logits_CV, targets = logits_CV.contiguous(), targets.contiguous()
            _kernels().scores(logits_CV, targets, temperature, found.unbind())
            ctx.save_for_backward(logits_CV, targets, found)
            return found[0].clone(), found[1].clone()
        logp_CV = torch.log_softmax(logits_CV / temperature if temperature != 1.0 else logits_CV, -1)
        logprobs, entropy = _scores(logp_CV, targets)
        ctx.save_for_backward(logp_CV, targets, entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor, e: Tensor) -> Any:  # type: ignore[override]
        values_CV, targets, found = ctx.saved_tensors
        if not fuses(values_CV):
            return _logits_gradient(values_CV, targets, found, g, e).div_(ctx.temperature), None, None
        dz_CV = torch.empty_like(values_CV)  # the logits may be saved elsewhere too
        g, e = g.contiguous(), e.contiguous()
        return _kernels().gradient(values_CV, targets, found[1:].unbind(), g, e, ctx.temperature, dz_CV), None, None


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
    """Gradients for ``hidden`` and ``weight``, accumulated by chunk."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor, temperature: float) -> None:
        self._hidden, self._weight, self._temperature = hidden, weight, temperature
        self.d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        self.d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        self.wanted = any(ctx.needs_input_grad[:2])

    def add(self, rows: slice, dz_CV: Tensor) -> None:
        """``dz``: gradient of the scaled logits, float32."""
        self._multiply(rows, dz_CV.div_(self._temperature).to(self._weight.dtype))

    def add_fused(
        self, rows: slice, logits_CV: Tensor, targets: Tensor, found: Sequence[Tensor], g: Tensor, e: Tensor | None
    ) -> None:
        """The arguments are those of `head_kernels.gradient`. May overwrite ``logits``."""
        dtype = self._weight.dtype
        out_CV = logits_CV if logits_CV.dtype is dtype else torch.empty_like(logits_CV, dtype=dtype)
        self._multiply(rows, _kernels().gradient(logits_CV, targets, found, g, e, self._temperature, out_CV))

    def save(self, ctx: Any) -> None:
        """For `SumOverRows`."""
        ctx.save_for_backward(self.d_hidden, self.d_weight)
        ctx.weight_dtype = self._weight.dtype

    def _multiply(self, rows: slice, dz_CV: Tensor) -> None:
        if self.d_hidden is not None:
            self.d_hidden[rows] = dz_CV @ self._weight
        if self.d_weight is not None:
            _add_product(self.d_weight, dz_CV.t(), self._hidden[rows])


class ChunkedCrossEntropy(SumOverRows):
    """Sum over rows of −log softmax(hidden @ W.T / temperature)[target], and the number of targets that are the
    likeliest token, without ever holding [R, V]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, float32: bool = False
    ) -> Any:
        loss, hits = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
        gradients = _Gradients(ctx, hidden, weight, temperature)
        if fuses(hidden):
            targets = targets.contiguous()
            for rows in _chunks(len(targets), _fused_rows(chunk, weight, float32)):
                logits_CV = _product(hidden[rows], weight, float32)
                found = loss.new_empty(4, len(logits_CV))
                _kernels().scores(logits_CV, targets[rows], temperature, found.unbind())
                loss -= found[0].sum()
                hits += (logits_CV.argmax(1) == targets[rows]).sum()
                if gradients.wanted:
                    falls = torch.full_like(found[0], -1.0)
                    gradients.add_fused(rows, logits_CV, targets[rows], found[1:].unbind(), falls, None)
                del logits_CV
        else:
            for rows in _chunks(len(targets), chunk):
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
        for rows in _chunks(len(targets), chunk):
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


def _kernels() -> Any:
    from asyncrl.models import head_kernels  # needs Triton

    return head_kernels


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(lo, lo + chunk) for lo in range(0, rows, chunk))


def _fused_rows(chunk: int, weight_VM: Tensor, float32: bool) -> int:
    """As many rows as need the memory of ``chunk`` rows in the eager code: every chunk passes over the gradient of the
    weight."""
    needed = weight_VM.itemsize
    if float32 and weight_VM.dtype is not torch.float32:
        needed += 4  # the gradient does not fit in place of the logits
    return chunk * (_EAGER_BYTES // needed)


def _product(hidden_CM: Tensor, weight_VM: Tensor, float32: bool) -> Tensor:
    """`head_logits`, but in bfloat16 if they are rounded to it."""
    return head_logits(hidden_CM, weight_VM, float32) if float32 else F.linear(hidden_CM, weight_VM)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to a float32 ``total``; on a GPU with nothing rounded in between, in the product's own pass."""
    if not total.is_cuda:
        total += a @ b
    elif b.dtype is torch.float32:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


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
