"""Batches from groups: packing in a canonical order, and partitions by mini batch, rank and micro-batch.

Every partition is a function of lengths alone and breaks ties by position, so all ranks compute the same one without
communication and equal input gives equal bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.types.groups import Group
from asyncrl.types.versions import PolicyVersion, Sampler


def build_batch(groups: Sequence[Group], mask_before: int | None = None) -> TrainBatch:
    """All samples of ``groups`` in the given order, within a group by sample index. Tokens sampled by a version below
    ``mask_before`` are not trained.

    Columns: ``behaviour_logprobs``, ``sampler`` (int32: index in `samplers`; -1 for a token with mixed KV). Sequence
    columns, [B] each: ``group`` int64 (index in ``groups``), ``rewards`` float32, ``finish`` uint8 (FinishReason),
    ``versions`` and ``version_span`` int64 (number of policy versions that sampled it, and the newest number minus the
    oldest). Raises ValueError for no groups, and for a group without prompt tokens: no position's logits would predict
    its first response token.
    """
    if not groups:
        raise ValueError("a batch needs at least one group, found none")
    tokens: list[np.ndarray] = []
    response: list[tuple[Group, slice]] = []
    versions: list[set[PolicyVersion]] = []
    order = [np.argsort(group.sample_index, kind="stable") for group in groups]
    for group, samples in zip(groups, order, strict=True):
        if not len(group.prompt_tokens):
            raise ValueError(f"group {group.uid} has an empty prompt; expected at least one token, such as BOS")
        for s in samples:
            rows = group.response(s)
            tokens += [group.prompt_tokens, group.tokens[rows]]
            response.append((group, rows))
            versions.append({span.version for span in group.spans(s)})
    index = {sampler: i for i, sampler in enumerate(samplers(groups))}
    sampled_by = {id(group): _sampled_by(group, index) for group in groups}
    masks = {id(group): group.loss_mask & _young(group, mask_before) for group in groups}
    prompt_lengths = np.array([len(group.prompt_tokens) for group, _ in response], dtype=np.int64)
    response_lengths = np.array([rows.stop - rows.start for _, rows in response], dtype=np.int64)
    cu_seqlens, row_offsets = offsets(prompt_lengths + response_lengths), offsets(response_lengths)
    # response token r of sequence b is at cu[b] + P + r, and is predicted one position before
    first_row = cu_seqlens[:-1] + prompt_lengths - 1
    rows_R = np.arange(row_offsets[-1]) + np.repeat(first_row - row_offsets[:-1], response_lengths)
    return TrainBatch(
        tokens=_concatenate(tokens, np.int32),
        cu_seqlens=cu_seqlens,
        rows=rows_R,
        targets=_concatenate([group.tokens[rows] for group, rows in response], np.int32),
        row_offsets=row_offsets,
        loss_mask=_concatenate([masks[id(group)][rows] for group, rows in response], np.bool_),
        columns={
            "behaviour_logprobs": _concatenate([group.logprobs[rows] for group, rows in response], np.float32),
            "sampler": _concatenate([sampled_by[id(group)][rows] for group, rows in response], np.int32),
        },
        sequence_columns={
            "group": np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
            "rewards": _concatenate([g.rewards[o] for g, o in zip(groups, order, strict=True)], np.float32),
            "finish": _concatenate([g.finish[o] for g, o in zip(groups, order, strict=True)], np.uint8),
            "versions": np.array([len(v) for v in versions], dtype=np.int64),
            "version_span": np.array([version_span(v) for v in versions], dtype=np.int64),
        },
    )


def samplers(groups: Sequence[Group]) -> list[Sampler]:
    """What sampled the groups' tokens, sorted."""
    return sorted({sampler for group in groups for sampler in _samplers(group)})


def _samplers(group: Group) -> Iterator[Sampler]:
    """What sampled each version span."""
    spans = zip(group.span_replica.tolist(), group.span_lineage.tolist(), group.span_number.tolist(), strict=True)
    return (Sampler(group.replicas[replica], PolicyVersion(*version)) for replica, *version in spans)


def _sampled_by(group: Group, index: Mapping[Sampler, int]) -> np.ndarray:
    """int32 [R]: index of each response token's sampler; -1 with mixed KV."""
    of_span = np.array([index[sampler] for sampler in _samplers(group)], np.int32)
    return group.per_token(np.where(group.span_mixed_kv, np.int32(-1), of_span))


def version_span(versions: set[PolicyVersion]) -> int:
    """Highest version number minus the lowest, across lineages; 0 for none."""
    numbers = [version.number for version in versions]
    return max(numbers, default=0) - min(numbers, default=0)


def _young(group: Group, mask_before: int | None) -> np.ndarray:
    """bool [R]: response tokens sampled by version ``mask_before`` or later."""
    if mask_before is None or not (group.span_number < mask_before).any():
        return np.ones(len(group.tokens), np.bool_)
    return group.per_token(group.span_number >= mask_before)


def per_token(batch: TrainBatch, values_B: np.ndarray) -> np.ndarray:
    """[B] → [R]: repeat each sequence's value for its response tokens."""
    return np.repeat(values_B, np.diff(batch.row_offsets))


def trained_tokens(batch: TrainBatch) -> np.ndarray:
    """int64 [B]: trained response tokens of each sequence."""
    return np.diff(offsets(batch.loss_mask)[batch.row_offsets])


def cut_mini_batches(batch: TrainBatch, mini_batch_groups: int) -> list[np.ndarray]:
    """Sequence indices (int64, ascending) of each optimizer step: mini batch k has the k-th ``mini_batch_groups``
    groups.

    Sequences without a trained token are left out: they would cost a forward pass and have no gradient."""
    mini_batch = batch.sequence_columns["group"] // mini_batch_groups
    trained = trained_tokens(batch) > 0
    return [np.flatnonzero((mini_batch == k) & trained) for k in range(int(mini_batch.max(initial=-1)) + 1)]


def partition(lengths: np.ndarray, parts: int) -> list[np.ndarray]:
    """Assign sequences of ``lengths`` [B] to ``parts`` ranks with balanced token counts; a rank may get none.

    Longest first, each to the rank with the fewest tokens (Graham 1969; at most 4/3 of the optimal maximum)."""
    load = [(0, part) for part in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for b in np.argsort(-lengths, kind="stable"):
        tokens, part = load[0]
        dealt[part].append(int(b))
        heapq.heapreplace(load, (tokens + int(lengths[b]), part))
    return [np.array(sorted(sequences), dtype=np.int64) for sequences in dealt]


def cut_micro_batches(lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Sequence indices of each micro-batch of at most ``max_tokens`` tokens: first fit, longest first.

    Sequences of similar length share a micro-batch, so attention pads little. A sequence longer than the budget gets
    its own micro-batch."""
    cuts: list[list[int]] = []
    room: list[int] = []
    for b in np.argsort(-lengths, kind="stable"):
        need = int(lengths[b])
        k = next((k for k, left in enumerate(room) if left >= need), len(room))
        if k == len(room):
            cuts.append([])
            room.append(max_tokens)
        cuts[k].append(int(b))
        room[k] -= need
    return cuts


def offsets(lengths: np.ndarray) -> np.ndarray:
    """int64 [B+1]: start of each of ``lengths`` [B], and the end."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _concatenate(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False)
