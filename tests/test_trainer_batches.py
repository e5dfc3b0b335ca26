"""Batches: packing, partitions, advantages and overlong policies against plain formulas."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.schema import AlgorithmConfig, Config, OptimizerConfig, RolloutConfig
from asyncrl.trainer.backends.base import TRAINED, TrainBatch
from asyncrl.trainer.backends.schedule import learning_rate
from asyncrl.trainer.backends.torch.prompts import blocks_of
from asyncrl.trainer.batches import (
    build_batch,
    cut_groups,
    cut_micro_batches,
    cut_mini_batches,
    deal,
    partition,
    shape_rewards,
    tokens_once,
)
from asyncrl.trainer.objective import Objective
from asyncrl.trainer.rank import batch_metrics, step_metrics
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample, TokenSequence
from asyncrl.types.versions import PolicyVersion, VersionSpan

LENGTHS = st.lists(st.integers(1, 200), max_size=60).map(lambda x: np.array(x, dtype=np.int64))


def prepared(batch, constant=1, **options):
    """The batch with the columns of its algorithm, and its denominators."""
    batch = dataclasses.replace(batch, columns=dict(batch.columns))
    config = Config(algorithm=AlgorithmConfig(**options), rollout=RolloutConfig(max_response_tokens=constant))
    return batch, Objective(config).prepare(batch)


def advantages(batch, **options):
    return prepared(batch, **options)[0].columns["advantages"]


def weights_of(batch, constant=1, **options):
    batch, shares = prepared(batch, constant, **options)
    return batch.columns["weights"], shares


def sample(index, response, reward=0.0, mask=None, finish=FinishReason.STOP, versions=(0,)):
    size = len(response)
    return Sample.single(
        index=index,
        tokens=np.array(response, dtype=np.int32),
        logprobs=-np.arange(1, size + 1, dtype=np.float32) - 10 * index,
        loss_mask=np.ones(size, bool) if mask is None else np.array(mask, bool),
        spans=[VersionSpan(start, PolicyVersion(0, number)) for start, number in enumerate(versions)],
        finish=finish,
        reward=reward,
    )


def group(uid, prompt, *samples):
    return Group.from_samples(uid, uid, 0, np.array(prompt), samples)


@pytest.fixture
def groups():
    return [
        group("b", [1, 2, 3], sample(1, [10, 11], 1.0), sample(0, [12, 13, 14], 0.0, mask=[1, 0, 1])),
        group("a", [4], sample(0, [15], 2.0), sample(1, [16, 17], 5.0, finish=FinishReason.LENGTH)),
    ]


def test_a_batch_holds_every_sample_in_group_order_and_by_index(groups):
    batch = build_batch([Group.from_buffer(g.to_bytes()) for g in groups])
    assert batch.tokens.tolist() == [1, 2, 3, 12, 13, 14, 1, 2, 3, 10, 11, 4, 15, 4, 16, 17]
    assert batch.cu_seqlens.tolist() == [0, 6, 11, 13, 16]
    assert batch.targets.tolist() == [12, 13, 14, 10, 11, 15, 16, 17]
    assert batch.loss_mask.tolist() == [True, False, True] + [True] * 5
    assert batch.columns["behaviour_logprobs"].tolist() == [-1, -2, -3, -11, -12, -1, -11, -12]
    assert batch.sequence_columns["rewards"].tolist() == [0, 1, 2, 5]
    assert batch.sequence_columns["group"].tolist() == [0, 0, 1, 1]
    assert batch.sequence_columns["finish"].tolist() == [0, 0, 0, FinishReason.LENGTH]


def test_tokens_of_versions_past_the_bound_are_not_trained():
    samples = [sample(0, [5] * 4, versions=(2, 3, 4, 3)), sample(1, [6] * 3, mask=[1, 0, 1], versions=(4,))]
    trained = lambda before: build_batch([group("g", [1], *samples)], before).loss_mask.tolist()
    assert trained(None) == trained(2) == [True, True, True, True, True, False, True]
    assert trained(3) == [False, True, True, True, True, False, True]
    assert trained(4) == [False, False, True, False, True, False, True]
    assert not any(trained(5))


def test_each_target_follows_the_position_whose_logits_predict_it(groups):
    batch = build_batch(groups)
    assert (batch.tokens[batch.rows + 1] == batch.targets).all()
    picked = batch.select([3, 0])
    assert (picked.tokens[picked.rows + 1] == picked.targets).all()
    assert picked.targets.tolist() == [16, 17, 12, 13, 14]


def test_no_groups_and_a_group_without_prompt_are_refused():
    with pytest.raises(ValueError, match="at least one group"):
        build_batch([])
    with pytest.raises(ValueError, match="group g sample 0: nothing precedes its first token"):
        group("g", [], sample(0, [1]))


def test_mini_batches_hold_consecutive_groups():
    batch = build_batch([group(str(i), [1], sample(0, [2]), sample(1, [3])) for i in range(5)])
    assert [m.tolist() for m in cut_mini_batches(batch, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def sequence(response, mask=None, prefix=None):
    size = len(response)
    mask = np.ones(size, bool) if mask is None else np.array(mask, bool)
    spans = [VersionSpan(0, PolicyVersion(0, size))]
    return TokenSequence(np.array(response, np.int32), np.zeros(size, np.float32), mask, spans, prefix)


@pytest.fixture
def branched():
    """Of two samples: an answer of two tokens, a continuation that carries them untrained, and a sub-agent with a
    context of its own; and a plain answer."""
    first = [sequence([10, 11]), sequence([10, 11, 12], [0, 0, 1]), sequence([20, 21, 22], [0, 1, 1], prefix=0)]
    return group(
        "g", [1, 2], Sample(0, first, FinishReason.STOP, 3.0), Sample(1, [sequence([30])], FinishReason.STOP, 0.0)
    )


def test_a_batch_has_each_sequence_with_its_own_context(branched):
    batch = build_batch([Group.from_buffer(branched.to_bytes())])
    assert batch.tokens.tolist() == [1, 2, 10, 11, 1, 2, 10, 11, 12, 20, 21, 22, 1, 2, 30]
    assert batch.cu_seqlens.tolist() == [0, 4, 9, 12, 15]
    assert batch.targets.tolist() == [10, 11, 10, 11, 12, 20, 21, 22, 30]
    assert batch.loss_mask.tolist() == [True, True, False, False, True, False, True, True, True]
    assert (batch.tokens[batch.rows + 1] == batch.targets)[batch.loss_mask].all()
    assert batch.rows.min() >= 0
    columns = batch.sequence_columns
    assert columns["sample"].tolist() == [0, 0, 0, 1]
    assert columns["rewards"].tolist() == [3, 3, 3, 0]
    assert columns["owned"].tolist() == [2, 1, 2, 1]
    assert columns["versions"].tolist() == [2, 2, 2, 1]
    metrics = batch_metrics(batch)
    assert (metrics["trainer/samples"], metrics["trainer/sequences"]) == (2, 4)
    assert (metrics["critic/rewards/mean"], metrics["response_length/max"]) == (1.5, 8)


def test_statistics_of_a_group_are_over_samples(branched):
    batch = build_batch([branched])
    assert advantages(batch, normalize_by_std=False).tolist() == [1.5] * 8 + [-1.5]


def test_weights_of_several_sequences(branched):
    batch = build_batch([branched])
    mask = batch.loss_mask.astype(float)
    for how, owned, share in (
        ("sequence_mean", np.repeat([2, 1, 2, 1], [2, 3, 3, 1]), [1, 1, 1, 1]),
        ("sample_mean", np.repeat([5, 1], [8, 1]), [0.4, 0.2, 0.4, 1]),
        ("constant", np.ones(9), [4, 2, 4, 10]),
    ):
        weights, shares = weights_of(batch, constant=10, loss_aggregation=how)
        np.testing.assert_allclose(weights, mask / owned, rtol=1e-6)
        np.testing.assert_allclose(shares, share)


def test_masks_leave_the_denominators_unless_configured_otherwise():
    young = build_batch([group("a", [1], sample(0, [5] * 4, versions=(2, 3, 3, 3)), sample(1, [6], versions=(2,)))], 3)
    weights, share = weights_of(young, loss_aggregation="sequence_mean")
    assert (weights.tolist(), share.tolist()) == ([0, 0.25, 0.25, 0.25, 0], [1, 1])
    weights, share = weights_of(young, loss_aggregation="sequence_mean", denominators="trained")
    np.testing.assert_allclose(weights, np.array([0, 1, 1, 1, 0]) / 3, rtol=1e-6)
    assert share.tolist() == [1, 0]


@given(LENGTHS, st.integers(1, 5))
def test_a_partition_has_every_index_once_and_balanced_sums(lengths, parts):
    shares = partition(lengths, parts)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(lengths)))
    sums = [int(lengths[share].sum()) for share in shares]
    assert max(sums) - min(sums) <= lengths.max(initial=0)
    assert all((a == b).all() for a, b in zip(shares, partition(lengths.copy(), parts), strict=True))


SEQUENCES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 60)), min_size=1, max_size=30)


def of_lengths(prefix, responses, group_size=4):
    """A batch without contents."""
    batch = TrainBatch(*(np.zeros(0),) * 6, sequence_columns={"group": np.arange(len(prefix)) // group_size})
    batch.sequence_columns["prefix"] = prefix = np.asarray(prefix)
    batch.cu_seqlens = np.concatenate([[0], np.cumsum(prefix + responses)])
    return batch


@given(SEQUENCES, st.integers(1, 5), st.booleans(), st.data())
def test_sequences_are_dealt_once_with_balanced_token_counts(sequences, ranks, prompts_once, data):
    batch = of_lengths(*np.array(sequences).T)
    among = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch))))
    dealt, again = (deal(batch, among, ranks, prompts_once) for _ in range(2))
    assert sorted(np.concatenate(dealt).tolist()) == among.tolist()
    assert all((a == b).all() for a, b in zip(dealt, again, strict=True))
    if prompts_once:
        loads = [tokens_once(batch, mine) for mine in dealt]
        assert max(loads) <= max(tokens_once(batch, mine) for mine in deal(batch, among, ranks, False))


def test_groups_are_dealt_whole_where_prompts_are_long_and_in_pieces_where_there_are_fewer_than_ranks():
    batch = of_lengths(np.full(32, 100), np.arange(32) * 7 % 13 + 5)
    assert all(len(set(mine // 4)) == 4 for mine in deal(batch, np.arange(32), 2, True))
    few = deal(batch, np.arange(8), 4, True)
    assert all(len(mine) == 2 and len(set(mine // 4)) == 1 for mine in few)


@given(LENGTHS, st.integers(1, 300))
@settings(max_examples=200)
def test_micro_batches_hold_every_sequence_once_within_the_budget(lengths, budget):
    cuts = cut_micro_batches(lengths, budget)
    assert sorted(b for cut in cuts for b in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert lengths[cut].sum() <= budget or len(cut) == 1
    fullness = [lengths[cut].sum() for cut in cuts]
    assert all(a + b > budget for i, a in enumerate(fullness) for b in fullness[i + 1 :])  # none could be merged


@given(SEQUENCES, st.integers(1, 300))
def test_micro_batches_with_prompts_once_hold_every_sequence_within_the_budget(sequences, budget):
    prefix, responses = np.array(sequences).T
    batch = of_lengths(prefix, responses)
    lengths, columns = batch.lengths, batch.sequence_columns
    cuts = cut_groups(batch, budget)
    assert sorted(b for cut in cuts for b in cut) == list(range(len(prefix)))
    for cut in cuts:
        shared = prefix - 1
        once = sum(max(shared[b] for b in cut if columns["group"][b] == g) for g in {columns["group"][b] for b in cut})
        assert tokens_once(batch, cut) == sum(lengths[cut] - shared[cut]) + once
        assert sum(lengths[cut]) <= budget or len(cut) == 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.floats(0, 3000))
def test_sequences_are_padded_in_the_blocks_that_cost_least(lengths, block_cost):
    lengths = np.array(lengths)
    found = blocks_of(lengths, list(range(len(lengths))), block_cost)
    assert sorted(b for block in found for b in block) == list(range(len(lengths)))
    cost = lambda blocks: sum(len(block) * max(block) ** 2 + block_cost for block in blocks)
    ordered = sorted(lengths.tolist(), reverse=True)
    cuts = itertools.product([False, True], repeat=len(lengths) - 1)
    every = [
        [ordered[i:j] for i, j in itertools.pairwise([0, *(k + 1 for k, at in enumerate(cut) if at), len(ordered)])]
        for cut in cuts
    ]
    assert cost([lengths[block].tolist() for block in found]) == pytest.approx(min(map(cost, every)))


def test_the_deviation_divides_by_n_minus_one_unless_configured_otherwise(groups):
    batch = build_batch(groups)
    one_less = advantages(batch)
    population = advantages(batch, std_ddof=0)
    # the first group has two samples: √2 between the two
    np.testing.assert_allclose(population[:3], one_less[:3] * np.sqrt(2), rtol=1e-5)


def test_equal_rewards_give_exactly_zero_advantages():
    for size in (1, 3, 7, 8):
        alike = build_batch([group("g", [1], *(sample(i, [5], reward=0.1) for i in range(size)))])
        assert not advantages(alike).any()


def test_overlong_policies_keep_mask_or_penalize(groups):
    batch, centred = build_batch(groups), {"normalize_by_std": False}
    last = slice(6, 8)  # the response of the overlong sample
    keep = shape_rewards(batch, AlgorithmConfig(overlong="keep"), 9)
    assert keep.loss_mask[last].all()
    assert advantages(keep, **centred)[last].tolist() == [1.5, 1.5]
    masked = shape_rewards(batch, AlgorithmConfig(overlong="mask"), 9)
    assert masked.loss_mask.tolist() == [True, False, True, True, True, True, False, False]
    assert advantages(masked, **centred)[5:].tolist() == [0, 0, 0]  # nor does its reward change the group's mean
    penalized = shape_rewards(batch, AlgorithmConfig(overlong="penalize"), 9)
    assert penalized.loss_mask[last].all()
    assert advantages(penalized, **centred)[last].tolist() == [1.25, 1.25]
    assert batch.sequence_columns["rewards"].tolist() == [0, 1, 2, 5]  # the given batch is unchanged


def test_the_overlong_penalty_grows_over_the_buffer():
    samples = [sample(i, [5] * length, 1.0) for i, length in enumerate((5, 6, 7, 8, 9))]
    samples.append(sample(5, [5] * 3, 1.0, finish=FinishReason.TURNS))
    options = AlgorithmConfig(overlong="penalize", overlong_buffer=4, overlong_penalty=0.8)
    batch = shape_rewards(build_batch([group("g", [1], *samples)]), options, max_response_tokens=10)
    np.testing.assert_allclose(batch.sequence_columns["rewards"], [1, 1, 0.8, 0.6, 0.4, 0.2], rtol=1e-6)


def test_the_length_penalty_compares_with_the_group_s_other_samples():
    lengths, rewards = (2, 4, 6, 10), (1.0, 0.0, 0.0, 1.0)
    samples = [sample(i, [5] * length, reward) for i, (length, reward) in enumerate(zip(lengths, rewards, strict=True))]
    alike = group("b", [1], sample(0, [5], 1.0), sample(1, [5], 0.0))
    batch = shape_rewards(build_batch([group("a", [1], *samples), alike]), AlgorithmConfig(length_penalty=0.1), 99)
    np.testing.assert_allclose(batch.sequence_columns["rewards"], [1.05, 0, 0, 0.95, 1, 0], atol=1e-6)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0, 1])), min_size=2, max_size=5),
    st.sampled_from(["keep", "mask", "penalize"]),
)
def test_a_group_has_a_gradient_exactly_if_its_effective_rewards_differ(rows, policy):
    samples = [sample(i, [7], reward, finish=FinishReason(finish)) for i, (reward, finish) in enumerate(rows)]
    batch = shape_rewards(build_batch([group("g", [1], *samples)]), AlgorithmConfig(overlong=policy), 9)
    found = advantages(batch) * batch.loss_mask
    taken = {"keep": 0.0, "mask": None, "penalize": 0.5}[policy]
    effective = {r - taken * f if taken is not None else r for r, f in rows if taken is not None or not f}
    assert found.any() == (len(effective) > 1)


def test_batch_metrics_describe_the_distribution_of_rewards_lengths_and_versions():
    samples = [sample(i, [5] * (i + 1), reward=i / 10, versions=(3,)) for i in range(9)]
    cut = sample(9, [5] * 100, reward=0.9, versions=(3, 4, 4, 7))
    resumed = sample(10, [5] * 11, reward=1.0, versions=(2, 2))  # two spans of one version, such as a new request
    metrics = batch_metrics(build_batch([group("a", [1], *samples[:5]), group("b", [1], *samples[5:], resumed, cut)]))
    assert metrics["fully_async/partial/ratio"] == pytest.approx(1 / 11)
    assert metrics["fully_async/partial/count"] == 1
    assert metrics["fully_async/partial/max_span"] == 4
    assert [metrics[f"critic/rewards/p{p}"] for p in (10, 50, 90)] == pytest.approx([0.1, 0.5, 0.9])
    assert [metrics[f"response_length/p{p}"] for p in (10, 50, 90)] == [2, 6, 11]
    assert 11 < metrics["response_length/p99"] < 100


def test_extremes_are_reduced_over_optimizer_steps_and_means_are_over_all_of_their_tokens():
    one = {"ppo_ratio_max": 1.0, "ppo_ratio_min_negated": -1.0, "ratio_max": 2.0, "ratio_min_negated": -0.5, "lr": 1}
    two = {"ppo_ratio_max": 3.0, "ppo_ratio_min_negated": -0.25, "ratio_max": 1.5, "ratio_min_negated": -0.75, "lr": 2}
    means = {"kl_proximal": 0.5, "mtp/loss_1": 0.5}, {"kl_proximal": 0.0, "mtp/loss_1": 1.0}
    assert step_metrics([one | means[0] | {TRAINED: 1.0}, two | means[1] | {TRAINED: 3.0}]) == {
        "actor/ppo_ratio_max": 3.0,
        "actor/ppo_ratio_min": 0.25,
        "actor/kl_proximal": 0.125,
        "actor/ratio_max": 2.0,
        "actor/ratio_min": 0.5,
        "actor/lr": 2,
        "mtp/loss_1": 0.75,
    }


def test_weights_and_denominators_follow_the_aggregation(groups):
    batch = build_batch(groups)
    weights, share = weights_of(batch)
    assert weights.tolist() == [1, 0, 1, 1, 1, 1, 1, 1]
    assert share.tolist() == [2, 2, 1, 2]
    weights, share = weights_of(batch, loss_aggregation="sequence_mean")
    assert weights.tolist() == [0.5, 0, 0.5, 0.5, 0.5, 1, 0.5, 0.5]
    assert share.tolist() == [1, 1, 1, 1]


def test_learning_rate_schedules():
    rate = lambda step, **kw: learning_rate(OptimizerConfig(lr=1.0, **kw), step, total_steps=12)
    assert [rate(s, warmup_steps=2) for s in (0, 1, 2, 99)] == [0.5, 1.0, 1.0, 1.0]
    linear = [rate(s, schedule="linear", warmup_steps=2, min_lr_ratio=0.2) for s in (0, 2, 7, 12, 99)]
    np.testing.assert_allclose(linear, [0.5, 1.0, 0.6, 0.2, 0.2])
    cosine = [rate(s, schedule="cosine", warmup_steps=2) for s in (2, 7, 12)]
    np.testing.assert_allclose(cosine, [1.0, 0.5, 0.0], atol=1e-12)
    with pytest.raises(ValueError, match="'constant', 'linear' or 'cosine'"):
        rate(0, schedule="step")
