"""Triton kernels of decode steps on a GPU: norms, rotary positions, the gated activation, attention over KV slots, and
the draw of the next token.

A decode step is as fast as its weights and KV are read, if little else happens between its matrix products: these
kernels do in one pass over an activation what takes eager torch three to eight. They round where the eager code does,
up to the order of sums. Attention reads of each row its own KV up to its position, so one recorded graph serves every
length.

Shape suffixes: X rows (N slots with J places each), H heads, K key/value heads, G heads per key/value head, D head_dim,
M hidden size, I intermediate size, L context, N rows of logits, V vocabulary, C chunks of it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEYS = 64  # read at once by one program of the attention
_MOST_PARTS = 64  # of one row's KV, attended by as many programs
_TOKENS = 4096  # of the vocabulary, in one chunk of a row's logits


def add_norm(x_XM: Tensor, added_XM: Tensor | None, weight_M: Tensor, eps: float) -> Tensor:
    """Add ``added`` to ``x`` in place, and return its RMS norm times ``weight``, new."""
    out_XM = torch.empty_like(x_XM)
    size = x_XM.shape[1]
    block = triton.next_power_of_2(size)
    _add_norm[(len(x_XM),)](
        x_XM, x_XM if added_XM is None else added_XM, weight_M, out_XM, size, eps, added_XM is not None, block,
        num_warps=_warps(block),
    )  # fmt: skip
    return out_XM


def gated(gate_up_X2I: Tensor) -> Tensor:
    """silu(gate) · up, [X, I]."""
    rows, size = len(gate_up_X2I), gate_up_X2I.shape[1] // 2
    out_XI = gate_up_X2I.new_empty(rows, size)
    block = min(triton.next_power_of_2(size), 2048)
    _gated[(rows, triton.cdiv(size, block))](gate_up_X2I, out_XI, size, block, num_warps=_warps(block))
    return out_XI


def rotate_and_store(
    qkv_XA: Tensor,
    slots_X: Tensor,
    positions_X: Tensor,
    rope_L2D: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    keys_SKLD: Tensor,
    values_SKLD: Tensor,
    heads: int,
    eps: float,
) -> Tensor:
    """The rotated queries [X, H, D]; rotated keys and the values go to the cache, at each row's slot and position.
    ``norms``: the weights [D] of the norms of each query and key head, if the model has them."""
    _, kv_heads, context, dim = keys_SKLD.shape
    queries_XHD = qkv_XA.new_empty(len(qkv_XA), heads, dim)
    q_norm_D, k_norm_D = norms if norms is not None else (queries_XHD, queries_XHD)
    _rotate_and_store[(len(qkv_XA), heads + 2 * kv_heads)](
        qkv_XA, slots_X, positions_X, rope_L2D, q_norm_D, k_norm_D, queries_XHD, keys_SKLD, values_SKLD,
        heads, kv_heads, context, eps, norms is not None, dim, triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return queries_XHD


def attend(queries_XHD: Tensor, positions_X: Tensor, keys_SKLD: Tensor, values_SKLD: Tensor, places: int) -> Tensor:
    """Attention of each row to its slot's KV up to its own position, [X, H·D]. The J = ``places`` rows of a slot are
    consecutive, at rising positions."""
    rows, heads, dim = queries_XHD.shape
    _, kv_heads, context, _ = keys_SKLD.shape
    slots, group = rows // places, heads // kv_heads
    queries = triton.next_power_of_2(max(places * group, 16))  # a matrix unit's least
    wanted = triton.cdiv(2 * _processors(queries_XHD.device), slots * kv_heads)
    parts = max(1, min(triton.next_power_of_2(wanted), _MOST_PARTS, triton.cdiv(context, _KEYS)))
    out_XA = queries_XHD.new_empty(rows, heads * dim)
    partial = queries_XHD.new_empty(slots * kv_heads, parts, queries, dim, dtype=torch.float32)
    sums = queries_XHD.new_empty(slots * kv_heads, parts, 2, queries, dtype=torch.float32)
    width = triton.next_power_of_2(dim)
    exact = "ieee" if queries_XHD.dtype is torch.float32 else "tf32"  # the second changes nothing for bfloat16
    _attend[(slots * kv_heads, parts)](
        queries_XHD, positions_X, keys_SKLD, values_SKLD, partial, sums, dim**-0.5,
        heads, kv_heads, context, places, group, parts, dim, width, queries, _KEYS, exact,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _join[(slots * kv_heads, places * group)](
        partial, sums, out_XA, heads, kv_heads, places, group, parts,
        triton.next_power_of_2(parts), dim, width, queries, num_warps=1,
    )  # fmt: skip
    return out_XA


def draw(
    logits_NV: Tensor, temperature_N1: Tensor | None, greedy_N: Tensor | None, uniforms_N: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row, by its uniform, and its logprob: as `asyncrl.rollouter.engines.native.sampler.sample`
    without filters. Where the logits hold NaN, so is the logprob."""
    rows, size = logits_NV.shape
    chunks = triton.cdiv(size, _TOKENS)
    found_NC4 = logits_NV.new_empty(rows, chunks, 4, dtype=torch.float32)
    tokens_N = torch.empty(rows, dtype=torch.int64, device=logits_NV.device)
    logprobs_N = logits_NV.new_empty(rows, dtype=torch.float32)
    temperature = logprobs_N if temperature_N1 is None else temperature_N1
    greedy = tokens_N if greedy_N is None else greedy_N
    _scan[(rows, chunks)](
        logits_NV, temperature, found_NC4, size, chunks, temperature_N1 is not None, _TOKENS, num_warps=8
    )
    _draw[(rows,)](
        logits_NV, temperature, greedy, uniforms_N, found_NC4, tokens_N, logprobs_N, size, chunks,
        temperature_N1 is not None, greedy_N is not None, triton.next_power_of_2(chunks), _TOKENS, num_warps=8,
    )  # fmt: skip
    return tokens_N, logprobs_N


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _warps(block: int) -> int:
    return max(1, min(block // 256, 8))


# fmt: off
@triton.jit
def _add_norm(x, added, weight, out, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row + column, inside, 0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(added + row + column, inside, 0.0).to(tl.float32)).to(value.dtype)
        tl.store(x + row + column, value, inside)
    exact = value.to(tl.float32)
    unit = exact * tl.rsqrt(tl.sum(exact * exact) / size + eps)
    scale = tl.load(weight + column, inside, 0.0).to(tl.float32)
    tl.store(out + row + column, unit.to(value.dtype).to(tl.float32) * scale, inside)


@triton.jit
def _gated(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, inside, 0.0)
    up = tl.load(gate_up + row * 2 * size + size + column, inside, 0.0).to(tl.float32)
    exact = gate.to(tl.float32)
    activated = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + column, activated * up, inside)


@triton.jit
def _rotate_and_store(
    qkv, slots, positions, rope, q_norm, k_norm, queries, keys, values,
    heads, kv_heads, context, eps, NORMS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    other = tl.where(column < DIM // 2, column + DIM // 2, column - DIM // 2)
    source = qkv + (row * (heads + 2 * kv_heads) + head) * DIM
    value = tl.load(source + column, inside, 0.0)
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if head >= heads + kv_heads:
        into = ((slot * kv_heads + head - heads - kv_heads) * context + position) * DIM
        tl.store(values + into + column, value, inside)
        return
    swapped = tl.load(source + other, inside, 0.0).to(tl.float32)
    exact = value.to(tl.float32)
    if NORMS:
        factor = tl.rsqrt(tl.sum(exact * exact) / DIM + eps)
        weight = q_norm if head < heads else k_norm
        scale, other_scale = tl.load(weight + column, inside, 0.0), tl.load(weight + other, inside, 0.0)
        exact = (exact * factor).to(value.dtype).to(tl.float32) * scale.to(tl.float32)
        swapped = (swapped * factor).to(value.dtype).to(tl.float32) * other_scale.to(tl.float32)
        exact = exact.to(value.dtype).to(tl.float32)
        swapped = swapped.to(value.dtype).to(tl.float32)
    cos = tl.load(rope + position * 2 * DIM + column, inside, 0.0).to(tl.float32)
    sin = tl.load(rope + position * 2 * DIM + DIM + column, inside, 0.0).to(tl.float32)
    rotated = (exact * cos).to(value.dtype).to(tl.float32) + swapped * sin
    if head < heads:
        tl.store(queries + (row * heads + head) * DIM + column, rotated, inside)
    else:
        into = ((slot * kv_heads + head - heads) * context + position) * DIM
        tl.store(keys + into + column, rotated, inside)


@triton.jit
def _attend(
    queries, positions, keys, values, partial, sums, scale,
    heads, kv_heads, context, places, group, parts,
    DIM: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)  # slot · kv_heads + head
    part = tl.program_id(1)
    slot, kv_head = block // kv_heads, block % kv_heads
    query = tl.arange(0, QUERIES)  # place · group + head of the group
    real = query < places * group
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    row = slot * places + query // group
    last = tl.load(positions + row, real, 0)
    q = tl.load(
        queries + (row * heads + kv_head * group + query % group)[:, None] * DIM + column[None],
        real[:, None] & inside[None], 0.0,
    )
    length = tl.max(last) + 1
    step = tl.cdiv(tl.cdiv(length, parts), KEYS) * KEYS
    begin = part * step
    end = tl.minimum(begin + step, length)
    most = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, WIDTH), tl.float32)
    for start in tl.range(begin, end, KEYS):
        place = start + tl.arange(0, KEYS)
        at = (block * context + place)[:, None] * DIM + column[None]
        there = (place < end)[:, None] & inside[None]
        k = tl.load(keys + at, there, 0.0)
        v = tl.load(values + at, there, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale
        scores = tl.where((place[None] <= last[:, None]) & (place < end)[None], scores, -float("inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        weights = tl.exp(scores - safe[:, None])
        fade = tl.exp(most - safe)
        total = total * fade + tl.sum(weights, 1)
        out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=EXACT)
        most = new
    at = block * parts + part
    tl.store(sums + at * 2 * QUERIES + query, most)
    tl.store(sums + (at * 2 + 1) * QUERIES + query, total)
    tl.store(partial + (at * QUERIES + query)[:, None] * DIM + column[None], out, inside[None])


@triton.jit
def _join(
    partial, sums, out, heads, kv_heads, places, group, parts,
    PARTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1)
    part = tl.arange(0, PARTS)
    real = part < parts
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    at = block * parts + part
    most = tl.load(sums + at * 2 * QUERIES + query, real, -float("inf"))
    total = tl.load(sums + (at * 2 + 1) * QUERIES + query, real, 0.0)
    share = tl.exp(most - tl.max(most))
    part_out = tl.load(
        partial + (at * QUERIES + query)[:, None] * DIM + column[None], real[:, None] & inside[None], 0.0
    )
    joined = tl.sum(part_out * share[:, None], 0) / tl.sum(total * share)
    row = (block // kv_heads) * places + query // group
    head = (block % kv_heads) * group + query % group
    tl.store(out + (row * heads + head) * DIM + column, joined, inside)


@triton.jit
def _scan(logits, temperature, found, size, chunks, SCALED: tl.constexpr, TOKENS: tl.constexpr):
    """Of a chunk of a row: its largest logit, the first token that has it, and the sum of its weights."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    value = tl.load(logits + row * size + token, token < size, -float("inf")).to(tl.float32)
    if SCALED:
        value = value / tl.load(temperature + row)
    most = tl.max(value)
    first = tl.min(tl.where(value == most, token, 2147483647))
    safe = tl.where(most == -float("inf"), 0.0, most)
    at = found + (row * chunks + chunk) * 4
    tl.store(at, most)
    tl.store(at + 1, tl.sum(tl.exp(value - safe)))
    tl.store((at + 2).to(tl.pointer_type(tl.int32)), first)


@triton.jit
def _draw(
    logits, temperature, greedy, uniforms, found, tokens, logprobs, size, chunks,
    SCALED: tl.constexpr, GREEDY: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    real = chunk < chunks
    at = found + (row * chunks + chunk) * 4
    most_C = tl.load(at, real, -float("inf"))
    most = tl.max(most_C)
    # sums in float64: in float32, rounding could move a running sum between tokens of zero weight
    weight_C = tl.load(at + 1, real, 0.0).to(tl.float64) * tl.exp(most_C - most).to(tl.float64)
    total = tl.sum(weight_C)
    target = total * tl.load(uniforms + row).to(tl.float64)
    before_C = tl.cumsum(weight_C) - weight_C
    # the last chunk that begins at or below the target and holds any weight
    chosen = tl.max(tl.where((before_C <= target) & (weight_C > 0.0), chunk, 0))
    rest = target - tl.sum(tl.where(chunk == chosen, before_C, 0.0))
    token = chosen * TOKENS + tl.arange(0, TOKENS)
    value = tl.load(logits + row * size + token, token < size, -float("inf")).to(tl.float32)
    if SCALED:
        value = value / tl.load(temperature + row)
    weight = tl.exp(value - most).to(tl.float64)
    above = (tl.cumsum(weight) > rest) & (weight > 0.0)
    last = tl.max(tl.where(weight > 0.0, token, 0))  # if rounding leaves none above
    drawn = tl.minimum(tl.min(tl.where(above, token, 2147483647)), last)
    if GREEDY:
        first_C = tl.load((at + 2).to(tl.pointer_type(tl.int32)), real, 2147483647)
        best = tl.min(tl.where(most_C == most, first_C, 2147483647))
        drawn = tl.where(tl.load(greedy + row) != 0, best, drawn)
    drawn = tl.minimum(drawn, size - 1)  # only for rows of NaN
    logit = tl.load(logits + row * size + drawn).to(tl.float32)
    if SCALED:
        logit = logit / tl.load(temperature + row)
    tl.store(tokens + row, drawn.to(tl.int64))
    tl.store(logprobs + row, logit - most - tl.log(total.to(tl.float32)))
# fmt: on
