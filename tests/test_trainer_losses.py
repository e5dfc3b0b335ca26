"""The policy loss against its formula, written out token by token."""

import math

import numpy as np
import pytest
import torch

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.trainer.backend import TrainBatch
from asyncrl.trainer.losses import clipped_policy_loss, kl_estimate

R = 40


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
        advantage, drift = c["advantages"], c["proximal_logprobs"] - c["behaviour_logprobs"]
        ratio = math.exp(logprobs[r] - c["proximal_logprobs"])
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        importance = min(math.exp(drift), config.importance_cap) if config.importance_cap else 1.0
        d = c["reference_logprobs"] - logprobs[r]
        kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[config.kl_estimator]
        loss = -importance * min(ratio * advantage, clipped * advantage)
        total += c["weights"] * (loss + config.kl_coef * kl - config.entropy_coef * entropy[r])
        figures["clip_fraction_low"] += c["weights"] * (advantage < 0 and ratio < 1 - config.clip_low)
        figures["clip_fraction_high"] += c["weights"] * (advantage > 0 and ratio > 1 + config.clip_high)
        figures["tis_truncated"] += c["weights"] * (0 < config.importance_cap < math.exp(drift))
        figures["kl_behaviour"] += c["weights"] * (math.exp(drift) - 1 - drift)
        figures["kl_proximal"] += c["weights"] * (ratio - 1 - math.log(ratio))
    return total, figures


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_the_loss_is_the_formula(case, estimator, cap):
    logprobs, entropy, columns = case
    config = AlgorithmConfig(
        clip_low=0.1, clip_high=0.3, importance_cap=cap, kl_coef=0.2, kl_estimator=estimator, entropy_coef=0.05
    )
    out = clipped_policy_loss(config)(
        torch.tensor(logprobs).float(), torch.tensor(entropy).float(), batch_of(**columns)
    )
    loss, figures = naive(logprobs, entropy, columns, config)
    assert out.loss.item() == pytest.approx(loss, rel=1e-5)
    for name, value in figures.items():
        assert out.sums[name].item() == pytest.approx(value, rel=1e-5), name


def test_importance_is_truncated_at_the_cap_and_reported_before_it():
    columns = {
        "weights": np.array([1, 1, 1, 0]),
        "advantages": np.ones(4),
        "behaviour_logprobs": np.array([-3.0, -1.0, -1.0, -9.0]),
        "proximal_logprobs": np.array([-1.0, -1.0, -2.0, -1.0]),
    }
    logprobs = torch.tensor([-1.0, -1.0, -2.0, -1.0], requires_grad=True)
    out = clipped_policy_loss(AlgorithmConfig(importance_cap=2.0))(logprobs, torch.zeros(4), batch_of(**columns))
    out.loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.0, -1.0, -math.exp(-1), 0.0]))
    assert out.sums["tis_truncated"] == 1
    assert out.extremes["ratio_max"].item() == pytest.approx(math.exp(2))  # the untrained e^8 does not count
    assert -out.extremes["ratio_min_negated"].item() == pytest.approx(math.exp(-1))


def test_extremes_of_the_ppo_ratio_are_those_of_trained_tokens_before_the_clip():
    columns = {
        "weights": np.array([1, 1, 1, 0]),
        "advantages": np.ones(4),
        "behaviour_logprobs": np.full(4, -5.0),  # not their ratio
        "proximal_logprobs": np.array([-1.0, -2.0, -3.0, -1.0]),
    }
    logprobs = torch.tensor([-1.0, -1.0, -4.0, -9.0])
    out = clipped_policy_loss(AlgorithmConfig())(logprobs, torch.zeros(4), batch_of(**columns))
    assert out.extremes["ppo_ratio_max"].item() == pytest.approx(math.e)
    assert -out.extremes["ppo_ratio_min_negated"].item() == pytest.approx(1 / math.e)  # not the untrained e^-8


def test_clip_higher_lets_good_tokens_grow_further():
    columns = {
        "weights": np.ones(2),
        "advantages": np.ones(2),
        "behaviour_logprobs": np.zeros(2),
        "proximal_logprobs": np.log([1 / 1.25, 1 / 1.35]),
    }
    logprobs = torch.zeros(2, requires_grad=True)
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.3, importance_cap=0)
    out = clipped_policy_loss(config)(logprobs, torch.zeros(2), batch_of(**columns))
    out.loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.25, 0.0]))
    assert out.sums["clip_fraction_high"] == 1


def test_without_proximal_logprobs_the_current_policy_is_the_proximal_one(case):
    logprobs, entropy, columns = case
    columns = columns | {"proximal_logprobs": logprobs}
    grads, losses = [], []
    for names in (columns.keys(), columns.keys() - {"proximal_logprobs"}):
        x = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
        out = clipped_policy_loss(AlgorithmConfig())(
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
    out = clipped_policy_loss(AlgorithmConfig())(torch.zeros(1), torch.zeros(1), batch_of(**columns))
    assert math.isfinite(out.loss.item())
    assert all(math.isfinite(v.item()) for v in {**out.sums, **out.extremes}.values())


def test_k3_is_never_negative_and_unknown_estimators_are_refused():
    d = torch.linspace(-4, 4, 33)
    assert (kl_estimate(torch.zeros(33), d, "k3") >= 0).all()
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(d, d, "k4")
    with pytest.raises(ValueError, match="k1, k2, k3"):
        clipped_policy_loss(AlgorithmConfig(kl_coef=0.1, kl_estimator="k4"))
