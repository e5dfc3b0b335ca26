"""Triton kernels of the trainer's decoder layers on a GPU, with gradients: rotary positions, gated activation.

They round where the eager code does, in one pass instead of ten, and keep less for the backward pass.

Shape suffixes: T packed tokens, H heads, K key/value heads, A all of q, k and v, D head_dim, I intermediate size, X any
number of heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # numbers that a program of the activation reads of each operand


class RotatedHeads(torch.autograd.Function):
    """[T, A, D]: queries and keys, rotated as `asyncrl.models.decoder.apply_rope` does, and values."""

    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        cos, sin = (table.to(q_THD.dtype).contiguous() for table in (cos_T1D, sin_T1D))
        ctx.save_for_backward(cos, sin)
        ctx.split = [q_THD.shape[1], k_TKD.shape[1], v_TKD.shape[1]]
        out_TAD = q_THD.new_empty(len(q_THD), sum(ctx.split), q_THD.shape[2])
        q_out, k_out, v_out = out_TAD.split(ctx.split, 1)
        _rotate(q_THD, cos, sin, q_out, back=False)
        _rotate(k_TKD, cos, sin, k_out, back=False)
        v_out.copy_(v_TKD)
        return out_TAD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_TAD: Tensor) -> Any:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        q, k, v = g_TAD.split(ctx.split, 1)
        d_q, d_k = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
        _rotate(q, cos, sin, d_q, back=True)
        _rotate(k, cos, sin, d_k, back=True)
        return d_q, d_k, v, None, None


class Gated(torch.autograd.Function):
    """silu(gate) · up, [T, I]."""

    @staticmethod
    def forward(ctx: Any, gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        gate_TI, up_TI = gate_TI.contiguous(), up_TI.contiguous()
        ctx.save_for_backward(gate_TI, up_TI)
        out_TI = torch.empty_like(gate_TI)
        with torch.cuda.device_of(gate_TI):  # else on the thread's current device
            _gated[(triton.cdiv(out_TI.numel(), _BLOCK),)](gate_TI, up_TI, out_TI, out_TI.numel(), _BLOCK, num_warps=4)
        return out_TI

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_TI: Tensor) -> Any:  # type: ignore[override]
        gate_TI, up_TI = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate_TI), torch.empty_like(up_TI)
        with torch.cuda.device_of(gate_TI):
            _gated_gradient[(triton.cdiv(gate_TI.numel(), _BLOCK),)](
                gate_TI, up_TI, g_TI.contiguous(), d_gate, d_up, gate_TI.numel(), _BLOCK, num_warps=4
            )
        return d_gate, d_up


def _rotate(x_TXD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, out_TXD: Tensor, back: bool) -> None:
    """Rotate into ``out``, or take a gradient ``back``. Both may be parts of a row of heads."""
    rows, heads, dim = x_TXD.shape
    if x_TXD.stride()[1:] != (dim, 1):
        x_TXD = x_TXD.contiguous()
    assert out_TXD.stride()[1:] == (dim, 1)
    together, half = triton.next_power_of_2(heads), triton.next_power_of_2(dim // 2)
    with torch.cuda.device_of(x_TXD):
        _rotate_heads[(rows,)](
            x_TXD, cos_T1D, sin_T1D, out_TXD, x_TXD.stride(0), out_TXD.stride(0), heads, dim // 2, together, half, back,
            num_warps=max(1, min(together * half // 256, 8)),
        )  # fmt: skip


# fmt: off
@triton.jit
def _rotate_heads(
    x, cos, sin, out, x_stride, out_stride, heads, HALF: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BACK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, WIDTH)[None]
    real = column < HALF
    inside = (head < heads) & real
    at = head * (2 * HALF) + column
    left = tl.load(x + row * x_stride + at, inside, 0.0)
    right = tl.load(x + row * x_stride + at + HALF, inside, 0.0)
    table = row * (2 * HALF) + column
    cos_left, cos_right = tl.load(cos + table, real, 0.0), tl.load(cos + table + HALF, real, 0.0)
    sin_left, sin_right = tl.load(sin + table, real, 0.0), tl.load(sin + table + HALF, real, 0.0)
    if BACK:
        turned_left, turned_right = _times(right, sin_right), -_times(left, sin_left)
    else:
        turned_left, turned_right = -_times(right, sin_left), _times(left, sin_right)
    tl.store(out + row * out_stride + at, _times(left, cos_left) + turned_left, inside)
    tl.store(out + row * out_stride + at + HALF, _times(right, cos_right) + turned_right, inside)


@triton.jit
def _times(x, y):
    """The product in float32, rounded as x is."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _gated(gate, up, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    x = tl.load(gate + place, inside, 0.0)
    exact = x.to(tl.float32)
    activated = (exact / (1.0 + tl.exp(-exact))).to(x.dtype)
    tl.store(out + place, _times(activated, tl.load(up + place, inside, 0.0)), inside)


@triton.jit
def _gated_gradient(gate, up, g, d_gate, d_up, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    x = tl.load(gate + place, inside, 0.0)
    exact = x.to(tl.float32)
    slope = tl.load(g + place, inside, 0.0)
    below = 1.0 + tl.exp(-exact)
    share = 1.0 / below
    tl.store(d_up + place, _times(slope, (exact / below).to(x.dtype)), inside)
    of_activated = _times(slope, tl.load(up + place, inside, 0.0))
    tl.store(d_gate + place, of_activated * share * (1.0 + exact * (1.0 - share)), inside)
# fmt: on
