"""The objective: what the items of an algorithm make together, and which option changes what."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.divergence import kl_estimate
from asyncrl.config.schema import AlgorithmConfig, Config
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.objective import Objective
from tests.support.option_effects import CHANGES_THE_GRADIENT, NOT_OF_THE_LOSS, effects, gradient, random_batch

R = 40


def loss_of(options: AlgorithmConfig):
    objective = Objective(Config(algorithm=options))
    return lambda logprobs, entropy, batch: objective.loss({"logprobs": logprobs, "entropy": entropy}, batch)


def batch_of(**columns):
    size = len(columns["weights"])
    return TrainBatch(
        tokens=np.zeros(size + 1, np.int32),
        cu_seqlens=np.array([0, size + 1]),
        rows=np.arange(size),
        targets=np.zeros(size, np.int32),
        row_offsets=np.array([0, size]),
        loss_mask=columns["weights"] > 0,
        columns={name: values.astype(np.float32) for name, values in columns.items()},
    )


@pytest.fixture
def case():
    rng = np.random.default_rng(1)
    draw = lambda: rng.uniform(-3, -0.1, R)
    columns = {
        "weights": (rng.random(R) > 0.3).astype(np.float32),
        "advantages": rng.normal(size=R),
        "behaviour_logprobs": draw(),
        "proximal_logprobs": draw(),
        "reference_logprobs": draw(),
    }
    return draw(), rng.uniform(0.5, 2, R), columns


def naive(logprobs, entropy, columns, config):
    total, figures = (
        0.0,
        dict.fromkeys(["clip_fraction_low", "clip_fraction_high", "tis_truncated", "kl_behaviour", "kl_proximal"], 0.0),
    )
    for r in range(len(logprobs)):
        c = {name: float(np.float32(values[r])) for name, values in columns.items()}
        advantage = c["advantages"]
        if config.anchor == "behaviour":
            anchor, drift, importance = c["behaviour_logprobs"], logprobs[r] - c["behaviour_logprobs"], 1.0
        else:
            anchor, drift = c["proximal_logprobs"], c["proximal_logprobs"] - c["behaviour_logprobs"]
            importance = min(math.exp(drift), config.tis_cap) if config.corrections else 1.0
        ratio = math.exp(logprobs[r] - anchor)
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        d = c["reference_logprobs"] - logprobs[r]
        kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[config.kl_estimator]
        kl *= math.exp(logprobs[r] - c["behaviour_logprobs"]) if config.kl_unbiased else 1.0
        loss = -importance * min(ratio * advantage, clipped * advantage)
        total += c["weights"] * (loss + config.kl_coef * kl - config.entropy_coef * entropy[r])
        figures["clip_fraction_low"] += c["weights"] * (advantage < 0 and ratio < 1 - config.clip_low)
        figures["clip_fraction_high"] += c["weights"] * (advantage > 0 and ratio > 1 + config.clip_high)
        figures["tis_truncated"] += c["weights"] * (math.exp(drift) > config.tis_cap)
        figures["kl_behaviour"] += c["weights"] * (math.exp(drift) - 1 - drift)
        figures["kl_proximal"] += c["weights"] * (ratio - 1 - math.log(ratio))
    return total, figures


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", False), ("k3", True)])
@pytest.mark.parametrize(("anchor", "cap"), [("behaviour", 0.0), ("proximal", 0.0), ("proximal", 1.5)])
def test_the_loss_equals_the_formula(case, estimator, unbiased, anchor, cap):
    logprobs, entropy, columns = case
    config = AlgorithmConfig(
        anchor=anchor,
        clip_low=0.1,
        clip_high=0.3,
        **({"corrections": ["tis"], "tis_cap": cap} if cap else {}),
        kl_coef=0.2,
        kl_estimator=estimator,
        kl_unbiased=unbiased,
        entropy_coef=0.05,
    )
    out = loss_of(config)(torch.tensor(logprobs).float(), torch.tensor(entropy).float(), batch_of(**columns))
    loss, figures = naive(logprobs, entropy, columns, config)
    assert out.loss.item() == pytest.approx(loss, rel=1e-5)
    absent = ({"kl_proximal"} if anchor == "behaviour" else set()) | (set() if cap else {"tis_truncated"})
    for name, value in figures.items():
        if name in absent:
            assert name not in out.sums
        else:
            assert out.sums[name].item() == pytest.approx(value, rel=1e-5), name


def test_importance_is_truncated_at_the_cap_and_reported_before_it():
    columns = {
        "weights": np.array([1, 1, 1, 0]),
        "advantages": np.ones(4),
        "behaviour_logprobs": np.array([-3.0, -1.0, -1.0, -9.0]),
        "proximal_logprobs": np.array([-1.0, -1.0, -2.0, -1.0]),
    }
    logprobs = torch.tensor([-1.0, -1.0, -2.0, -1.0], requires_grad=True)
    out = loss_of(AlgorithmConfig(anchor="proximal", corrections=["tis"], tis_cap=2.0))(
        logprobs, torch.zeros(4), batch_of(**columns)
    )
    out.loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.0, -1.0, -math.exp(-1), 0.0]))
    assert out.sums["tis_truncated"] == 1
    assert out.extremes["ratio_max"].item() == pytest.approx(math.exp(2))  # the untrained e^8 does not count
    assert -out.extremes["ratio_min_negated"].item() == pytest.approx(math.exp(-1))


def test_extremes_of_the_ppo_ratio_cover_trained_tokens_before_the_clip():
    columns = {
        "weights": np.array([1, 1, 1, 0]),
        "advantages": np.ones(4),
        "behaviour_logprobs": np.full(4, -5.0),  # not used in this ratio
        "proximal_logprobs": np.array([-1.0, -2.0, -3.0, -1.0]),
    }
    logprobs = torch.tensor([-1.0, -1.0, -4.0, -9.0])
    out = loss_of(AlgorithmConfig(anchor="proximal"))(logprobs, torch.zeros(4), batch_of(**columns))
    assert out.extremes["ppo_ratio_max"].item() == pytest.approx(math.e)
    assert -out.extremes["ppo_ratio_min_negated"].item() == pytest.approx(1 / math.e)  # not the untrained e^-8


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_clip_higher_lets_good_tokens_grow_further(anchor):
    columns = {
        "weights": np.ones(2),
        "advantages": np.ones(2),
        "behaviour_logprobs": np.zeros(2),
        f"{anchor}_logprobs": np.log([1 / 1.25, 1 / 1.35]),
    }
    logprobs = torch.zeros(2, requires_grad=True)
    config = AlgorithmConfig(anchor=anchor, clip_low=0.2, clip_high=0.3)
    out = loss_of(config)(logprobs, torch.zeros(2), batch_of(**columns))
    out.loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.25, 0.0]))
    assert out.sums["clip_fraction_high"] == 1


def test_without_proximal_logprobs_the_current_policy_stands_for_the_proximal_one(case):
    logprobs, entropy, columns = case
    columns = columns | {"proximal_logprobs": logprobs}
    grads, losses = [], []
    for names in (columns.keys(), columns.keys() - {"proximal_logprobs"}):
        x = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
        out = loss_of(AlgorithmConfig(anchor="proximal"))(
            x, torch.tensor(entropy).float(), batch_of(**{n: columns[n] for n in names})
        )
        out.loss.backward()
        grads.append(x.grad)
        losses.append(out.loss.item())
        assert out.sums["kl_proximal"] == 0
        assert out.extremes["ppo_ratio_max"] == -out.extremes["ppo_ratio_min_negated"] == 1
    assert losses[0] == losses[1]
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_far_apart_policies_stay_finite():
    columns = {"weights": np.ones(1), "advantages": np.ones(1), "behaviour_logprobs": np.array([-500.0])}
    out = loss_of(AlgorithmConfig())(torch.zeros(1), torch.zeros(1), batch_of(**columns))
    assert math.isfinite(out.loss.item())
    assert all(math.isfinite(v.item()) for v in {**out.sums, **out.extremes}.values())


def test_k3_is_never_negative_and_unknown_estimators_are_refused():
    d = torch.linspace(-4, 4, 33)
    assert (kl_estimate(torch.zeros(33), d, "k3") >= 0).all()
    with pytest.raises(ValueError, match="'k1', 'k2' or 'k3'"):
        AlgorithmConfig(kl_coef=0.1, kl_estimator="k4")


def test_every_option_of_the_loss_is_listed():
    assert CHANGES_THE_GRADIENT.keys() | NOT_OF_THE_LOSS == {f.name for f in dataclasses.fields(AlgorithmConfig)}


@pytest.mark.parametrize("option", CHANGES_THE_GRADIENT)
def test_every_enabled_option_changes_some_gradient(option):
    batch, current, entropy = random_batch()
    assert min(effects(option, lambda config: gradient(config, batch, current, entropy, 7, version=3.0))) > 1e-3


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_values_of_untrained_tokens_have_no_effect(case, anchor):
    logprobs, entropy, columns = case
    corrections = ["tis"] if anchor == "proximal" else ["reject"]
    config = AlgorithmConfig(anchor=anchor, corrections=corrections, kl_coef=0.2, entropy_coef=0.05, clip_high=0.3)
    found = []
    for nonsense in (0.0, np.nan, np.inf, -np.inf, 1e30):
        out_of_loss = columns["weights"] == 0
        changed = {n: np.where(out_of_loss & (n != "weights"), nonsense, values) for n, values in columns.items()}
        x, h = (
            torch.tensor(np.where(out_of_loss, nonsense, v), dtype=torch.float32, requires_grad=True)
            for v in (logprobs, entropy)
        )
        out = loss_of(config)(x, h, batch_of(**changed))
        out.loss.backward()
        found.append([out.loss.detach(), x.grad, h.grad, *out.sums.values(), *out.extremes.values()])
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, another, rtol=0, atol=0)
