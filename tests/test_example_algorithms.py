"""The items of docs/extending.md, selected by their import paths, implement their published formulas."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.algorithms.items import CORRECTIONS, SURROGATES
from asyncrl.config.algorithm_checks import problems
from asyncrl.config.schema import AlgorithmConfig, Config
from asyncrl.trainer.segments import RowSegments
from tests.support.trainer import make_config, make_groups

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLES = ("topr", "opsm", "m2po")


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "examples")


def gradients(name, options, logprobs, behaviour, advantages, row_offsets):
    item = SURROGATES.find(f"{name}:SURROGATE")
    config = AlgorithmConfig(surrogate=f"{name}:SURROGATE", **options)
    assert list(problems(Config(algorithm=config))) == []
    x = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    segments = RowSegments(row_offsets, torch.ones(len(logprobs), dtype=torch.bool))
    behaviour, advantages = (torch.tensor(v, dtype=torch.float64) for v in (behaviour, advantages))
    loss, _ = item.loss(x, behaviour, advantages, segments, config.read_by(item))
    loss.sum().backward()
    return x.grad.numpy()


@pytest.mark.parametrize("seed", range(5))
def test_topr_weighs_negative_sequences_by_their_ratio_up_to_the_cap(seed):
    rng = np.random.default_rng(seed)
    row_offsets, advantages = np.array([0, 3, 4, 9]), np.repeat([1.5, -0.5, -1.0], [3, 1, 5])
    logprobs, behaviour = rng.uniform(-2, -0.1, (2, 9))
    found = gradients("topr", {"args": {"topr_cap": 0.8}}, logprobs, behaviour, advantages, row_offsets)
    for first, end in itertools.pairwise(row_offsets):
        ratio = math.exp(sum(logprobs[first:end]) - sum(behaviour[first:end]))
        weight = min(ratio, 0.8) if advantages[first] < 0 else 1.0
        np.testing.assert_allclose(found[first:end], -weight * advantages[first], rtol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_opsm_masks_negative_sequences_that_the_policy_has_left(seed):
    rng = np.random.default_rng(seed)
    row_offsets, advantages = np.array([0, 3, 4, 9]), np.repeat([1.5, -0.5, -1.0], [3, 1, 5])
    logprobs, behaviour = rng.uniform(-2, -0.1, (2, 9))
    found = gradients(
        "opsm", {"clip_high": 9.0, "args": {"opsm_delta": 0.2}}, logprobs, behaviour, advantages, row_offsets
    )
    for first, end in itertools.pairwise(row_offsets):
        left = sum(behaviour[first:end] - logprobs[first:end]) / (end - first) > 0.2
        for r in range(first, end):
            ratio = math.exp(logprobs[r] - behaviour[r])
            trained = ratio <= 10.0 if advantages[r] > 0 else ratio >= 0.8 and not left
            assert found[r] == pytest.approx(-advantages[r] * ratio * trained, rel=1e-10)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3, 99.0])
def test_m2po_masks_the_fewest_tokens_with_which_the_second_moment_is_small(seed, threshold):
    rng = np.random.default_rng(seed)
    log_ratio, trained = rng.normal(0, 0.5, 30).round(1), rng.random(30) > 0.2  # with ties
    item = CORRECTIONS.find("m2po:CORRECTION")
    config = AlgorithmConfig(corrections=["m2po:CORRECTION"], args={"m2_threshold": threshold})
    assert list(problems(Config(algorithm=config))) == []
    segments = RowSegments(np.array([0, 12, 30]), torch.tensor(trained))
    weights, figures = item.weights(torch.tensor(log_ratio), segments, config.read_by(item))
    kept, expected = weights.numpy()[trained] == 1, log_ratio[trained] ** 2
    order = np.argsort(expected, kind="stable")
    count = max(k for k in range(len(order) + 1) if k == 0 or expected[order[:k]].mean() <= threshold)
    assert np.array_equal(np.flatnonzero(kept), np.sort(order[:count]))
    assert np.array_equal(figures["m2_masked"].numpy()[trained], ~kept)


def test_m2po_sees_the_tokens_of_a_whole_step(checkpoint, start_rank):
    options = {"corrections": ["m2po:CORRECTION"], "args": {"m2_threshold": 2.0}}
    found = []
    for cut in ({}, {"max_tokens_per_micro_batch": 1}):
        config = make_config(checkpoint, **options, **cut)
        found.append(start_rank(config).train(0, make_groups())["actor/m2_masked"])
    assert 0.1 < found[0] < 0.9
    assert found[1] == pytest.approx(found[0])
    free = start_rank(make_config(checkpoint, corrections=["m2po:CORRECTION"], args={"m2_threshold": 1e9}))
    assert free.train(0, make_groups())["actor/m2_masked"] == 0


def test_a_rank_trains_with_an_item_from_elsewhere(checkpoint, start_rank):
    config = make_config(checkpoint, surrogate="topr:SURROGATE", args={"topr_cap": 0.5})
    metrics = start_rank(config).train(0, make_groups())
    assert 0 < metrics["actor/topr_weight"] <= 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"topr_top": 1.0}, "algorithm.args: no selected item reads 'topr_top'; expected topr_cap"),
        ({"topr_cap": 0.0}, "algorithm.args.topr_cap: expected more than 0, found 0.0"),
        ({"topr_cap": "much"}, "algorithm.args.topr_cap: expected float, found 'much'"),
        ({"advantage": "rloo"}, "algorithm.args: expected advantage beside args, as algorithm.advantage"),
    ],
)
def test_its_options_are_checked(options, expected):
    algorithm = AlgorithmConfig(surrogate="topr:SURROGATE", args=options)
    assert list(problems(Config(algorithm=algorithm))) == [expected]


def test_options_that_an_item_shares_with_the_built_in_ones_come_from_there():
    algorithm = AlgorithmConfig(surrogate="opsm:SURROGATE", clip_high=0.5, args={"opsm_delta": 0.2})
    options = algorithm.read_by(SURROGATES.find(algorithm.surrogate))
    assert (options.clip_low, options.clip_high, options.opsm_delta) == (0.2, 0.5, 0.2)
    assert list(problems(Config(algorithm=algorithm))) == []


@pytest.mark.parametrize("name", ["topr", "opsm"])
def test_those_that_are_defined_for_one_anchor_refuse_others(name):
    algorithm = AlgorithmConfig(surrogate=f"{name}:SURROGATE", anchor="proximal", corrections=["tis"])
    expected = f"algorithm.anchor: {name}:SURROGATE is defined for behaviour, found proximal"
    assert list(problems(Config(algorithm=algorithm))) == [expected]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_shows_the_whole_example(name):
    assert (DOCS / "examples" / f"{name}.py").read_text() in (DOCS / "extending.md").read_text()
