"""The native sampler compared with naive references: filters, logprobs, random numbers."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollouter.engines.base import SamplingParams
from asyncrl.rollouter.engines.native.sampler import SamplingColumns, TokenMasks, keep_likely, sample, uniforms


def _draw(logits, params, u):
    return sample(logits, SamplingColumns.of(params), torch.as_tensor(u, dtype=torch.float32))


def _naive_support(probs, top_k, top_p, min_p):
    """Ids that survive the filters, computed one token at a time in float64."""
    kept = [i for i, p in enumerate(probs) if p >= np.float32(min_p) * max(probs)]
    kept.sort(key=lambda i: (-probs[i], i))
    if 0 < top_k < len(kept):
        kth = probs[kept[top_k - 1]]
        kept = [i for i in kept if probs[i] >= kth]
    total, reached, survivors = sum(float(probs[i]) for i in kept), 0.0, []
    for i in kept:
        if top_p < 1 and reached >= top_p * total:
            break
        survivors.append(i)
        reached += float(probs[i])
    return set(survivors)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    ties=st.booleans(),
)
def test_filters_keep_exactly_the_tokens_that_a_naive_reference_keeps(seed, top_k, top_p, min_p, ties):
    logits = torch.randn(1, 37, generator=torch.Generator().manual_seed(seed)) * 2
    probs = torch.softmax(logits.round() if ties else logits, -1)
    columns = [torch.tensor([[top_k]]), torch.tensor([[top_p]], dtype=torch.float64), torch.tensor([[min_p]])]
    kept = keep_likely(probs, *columns)
    assert set(kept[0].nonzero().flatten().tolist()) == _naive_support(probs[0].numpy(), top_k, top_p, min_p)
    assert torch.equal(kept[kept > 0], probs[kept > 0])


@pytest.mark.parametrize("vocabulary", [11, 1024, 1030, 5000])
def test_the_drawn_token_is_where_the_cumulative_distribution_passes_the_uniform(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(64, vocabulary, generator=generator) * 3
    u = torch.rand(64, generator=generator)
    tokens, _ = _draw(logits, [None] * 64, u)
    cdf = torch.softmax(logits.double(), -1).cumsum(-1)
    for row, token in enumerate(tokens.tolist()):
        below = cdf[row, token - 1].item() if token else 0.0
        assert below - 1e-6 <= u[row].item() <= cdf[row, token].item() + 1e-6


@pytest.mark.parametrize("vocabulary", [16, 4096])
@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-24])
def test_a_token_without_probability_is_never_drawn_at_the_ends_of_the_unit_interval(vocabulary, u):
    logits = torch.full((4, vocabulary), -torch.inf)
    for row, likely in enumerate(([3], [3, 5], [vocabulary - 2], [0, vocabulary // 2])):
        logits[row, likely] = 1.0
    tokens, logprobs = _draw(logits, [None] * 4, [u] * 4)
    expected = [3, 3, vocabulary - 2, 0] if u == 0 else [3, 5, vocabulary - 2, vocabulary // 2]
    assert tokens.tolist() == expected
    torch.testing.assert_close(logprobs, torch.tensor([0.0, -np.log(2), 0.0, -np.log(2)], dtype=torch.float32))


def test_logprobs_are_of_the_full_vocabulary_at_the_temperature_and_of_temperature_one_when_greedy():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 4
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, top_k=2, top_p=0.5, min_p=0.1),
    ]
    tokens, logprobs = _draw(logits, params, [0.3, 0.6, 0.9, 0.9])
    assert tokens[2] == logits[2].argmax()
    for row, temperature in enumerate((1.0, 0.7, 1.0, 1.3)):
        expected = torch.log_softmax(logits[row] / temperature, -1)[tokens[row]]
        assert abs(expected - logprobs[row]) < 1e-5


def test_draws_over_a_small_vocabulary_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0])
    n = 20_000
    for params in (SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=3, top_p=0.95)):
        u = uniforms(key=7, position=0, count=n)
        tokens, _ = _draw(logits.repeat(n, 1), [params] * n, u)
        columns = [torch.tensor([[x]]) for x in (params.top_k, params.top_p, params.min_p)]
        expected = keep_likely(torch.softmax(logits[None] / params.temperature, -1), *columns)[0]
        expected = (expected / expected.sum() * n).numpy()
        seen = np.bincount(tokens.numpy(), minlength=6)
        assert seen[expected == 0].sum() == 0
        support = expected > 0
        chi2 = ((seen - expected)[support] ** 2 / expected[support]).sum()
        assert chi2 < 20.5  # 5 degrees of freedom: 0.1 %


def test_random_numbers_depend_only_on_key_and_position():
    whole = uniforms(key=2**64 - 3, position=0, count=100)
    np.testing.assert_array_equal(uniforms(key=2**64 - 3, position=40, count=60), whole[40:])
    assert whole.dtype == np.float32
    assert 0 <= whole.min() < whole.max() < 1


def test_neighbouring_keys_and_positions_draw_unrelated_numbers():
    grid = np.stack([uniforms(key, 0, 256) for key in range(256)])
    assert len(np.unique(grid)) > 0.99 * grid.size
    for axis in (0, 1):
        near, far = np.take(grid, range(255), axis).ravel(), np.take(grid, range(1, 256), axis).ravel()
        assert abs(np.corrcoef(near, far)[0, 1]) < 0.02
    stride = 0x9E3779B97F4A7C15  # keys one stride apart must not share a shifted stream
    assert not np.intersect1d(uniforms(5, 0, 64), uniforms(5 + stride, 0, 64)).size


@pytest.mark.parametrize("size", [24, 1025, 32001])
def test_a_nan_row_gives_a_token_of_the_vocabulary(size):
    logits = torch.full((2, size), torch.nan)
    logits[1] = 0.0
    tokens, logprobs = sample(logits, SamplingColumns.of([SamplingParams()] * 2), torch.full((2,), 0.999))
    assert (tokens < size).all()
    assert logprobs.isnan().tolist() == [True, False]


def test_rows_with_biases_and_masks_draw_from_the_changed_distribution_and_other_rows_as_before():
    size, n = 70, 6  # not a multiple of a word's bits
    logits = torch.randn(n, size, generator=torch.Generator().manual_seed(3))
    u = torch.rand(n, generator=torch.Generator().manual_seed(4))
    plain = [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=0.0)] * 2
    biased = [
        dataclasses.replace(p, logit_bias=((3, 4.0), (69, -2.5))) if row in (1, 4) else p for row, p in enumerate(plain)
    ]
    allowed = {1: [3, 31, 32, 69], 2: [63, 64], 5: [69]}
    words = np.zeros((3, 3), np.int32)
    for words_W, tokens in zip(words, allowed.values()):
        for token in tokens:
            words_W.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))
    masks = TokenMasks(torch.tensor(list(allowed)), torch.from_numpy(words))
    before = logits.clone()
    tokens, logprobs = sample(logits, SamplingColumns.of(biased), u, masks)
    assert torch.equal(logits, before)
    free = sample(logits, SamplingColumns.of(plain), u)
    expected = logits.clone()
    for row in (1, 4):
        expected[row, 3] += 4.0
        expected[row, 69] -= 2.5
    for row, kept in allowed.items():
        assert tokens[row] in kept
        others = [token for token in range(size) if token not in kept]
        expected[row, others] = -torch.inf
    for row in range(n):
        temperature = plain[row].temperature or 1.0
        logprob = torch.log_softmax(expected[row] / temperature, -1)[tokens[row]]
        assert abs(logprob - logprobs[row]) < 1e-5
        if row in (0, 3):
            assert (tokens[row], logprobs[row]) == (free[0][row], free[1][row])
    assert logprobs[5] == 0.0


def test_columns_without_biases_have_none():
    assert SamplingColumns.of([SamplingParams(), None]).biases is None
