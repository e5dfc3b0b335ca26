"""Every registered item of an algorithm against its published formula, and what must hold for all of them."""

import itertools
import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.batch_view import BatchView
from asyncrl.algorithms.items import ADVANTAGES, CORRECTIONS, SURROGATES
from asyncrl.config.schema import AlgorithmConfig, Config, RolloutConfig
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.objective import Objective
from asyncrl.trainer.segments import RowSegments
from tests.support import formulas
from tests.support.formulas import Case

SEEDS = range(8)
#: options with which each item is compared, beside its defaults
OPTIONS = {
    "grpo": [{}, {"normalize_by_std": False}, {"std_ddof": 0}],
    "reinforce_pp": [{}, {"group_baseline": True}],
    "clip": [{}, {"clip_low": 0.1, "clip_high": 0.4}, {"dual_clip": 1.5}],
    "gspo": [{}, {"clip_low": 0.01, "clip_high": 0.02}],
    "cispo": [{}, {"clip_low": 1.0, "clip_high": 0.5}],
    "sapo": [{}, {"sapo_tau_positive": 0.7, "sapo_tau_negative": 2.0}],
    "tis": [{"tis_level": level, "tis_cap": 1.2} for level in ("token", "sequence", "geometric")],
    "mis": [{"mis_level": level, "mis_low": 0.7} for level in ("token", "sequence", "geometric")],
    "reject": [{"reject_level": level, "reject_low": 0.8} for level in ("token", "sequence", "geometric")],
}


def cases(registry, references):
    assert set(references) == set(registry.names()), "an item without its formula in tests/support/formulas.py"
    return [(name, options) for name in registry.names() for options in OPTIONS.get(name, [{}])]


def columns(case: Case):
    """(row offsets, trained, current, anchor, behaviour, reference) of a case."""
    sequence, *rest = (np.array(column) for column in zip(*case.tokens, strict=True))
    counts = np.bincount(sequence, minlength=len(case.sequences))
    return np.concatenate([[0], np.cumsum(counts)]), *rest


def double(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values, dtype=np.float64))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "options"), cases(ADVANTAGES, formulas.ADVANTAGES))
def test_an_advantage_equals_its_formula(name, options, seed):
    case, config = Case.random(seed).penalized(0.3 * (seed % 2)), AlgorithmConfig(advantage=name, **options)
    row_offsets, trained, *_ = columns(case)
    counted = np.isin(np.arange(len(case.rewards)), case.trained_samples())
    rewards, group = np.array(case.rewards, np.float32), np.array(case.group)
    penalty = np.array(case.penalty, np.float32)
    case.rewards, case.penalty = rewards.astype(float).tolist(), penalty.astype(float).tolist()  # as rounded
    view = BatchView(rewards, group, counted, np.array(case.sequences), row_offsets, trained, penalty, 0 * penalty)
    found = ADVANTAGES.find(name).compute(view, config)
    expected = np.array(formulas.ADVANTAGES[name](case, vars(config)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[trained], expected.astype(np.float32)[trained], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "options"), cases(SURROGATES, formulas.SURROGATES))
def test_a_surrogate_and_its_gradient_equal_its_formula(name, options, seed):
    case, config = Case.random(seed), AlgorithmConfig(surrogate=name, **options)
    row_offsets, trained, current, anchor, *_ = columns(case)
    advantages = np.random.default_rng(seed).normal(size=len(trained)) if name != "gspo" else None
    if advantages is None:  # of its sequence, as the formula is that of whole sequences
        advantages = np.random.default_rng(seed).normal(size=len(case.sequences))[[t[0] for t in case.tokens]]
    logprobs = double(current).requires_grad_()
    segments = RowSegments(row_offsets, torch.tensor(trained))
    loss, figures = SURROGATES.find(name).loss(logprobs, double(anchor), double(advantages), segments, config)
    (loss * torch.tensor(trained)).sum().backward()
    expected = formulas.SURROGATES[name](case, advantages.tolist(), vars(config))
    assert list(expected) == np.flatnonzero(trained).tolist()
    values, slopes = np.array(list(expected.values())).T
    np.testing.assert_allclose(loss.detach().numpy()[trained], values, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(logprobs.grad.numpy()[trained], slopes, rtol=1e-10, atol=1e-12)
    assert not logprobs.grad.numpy()[~trained].any()
    assert all(figure.shape == logprobs.shape for figure in figures.values())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "options"), cases(CORRECTIONS, formulas.CORRECTIONS))
def test_a_correction_equals_its_formula(name, options, seed):
    case, config = Case.random(seed), AlgorithmConfig(corrections=[name], **options)
    row_offsets, trained, _, anchor, behaviour, _ = columns(case)
    segments = RowSegments(row_offsets, torch.tensor(trained))
    weights, _ = CORRECTIONS.find(name).weights(double(anchor) - double(behaviour), segments, config)
    expected = list(formulas.CORRECTIONS[name](case, vars(config)).values())
    np.testing.assert_allclose(weights.numpy()[trained], expected, rtol=1e-10)


# -- whole objectives --------------------------------------------------------------------------------------------------


def batch_of(case: Case, sequences=None) -> TrainBatch:
    row_offsets, trained, _, anchor, behaviour, reference = columns(case)
    owned = np.array([len(case.trained_of(q)) for q in range(len(case.sequences))])
    sample = np.array(case.sequences)
    size = len(trained)
    batch = TrainBatch(
        tokens=np.zeros(size, np.int32),
        cu_seqlens=row_offsets,
        rows=np.arange(size),
        targets=np.zeros(size, np.int32),
        row_offsets=row_offsets,
        loss_mask=trained,
        columns={
            "behaviour_logprobs": behaviour,
            "proximal_logprobs": anchor,
            "reference_logprobs": reference,
            "version": np.random.default_rng(0).integers(0, 4, size),
            "token_rewards": np.zeros(size, np.float32),
        },
        sequence_columns={
            "group": np.array(case.group)[sample],
            "sample": sample,
            "rewards": np.array(case.rewards, np.float32)[sample],
            "finish": np.zeros(len(sample), np.uint8),
            "owned": owned,
        },
    )
    return batch


def objective(**options) -> Objective:
    return Objective(Config(algorithm=AlgorithmConfig(**options), rollout=RolloutConfig(max_response_tokens=7)))


def evaluated(made: Objective, batch: TrainBatch, logprobs: np.ndarray, cuts=None):
    """(loss, gradient) of a prepared batch, over micro-batches of the sequences in ``cuts``."""
    x = double(logprobs).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for cut in cuts or [range(len(batch))]:
        rows = np.concatenate([np.arange(batch.row_offsets[b], batch.row_offsets[b + 1]) for b in cut])
        part = doubles(batch.select(list(cut)))
        total = (
            total + made.loss({"logprobs": x[rows], "entropy": torch.zeros(len(rows), dtype=torch.float64)}, part).loss
        )
    total.backward()
    return total.item(), x.grad.numpy()


def doubles(batch: TrainBatch) -> TrainBatch:
    for name in ("weights", "advantages", "anchor_share"):
        if name in batch.columns:
            batch.columns[name] = batch.columns[name].astype(np.float64)
    return batch


#: whole algorithms: every item, anchor, estimator and aggregation in some of them
WHOLE = [
    {"anchor": "behaviour", "kl_coef": 0.1, "kl_estimator": "k2"},
    {"anchor": "proximal", "corrections": ["tis"], "tis_level": "sequence", "loss_aggregation": "sequence_mean"},
    {"anchor": "proximal", "corrections": ["mis", "reject"], "loss_aggregation": "sample_mean", "surrogate": "sapo"},
    {"surrogate": "gspo", "clip_low": 0.05, "clip_high": 0.05, "loss_aggregation": "sequence_mean", "kl_coef": 0.1},
    {"surrogate": "cispo", "advantage": "rloo", "loss_aggregation": "constant", "kl_coef": 0.1, "kl_unbiased": True},
    {"advantage": "reinforce_pp", "dual_clip": 3.0, "kl_coef": 0.2, "kl_estimator": "k1", "kl_unbiased": True},
    {"advantage": "pass_at_k", "corrections": ["reject"], "surrogate": "clip"},
    {"advantage": "reinforce_pp", "kl_reward_coef": 0.3, "group_baseline": True},
    {"advantage": "grpo", "kl_reward_coef": 0.1, "anchor": "proximal", "corrections": ["tis"]},
]
whole = pytest.mark.parametrize("options", WHOLE, ids=lambda o: "-".join(map(str, o.values())))


@pytest.mark.parametrize("seed", range(3))
@whole
def test_an_objective_equals_the_formulas_of_its_items(options, seed):
    case, config = Case.random(seed), AlgorithmConfig(**options)
    made, batch = objective(**options), batch_of(case)
    shares = made.prepare(batch)
    if config.anchor == "behaviour":
        case.tokens = [(q, trained, current, b, b, r) for q, trained, current, _, b, r in case.tokens]
        corrected = [(q, trained, current, current, b, r) for q, trained, current, _, b, r in case.tokens]
        drifted = Case(case.sequences, corrected, case.rewards, case.group)  # masks compare current and behaviour
    else:
        drifted = case
    advantages = formulas.ADVANTAGES[config.advantage](case.penalized(config.kl_reward_coef), vars(config))
    values = formulas.SURROGATES[config.surrogate](case, advantages, vars(config))
    weights = [formulas.CORRECTIONS[name](drifted, vars(config)) for name in config.corrections]
    total, slopes = 0.0, np.zeros(len(case.tokens))
    for r, factor in formulas.aggregation(case, config.loss_aggregation, 7).items():
        loss, slope = values[r]
        weight = math.prod(of[r] for of in weights)
        _, _, current, _, behaviour, reference = case.tokens[r]
        kl, kl_slope = formulas.kl(current, reference, behaviour, vars(config))
        total += factor * (weight * loss + config.kl_coef * kl)
        slopes[r] = factor * (weight * slope + config.kl_coef * kl_slope)
    loss, gradient = evaluated(made, batch, np.array([t[2] for t in case.tokens]))
    # float32 weights and advantages, as a run has them
    assert loss / shares.sum() == pytest.approx(total, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(gradient / shares.sum(), slopes, rtol=1e-5, atol=1e-7)


@whole
def test_no_cut_into_micro_batches_and_no_order_changes_the_gradient(options):
    case, made = Case.random(3), objective(**options)
    batch, logprobs = batch_of(case), np.array([t[2] for t in case.tokens])
    made.prepare(batch, version=3.0)
    loss, gradient = evaluated(made, batch, logprobs)
    for cuts in (
        [[b] for b in range(len(batch))],
        [range(len(batch))[::-1]],
        [range(0, len(batch), 2), range(1, len(batch), 2)],
    ):
        cut_loss, cut_gradient = evaluated(made, batch, logprobs, cuts)
        assert cut_loss == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(cut_gradient, gradient, rtol=1e-12, atol=1e-15)


@whole
def test_the_order_of_groups_changes_nothing(options):
    case, made = Case.random(4), objective(**options)
    batch, logprobs = batch_of(case), np.array([t[2] for t in case.tokens])
    made.prepare(batch)
    _, gradient = evaluated(made, batch, logprobs)
    order = [q for g in (2, 0, 1) for q, s in enumerate(case.sequences) if case.group[s] == g]
    rows = np.concatenate([np.arange(batch.row_offsets[q], batch.row_offsets[q + 1]) for q in order])
    shuffled = batch_of(case).select(order)
    _, shuffled.sequence_columns["sample"] = np.unique(  # samples are numbered in the order of the batch
        [order.index(case.sequences.index(case.sequences[q])) for q in order], return_inverse=True
    )
    made.prepare(shuffled)
    _, found = evaluated(made, shuffled, logprobs[rows])
    np.testing.assert_allclose(found, gradient[rows], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("surrogate", SURROGATES.names())
@pytest.mark.parametrize("corrections", [[], *([name] for name in CORRECTIONS.names())], ids=str)
def test_on_policy_the_gradient_is_that_of_reinforce(surrogate, corrections):
    case = Case.random(5, spread=0.0)
    made = objective(surrogate=surrogate, corrections=corrections, anchor="proximal", advantage="rloo")
    batch = batch_of(case)
    shares = made.prepare(batch)
    _, gradient = evaluated(made, batch, np.array([t[2] for t in case.tokens]))
    expected = np.where(batch.loss_mask, -batch.columns["advantages"], 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-9)
    assert shares.sum() == batch.loss_mask.sum()


@whole
def test_what_is_not_trained_changes_nothing(options):
    case, made = Case.random(6), objective(**options)
    logprobs, found = np.array([t[2] for t in case.tokens]), []
    for nonsense in (0.0, np.nan, -np.inf, 1e30):
        batch = batch_of(case)
        for name in ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs"):
            batch.columns[name] = np.where(batch.loss_mask, batch.columns[name], nonsense)
        made.prepare(batch)
        batch.columns["advantages"] = np.where(batch.loss_mask, batch.columns["advantages"], nonsense).astype(
            np.float32
        )
        found.append(evaluated(made, batch, np.where(batch.loss_mask, logprobs, nonsense)))
    for loss, gradient in found[1:]:
        assert loss == found[0][0]
        np.testing.assert_array_equal(gradient, found[0][1])


@pytest.mark.parametrize("far", [500.0, -500.0])
@whole
def test_far_apart_policies_stay_finite_in_float32(options, far):
    case, made = Case.random(7), objective(**options)
    batch = batch_of(case)
    made.prepare(batch)
    for name in ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs"):
        batch.columns[name] = (batch.columns[name] + (far if far < 0 else 0)).astype(np.float32)
    x = torch.tensor([t[2] - max(far, 0) for t in case.tokens], dtype=torch.float32, requires_grad=True)
    out = made.loss({"logprobs": x, "entropy": torch.zeros(len(x))}, batch)
    out.loss.backward()
    assert all(torch.isfinite(v).all() for v in (out.loss, x.grad, *out.sums.values(), *out.extremes.values()))


@pytest.mark.parametrize(("version", "step"), [(3.0, 1.0), (3.5, 0.5)])
def test_the_loglinear_anchor_lies_between_behaviour_and_current_policy_by_the_token_s_age(version, step):
    case = Case.random(8)
    made, batch = objective(anchor="loglinear", corrections=["tis"]), batch_of(case)
    made.prepare(batch, version, step)
    current = np.array([t[2] for t in case.tokens])
    behaviour, born = batch.columns["behaviour_logprobs"], batch.columns["version"]
    share = (version - born) / (version + step - born)
    proximal = objective(anchor="proximal", corrections=["tis"])
    other = batch_of(case)
    proximal.prepare(other)
    other.columns["proximal_logprobs"] = behaviour + share * (current - behaviour)
    found, expected = evaluated(made, batch, current), evaluated(proximal, other, current)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-8)
    assert (share[born == math.floor(version)] == (0 if version == 3 else 0.5)).all()


def test_every_item_is_part_of_some_whole_objective():
    used = [AlgorithmConfig(**options) for options in WHOLE]
    assert {o.advantage for o in used} == set(ADVANTAGES.names())
    assert {o.surrogate for o in used} == set(SURROGATES.names())
    assert set(itertools.chain(*(o.corrections for o in used))) == set(CORRECTIONS.names())
