"""Items of algorithms against values that a public implementation computed once, outside of these tests.

`tests/golden/algorithms.json` has six samples of one sequence in two groups, and what verl's functions made of them in
float64 (its ``source``). Deliberate differences, which the samples avoid: verl clamps GSPO's log-ratio at 10 and ours
is clamped at ±20; verl's REINFORCE++ gives no return to tokens before a masked one, ours is the same for all of a
sample's; a group of one sample has advantage 0 here, and its reward there.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.algorithms.aggregation import token_weights
from asyncrl.algorithms.batch_view import BatchView
from asyncrl.algorithms.divergence import kl_estimate
from asyncrl.algorithms.items import ADVANTAGES, CORRECTIONS, SURROGATES
from asyncrl.config.schema import AlgorithmConfig
from asyncrl.trainer.segments import RowSegments

GOLDEN = json.loads((Path(__file__).parent / "golden/algorithms.json").read_text())
MASK = np.array(GOLDEN["mask"], bool)
#: of the samples' tokens, without padding but with those that are not trained
INSIDE = np.flip(np.maximum.accumulate(np.flip(MASK, 1), 1), 1)
OFFSETS = np.concatenate([[0], np.cumsum(INSIDE.sum(1))])
TRAINED = MASK[INSIDE]


def tokens(name) -> torch.Tensor:
    return torch.tensor(np.array(GOLDEN[name])[INSIDE])


def ids(of):
    return f"{of.get('item', '')}-{of['options']}"


def view() -> BatchView:
    rewards = np.array(GOLDEN["rewards"], np.float32)
    group = np.unique(GOLDEN["group"], return_inverse=True)[1]
    counted, sample, penalty = np.ones(len(rewards), bool), np.arange(len(rewards)), np.zeros(len(TRAINED))
    return BatchView(rewards, group, counted, sample, OFFSETS, TRAINED, penalty, penalty)


@pytest.mark.parametrize("of", GOLDEN["advantage"], ids=ids)
def test_advantages(of):
    found = ADVANTAGES.find(of["item"]).compute(view(), AlgorithmConfig(advantage=of["item"], **of["options"]))
    np.testing.assert_allclose(found, np.repeat(of["values"], np.diff(OFFSETS)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of", GOLDEN["surrogate"], ids=ids)
def test_surrogates_and_their_gradients(of):
    options = AlgorithmConfig(surrogate=of["item"], loss_aggregation=of["aggregation"], **of["options"])
    logprobs, advantages = tokens("current").requires_grad_(), np.repeat(GOLDEN["advantages"], np.diff(OFFSETS))
    segments = RowSegments(OFFSETS, torch.tensor(TRAINED))
    loss, _ = SURROGATES.find(of["item"]).loss(logprobs, tokens("anchor"), torch.tensor(advantages), segments, options)
    terms = loss * torch.tensor(weights(options))  # of float32 weights
    terms.sum().backward()
    assert terms.sum().item() == pytest.approx(of["loss"], abs=1e-7 * terms.abs().sum().item())
    np.testing.assert_allclose(logprobs.grad.numpy(), np.array(of["gradient"])[INSIDE], rtol=1e-6, atol=1e-9)


def weights(options) -> np.ndarray:
    samples, owned = np.arange(len(MASK)), MASK.sum(1)
    of_tokens, shares = token_weights(TRAINED, OFFSETS, samples, owned, options, 1)
    return of_tokens.astype(np.float64) / shares.sum()


@pytest.mark.parametrize("of", GOLDEN["correction"], ids=ids)
def test_corrections(of):
    options, segments = (
        AlgorithmConfig(corrections=[of["item"]], **of["options"]),
        RowSegments(OFFSETS, torch.tensor(TRAINED)),
    )
    found, _ = CORRECTIONS.find(of["item"]).weights(tokens("anchor") - tokens("behaviour"), segments, options)
    np.testing.assert_allclose(found.numpy()[TRAINED], np.array(of["values"])[INSIDE][TRAINED], rtol=1e-9)


@pytest.mark.parametrize("of", GOLDEN["kl"], ids=lambda of: of["estimator"])
def test_kl_estimates(of):
    found = kl_estimate(tokens("current"), tokens("reference"), of["estimator"])
    np.testing.assert_allclose(found.numpy(), np.array(of["values"])[INSIDE], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("of", GOLDEN["aggregation"], ids=lambda of: of["how"])
def test_aggregations(of):
    found = (tokens("current").numpy() * weights(AlgorithmConfig(loss_aggregation=of["how"]))).sum()
    assert found == pytest.approx(of["loss"], rel=1e-6)
