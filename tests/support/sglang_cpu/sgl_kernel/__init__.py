"""Stand-ins for SGLang's kernel package on machines without a GPU, for tests; drafts must be chains.

They compute the same as SGLang's kernels, one sequence at a time. All other names can be imported, but raise
NotImplementedError when called.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

Tensor = torch.Tensor


# -- attention over the paged cache ------------------------------------------------------------------------------------


def _attend(q: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> Tensor:
    """Attention of q [n, Hq, D] over keys and values [m, Hk, D]; the last n are the queries' own."""
    n, m = len(q), len(keys)
    mask = torch.ones(n, m, dtype=torch.bool).tril(m - n) if causal else None
    q, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (q, keys, values))
    out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


def _decode_attention(
    q, key_buffer, value_buffer, key_scale, value_scale, out, k, v, places, _logits, req_to_token, requests, lengths,
    scaling, *_,
):  # fmt: skip
    if k is not None:
        key_buffer[places] = k.view(len(places), *key_buffer.shape[1:])
        value_buffer[places] = v.view(len(places), *value_buffer.shape[1:])
    for i, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist())):
        at = req_to_token[request, :length].long()
        out[i] = _attend(q[i : i + 1], key_buffer[at], value_buffer[at], scaling, causal=False)[0]


def _extend_attention(
    q, k, v, out, key_buffer, value_buffer, key_scale, value_scale, req_to_token, requests, lengths, extended, starts,
    _longest, scaling, _cap, _cross, _window, _encoder, _sinks, _tree, causal,
):  # fmt: skip
    for request, length, n, start in zip(requests.tolist(), lengths.tolist(), extended.tolist(), starts.tolist()):
        at = req_to_token[request, :length].long()
        out[start : start + n] = _attend(q[start : start + n], key_buffer[at], value_buffer[at], scaling, causal)


torch.ops.sgl_kernel.decode_attention_cpu = _decode_attention
torch.ops.sgl_kernel.extend_attention_cpu = _extend_attention


# -- cache locations ---------------------------------------------------------------------------------------------------


def assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, places, _stride):
    at = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist()):
        req_to_token[request, start:end] = places[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(requests, req_to_token, starts, ends, out, _stride):
    at = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist()):
        out[at : at + end - start] = req_to_token[request, start:end]
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(requests, req_to_token, lengths, out, stride, topk, columns):
    ends = lengths + topk * columns
    assign_extend_cache_locs_cpu(requests, req_to_token, lengths, ends, out, stride)


def build_draft_decode_metadata_cpu(req_to_token, requests, lengths, topk, steps, _pool):
    """The requests' own rows: a chain's tokens follow those of its request."""
    assert topk == 1
    return req_to_token[requests]


def copy_all_layer_kv_cache_cpu(addresses, strides, targets, sources):
    """Copy rows of every layer's cache, ``strides`` bytes each."""
    for address, stride in zip(addresses.tolist(), strides.tolist()):
        rows = [ctypes.string_at(address + place * stride, stride) for place in sources.tolist()]
        for place, row in zip(targets.tolist(), rows):
            ctypes.memmove(address + place * stride, row, stride)


# -- a chain of drafted tokens -----------------------------------------------------------------------------------------


def build_tree_kernel_efficient_cpu(
    _parents, _scores, lengths, tree_mask, positions, index, next_token, next_sibling, topk, _steps, n, mask_mode
):
    """Fills index (each token's position in the batch), next_token (its successor) and next_sibling, each [B, n]."""
    assert topk == 1
    assert mask_mode == 1, "the mask must cover only the drafted tokens"
    batch = len(lengths)
    tree_mask.view(-1)[: batch * n * n] = torch.ones(n, n).tril().repeat(batch, 1, 1).view(-1).to(tree_mask.dtype)
    positions.copy_((lengths[:, None] + torch.arange(n)).view(-1))
    index.view(-1).copy_(torch.arange(batch * n))
    next_token.copy_(torch.tensor([*range(1, n), -1]).expand(batch, n))
    next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Accept the longest prefix that the target predicts too, then add one token of the target's."""
    for i, (drafted, predicted) in enumerate(zip(candidates.tolist(), target_predict.tolist())):
        accepted = 0
        while accepted + 1 < min(len(drafted), accept_index.shape[1]) and drafted[accepted + 1] == predicted[accepted]:
            accepted += 1
        for place in range(accepted + 1):
            at = int(retrive_index[i, place])
            accept_index[i, place] = at
            predicts[at] = predicted[place]
        accept_token_num[i] = accepted


def fill_bonus_tokens_cpu(tokens, lengths, bonus, stride):
    bonus.copy_(tokens.view(-1)[torch.arange(len(lengths)) * stride + lengths.long() - 1])


def fill_accept_out_cache_loc_cpu(accept_index, places, out):
    accepted = accept_index.view(-1)
    chosen = places[accepted[accepted > -1].long()]
    out[: len(chosen)] = chosen


def rotate_input_ids_cpu(input_ids, starts, lengths, new, select):
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
        if length:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
            input_ids[start + length - 1 if select is None else int(select[i])] = new.view(-1)[i]


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_"):
        raise AttributeError(name)

    def missing(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: the stand-in for SGLang's CPU tests does not implement it")

    return missing
