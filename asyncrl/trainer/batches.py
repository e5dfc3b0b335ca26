"""Batches from groups: packing in a canonical order, and partitions by mini batch, rank and micro-batch.

Every partition is a function of lengths alone and breaks ties by position, so all ranks compute the same one without
communication and equal input gives equal bits.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from asyncrl.algorithms.rewards import RewardOptions, masked, shaped
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.types.groups import Group
from asyncrl.types.samples import TOKEN_REWARDS, TRUNCATED
from asyncrl.types.versions import PolicyVersion, Sampler


def build_batch(groups: Sequence[Group], mask_before: int | None = None) -> TrainBatch:
    """All sequences of ``groups`` in the given order, within a group by sample index. Tokens sampled by a version below
    ``mask_before`` are not trained.

    Columns: ``behaviour_logprobs``, ``sampler`` (int32: index in `samplers`; -1 for a token with mixed KV), ``version``
    (int32: number of the policy version that sampled it), and ``token_rewards`` (float32: at the last token of each
    turn that an agent loop rewarded, else 0). Sequence columns, [B] each: ``group`` int64 (index in ``groups``),
    ``sample`` int64 (index of its sample in the batch), ``prefix`` int64 (tokens of the group's prompt that it begins
    with), ``owned`` int64 (tokens that it trains, whatever masks follow), ``finish`` uint8 (FinishReason) and
    ``rewards`` float32 of its sample, ``versions`` and ``version_span`` int64 of its sample (number of policy versions
    that sampled it, and the newest number minus the oldest). Raises ValueError for no groups."""
    if not groups:
        raise ValueError("a batch needs at least one group, found none")
    tokens: list[np.ndarray] = []
    response: list[tuple[Group, slice]] = []
    prefixes: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in _OF_SAMPLE}
    samples = 0
    for g, group in enumerate(groups):
        for s in np.argsort(group.sample_index, kind="stable").tolist():
            sequences = group.sequences(s)
            versions = {span.version for q in sequences for span in group.spans(q)}
            of_sample = (g, samples, group.rewards[s], group.finish[s], len(versions), version_span(versions))
            samples += 1
            for q in sequences:
                rows, prefix = group.response(q), int(group.prefix[q])
                tokens += [group.prompt_tokens[:prefix], group.tokens[rows]]
                response.append((group, rows))
                prefixes.append(prefix)
                for name, value in zip(_OF_SAMPLE, of_sample, strict=True):
                    columns[name].append(value)
    index = {sampler: i for i, sampler in enumerate(samplers(groups))}
    sampled_by = {id(group): _sampled_by(group, index) for group in groups}
    numbers = {id(group): group.per_token(group.span_number) for group in groups}
    masks = {id(group): group.loss_mask & _young(group, mask_before) for group in groups}
    prefix_lengths = np.array(prefixes, dtype=np.int64)
    response_lengths = np.array([rows.stop - rows.start for _, rows in response], dtype=np.int64)
    cu_seqlens, row_offsets = offsets(prefix_lengths + response_lengths), offsets(response_lengths)
    # response token r of sequence b is at cu[b] + prefix + r, and is predicted one position before; the first token of
    # a sequence without prefix, which is not trained, by itself
    first_row = cu_seqlens[:-1] + prefix_lengths - 1
    rows_R = np.arange(row_offsets[-1]) + np.repeat(first_row - row_offsets[:-1], response_lengths)
    rows_R = np.maximum(rows_R, np.repeat(cu_seqlens[:-1], response_lengths))
    of_turns = {id(group): _token_rewards(group) for group in groups}
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
            "version": _concatenate([numbers[id(group)][rows] for group, rows in response], np.int32),
            TOKEN_REWARDS: _concatenate([of_turns[id(group)][rows] for group, rows in response], np.float32),
        },
        sequence_columns={
            "prefix": prefix_lengths,
            "owned": np.array([group.loss_mask[rows].sum() for group, rows in response], dtype=np.int64),
            **{name: np.array(columns[name], dtype=dtype) for name, dtype in _OF_SAMPLE.items()},
        },
    )


#: sequence columns that hold a value of the sequence's sample
_OF_SAMPLE = {
    "group": np.int64,
    "sample": np.int64,
    "rewards": np.float32,
    "finish": np.uint8,
    "versions": np.int64,
    "version_span": np.int64,
}


def first_sequences(batch: TrainBatch) -> np.ndarray:
    """int64 [S]: the first sequence of each of the batch's samples, to read columns of samples from."""
    return np.flatnonzero(np.diff(batch.sequence_columns["sample"], prepend=-1))


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


def _token_rewards(group: Group) -> np.ndarray:
    """float32 [R]: rewards of turns, at their last tokens."""
    rewards = np.zeros(len(group.tokens), np.float32)
    values, offsets = group.extras.get(TOKEN_REWARDS, (rewards[:0], np.zeros(len(group.prefix) + 1, np.int64)))
    for q in np.flatnonzero(np.diff(offsets)).tolist():
        rewards[group.response(q)] = values[offsets[q] : offsets[q + 1]]
    return rewards


def version_span(versions: set[PolicyVersion]) -> int:
    """Highest version number minus the lowest, across lineages; 0 for none."""
    numbers = [version.number for version in versions]
    return max(numbers, default=0) - min(numbers, default=0)


def _young(group: Group, mask_before: int | None) -> np.ndarray:
    """bool [R]: response tokens sampled by version ``mask_before`` or later."""
    if mask_before is None or not (group.span_number < mask_before).any():
        return np.ones(len(group.tokens), np.bool_)
    return group.per_token(group.span_number >= mask_before)


def shape_rewards(batch: TrainBatch, options: RewardOptions, max_response_tokens: int) -> TrainBatch:
    """The batch with rewards as advantages see them, and without the samples that are not trained, see
    `asyncrl.algorithms.rewards.shaped`, which also decides what the rollouter drops."""
    columns, first = batch.sequence_columns, first_sequences(batch)
    lengths = np.maximum.reduceat(np.diff(batch.row_offsets), first)
    truncated = np.isin(columns["finish"][first], TRUNCATED)
    rewards, trained = columns["rewards"][first].copy(), np.ones(len(first), bool)
    group = columns["group"][first]
    for g in np.unique(group):
        of = group == g
        rewards[of], trained[of] = shaped(rewards[of], lengths[of], truncated[of], options, max_response_tokens)
    return dataclasses.replace(
        batch,
        loss_mask=batch.loss_mask & per_token(batch, trained[columns["sample"]]),
        sequence_columns={**columns, "rewards": rewards[columns["sample"]]},
    )


def as_trained(group: Group, mask_before: int | None, options: RewardOptions) -> Group:
    """The group with the tokens that a step trains in ``loss_mask``: not those of versions below ``mask_before``, nor
    those of samples that the overlong policy masks."""
    kept = ~masked(np.isin(group.finish, TRUNCATED), options)
    of_token = np.repeat(kept[group.sequence_sample], group.response_lengths)
    return dataclasses.replace(group, loss_mask=group.loss_mask & _young(group, mask_before) & of_token)


def per_token(batch: TrainBatch, values_B: np.ndarray) -> np.ndarray:
    """[B] → [R]: repeat each sequence's value for its response tokens."""
    return np.repeat(values_B, np.diff(batch.row_offsets))


def tokens_of_sequences(batch: TrainBatch, counted: np.ndarray) -> np.ndarray:
    """int64 [B]: how many of the response tokens ``counted`` (bool [R]) each sequence has."""
    return np.diff(offsets(counted)[batch.row_offsets])


def with_advantage_and_samplers(batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    """bool [B] each: sequences with a trained token whose advantage is not 0; and one of each sampler that these have
    no token of, whose gradient is 0."""
    columns, trained = batch.columns, batch.loss_mask
    found = tokens_of_sequences(batch, trained & (columns["advantages"] != 0)) > 0
    measured = np.unique(columns["sampler"][trained & per_token(batch, found)])
    others = np.flatnonzero(trained & ~np.isin(columns["sampler"], measured))
    first = others[np.unique(columns["sampler"][others], return_index=True)[1]]
    return found, np.isin(np.arange(len(batch)), per_token(batch, np.arange(len(batch)))[first])


def cut_mini_batches(batch: TrainBatch, mini_batch_groups: int) -> list[np.ndarray]:
    """Sequence indices (int64, ascending) of each optimizer step: mini batch k has the k-th ``mini_batch_groups``
    groups."""
    mini_batch = batch.sequence_columns["group"] // mini_batch_groups
    return [np.flatnonzero(mini_batch == k) for k in range(int(mini_batch.max(initial=-1)) + 1)]


def deal(batch: TrainBatch, sequences: np.ndarray, ranks: int, prompts_once: bool) -> list[np.ndarray]:
    """Those of ``sequences`` (indices) that each rank gets, ascending, with balanced token counts; a rank may get none.

    ``prompts_once``: a rank computes a group's prompt once for all of the group's sequences that it has. Then they are
    dealt in pieces: whole groups, or smaller ones, whichever gives the heaviest rank the fewest tokens."""
    dealt = [sequences[mine] for mine in partition(batch.lengths[sequences], ranks)]
    if not prompts_once or ranks == 1:
        return dealt
    heaviest = lambda of: max(tokens_once(batch, mine) for mine in of)
    least, budget = heaviest(dealt), int(batch.lengths[sequences].sum())
    shared = shareable(batch)
    own = batch.lengths - shared
    while len(pieces := _pieces(batch, sequences, budget)) < len(sequences):
        found = _balanced(pieces, np.array([own[piece].sum() + shared[piece].max() for piece in pieces]), ranks)
        if (tokens := heaviest(found)) < least:
            dealt, least = found, tokens
        budget //= 2
    return dealt


def partition(lengths: np.ndarray, parts: int) -> list[np.ndarray]:
    """Indices of ``lengths`` in ``parts`` with balanced sums, each ascending; a part may have none."""
    return _balanced([[b] for b in range(len(lengths))], lengths, parts)


def _balanced(pieces: Sequence[Sequence[int]], costs: np.ndarray, parts: int) -> list[np.ndarray]:
    """The costliest first, each to the part with the least (Graham 1969; at most 4/3 of the optimal maximum)."""
    load = [(0, part) for part in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for k in np.argsort(-costs, kind="stable"):
        cost, part = load[0]
        dealt[part] += pieces[k]
        heapq.heapreplace(load, (cost + int(costs[k]), part))
    return [np.array(sorted(mine), dtype=np.int64) for mine in dealt]


def _pieces(batch: TrainBatch, sequences: np.ndarray, max_tokens: int) -> list[list[int]]:
    """``sequences`` by group, in pieces of at most ``max_tokens`` tokens or one sequence, longest first."""
    group, pieces = batch.sequence_columns["group"][sequences], list[list[int]]()
    for g in np.unique(group):
        of_group = sequences[group == g]
        pieces += [of_group[cut].tolist() for cut in cut_micro_batches(batch.lengths[of_group], max_tokens)]
    return pieces


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


def cut_groups(batch: TrainBatch, max_tokens: int) -> list[list[int]]:
    """As `cut_micro_batches`, but of each group as many sequences as fit, longest first, stay together."""
    parts = _pieces(batch, np.arange(len(batch)), max_tokens)
    sizes = np.array([int(batch.lengths[part].sum()) for part in parts])
    return [[b for k in cut for b in parts[k]] for cut in cut_micro_batches(sizes, max_tokens)]


def tokens_once(batch: TrainBatch, sequences: Sequence[int] | np.ndarray) -> int:
    """Tokens of these sequences, with each group's prompt once."""
    cut = np.asarray(sequences, dtype=np.int64)
    group, shared = batch.sequence_columns["group"][cut], shareable(batch)[cut]
    prompts = sum(int(shared[group == g].max()) for g in np.unique(group))
    return int((batch.lengths[cut] - shared).sum()) + prompts


def shareable(batch: TrainBatch) -> np.ndarray:
    """int64 [B]: tokens of its group's prompt that a sequence may share: all that it begins with but the last, whose
    state the head reads, so that no row is read twice."""
    return np.maximum(batch.sequence_columns["prefix"] - 1, 0)


def offsets(lengths: np.ndarray) -> np.ndarray:
    """int64 [B+1]: start of each of ``lengths`` [B], and the end."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _concatenate(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False)
