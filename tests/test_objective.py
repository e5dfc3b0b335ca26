"""The objective: what the items of an algorithm make together, and which option changes what."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.divergence import kl_estimate
from asyncrl.algorithms.rewards import FilterOptions
from asyncrl.config.schema import AlgorithmConfig, Config, RolloutConfig
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.batches import shape_rewards, trained_tokens
from asyncrl.trainer.objective import Objective

R = 40


def loss_of(options: AlgorithmConfig):
    return Objective(Config(algorithm=options)).loss


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
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(d, d, "k4")
    with pytest.raises(ValueError, match="'k1', 'k2' or 'k3'"):
        AlgorithmConfig(kl_coef=0.1, kl_estimator="k4")


PROXIMAL = {"anchor": "proximal"}
TIS, MIS, REJECT = ({**PROXIMAL, "corrections": [name]} for name in ("tis", "mis", "reject"))
KL = {"kl_coef": 0.1}
LEVELS = ("token", "sequence", "geometric")

#: option of the loss → (other options, value); each of these must give another gradient
CHANGES_THE_GRADIENT = {
    "advantage": [({}, name) for name in ("grpo", "rloo", "reinforce_pp", "pass_at_k")],
    "surrogate": [({}, name) for name in ("clip", "gspo", "cispo", "sapo")],
    "anchor": [({}, "behaviour"), ({}, "proximal"), ({}, "loglinear")],
    "corrections": [
        ({**PROXIMAL, "reject_low": 0.9}, names) for names in ([], ["tis"], ["mis"], ["reject"], ["tis", "reject"])
    ],
    "normalize_by_std": [({}, True), ({}, False)],
    "std_ddof": [({}, 1), ({}, 0)],
    "group_baseline": [({"advantage": "reinforce_pp"}, False), ({"advantage": "reinforce_pp"}, True)],
    "clip_low": [({}, 0.2), ({}, 0.9)],
    "clip_high": [({}, 0.2), ({}, 9.0)],
    "dual_clip": [({}, 0.0), ({}, 2.0)],
    "sapo_tau_positive": [({"surrogate": "sapo"}, 1.0), ({"surrogate": "sapo"}, 0.5)],
    "sapo_tau_negative": [({"surrogate": "sapo"}, 1.05), ({"surrogate": "sapo"}, 2.0)],
    "tis_cap": [(TIS, 1.1), (TIS, 2.0)],
    "tis_level": [(TIS, level) for level in LEVELS],
    "mis_low": [(MIS, 0.0), (MIS, 0.9)],
    "mis_high": [(MIS, 1.1), (MIS, 9.0)],
    "mis_level": [(MIS, level) for level in LEVELS],
    "reject_low": [({**REJECT, "reject_level": "token"}, 0.0), ({**REJECT, "reject_level": "token"}, 0.9)],
    "reject_high": [({**REJECT, "reject_level": "token"}, 1.1), ({**REJECT, "reject_level": "token"}, 9.0)],
    "reject_level": [(REJECT, level) for level in LEVELS],
    "loss_aggregation": [({}, how) for how in ("token_mean", "sequence_mean", "sample_mean", "constant")],
    "denominators": [({"overlong": "mask"}, "owned"), ({"overlong": "mask"}, "trained")],
    "kl_coef": [({}, 0.0), ({}, 0.1)],
    "kl_estimator": [({**KL, "kl_unbiased": True}, "k1"), (KL, "k2"), (KL, "k3")],
    "kl_unbiased": [(KL, False), (KL, True)],
    "entropy_coef": [({}, 0.0), ({}, 0.1)],
    "overlong": [({}, "keep"), ({}, "mask"), ({}, "penalize")],
    "overlong_buffer": [({"overlong": "penalize"}, 0), ({"overlong": "penalize"}, 4)],
    "length_penalty": [({}, 0.0), ({}, 0.5)],
    "overlong_penalty": [({"overlong": "penalize"}, 0.5), ({"overlong": "penalize"}, 2.0)],
}
#: options that select passes and groups, and those of items from elsewhere
NOT_OF_THE_LOSS = {"args", "epochs", "reference_path", *(f.name for f in dataclasses.fields(FilterOptions))}


def gradient(config: AlgorithmConfig) -> np.ndarray:
    """Gradient of the loss of a stale batch in the first optimizer step after its sync, as in a default run.

    Two groups of three samples, one of which has two sequences; with respect to the logits of each token's three-way
    choice."""
    rng = np.random.default_rng(0)
    lengths = np.array([4, 2, 5, 3, 6, 2, 3, 4])
    size, row_offsets = int(lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])
    batch = TrainBatch(
        tokens=np.zeros(size + 8, np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths + 1)]),
        rows=np.arange(size),
        targets=np.zeros(size, np.int32),
        row_offsets=row_offsets,
        loss_mask=rng.random(size) > 0.1,
        columns={
            "behaviour_logprobs": rng.uniform(-3, -0.1, size).astype(np.float32),
            "reference_logprobs": rng.uniform(-3, -0.1, size).astype(np.float32),
            "version": rng.integers(0, 4, size).astype(np.int32),
        },
        sequence_columns={
            "group": np.array([0, 0, 0, 0, 1, 1, 1, 1]),
            "sample": np.array([0, 0, 1, 2, 3, 4, 5, 5]),
            "rewards": np.array([0, 0, 1, 3, 1, 0, 0.5, 0.5], np.float32),
            "finish": np.array([0, 0, 0, 1, 0, 0, 0, 0], np.uint8),
        },
    )
    batch.sequence_columns["owned"] = trained_tokens(batch)
    batch = shape_rewards(batch, config, 7)
    objective = Objective(Config(algorithm=config, rollout=RolloutConfig(max_response_tokens=7)))
    shares = objective.prepare(batch, version=3.0)
    if config.anchor == "proximal":
        batch.columns["proximal_logprobs"] = rng.uniform(-3, -0.1, size).astype(np.float32)
    logits = torch.tensor(rng.normal(size=(size, 3)), dtype=torch.float32, requires_grad=True)
    log_p = logits.log_softmax(-1)
    out = objective.loss(log_p[:, 0], -(log_p.exp() * log_p).sum(-1), batch)
    (out.loss / shares.sum()).backward()
    return logits.grad.numpy()


def test_every_option_of_the_loss_is_listed():
    assert CHANGES_THE_GRADIENT.keys() | NOT_OF_THE_LOSS == {f.name for f in dataclasses.fields(AlgorithmConfig)}


@pytest.mark.parametrize("option", CHANGES_THE_GRADIENT)
def test_every_enabled_option_changes_some_gradient(option):
    found = [gradient(AlgorithmConfig(**{**others, option: value})) for others, value in CHANGES_THE_GRADIENT[option]]
    for one, other in itertools.combinations(found, 2):
        assert np.abs(one - other).max() > 1e-4


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
