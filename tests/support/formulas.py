"""The published formulas of all items of algorithms, as float64 loops over tokens: values and gradients by hand.

Each reference is written from its paper and from nothing in `asyncrl.algorithms`. A `Case` is a step of random
samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, stdev

import numpy as np


@dataclass
class Case:
    """``sequences``: sample of each; ``tokens``: (sequence, trained, current, anchor, behaviour, reference logprob) of
    each token; ``rewards`` and ``group`` of each sample; ``penalty`` of each token, which its sample's reward is less
    by."""

    sequences: list[int]
    tokens: list[tuple[int, bool, float, float, float, float]]
    rewards: list[float]
    group: list[int]
    penalty: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.penalty = self.penalty or [0.0] * len(self.tokens)

    def penalized(self, coefficient: float) -> Case:
        """With the KL of the behaviour to the reference policy taken from the rewards."""
        penalty = [coefficient * (t[4] - t[5]) if t[1] else 0.0 for t in self.tokens]
        rewards = list(self.rewards)
        for r, cost in enumerate(penalty):
            rewards[self.sample_of(r)] -= cost
        return Case(self.sequences, self.tokens, rewards, self.group, penalty)

    @classmethod
    def random(cls, seed: int, spread: float = 0.5) -> Case:
        """Three groups of two to four samples of one to three sequences of one to seven tokens, some of them masked."""
        rng = np.random.default_rng(seed)
        rewards, group, sequences, tokens = [], [], [], []
        for g in range(3):
            for _ in range(rng.integers(2, 5)):
                rewards.append(float(np.float32(rng.choice([0.0, 0.25, 1.0]))))
                group.append(g)
                for _ in range(rng.integers(1, 4)):
                    sequences.append(len(rewards) - 1)
                    for _ in range(rng.integers(1, 8)):
                        behaviour = float(rng.uniform(-3, -0.1))
                        anchor, current, reference = (min(behaviour + d, 0.0) for d in rng.normal(0, spread, 3))
                        trained = bool(rng.random() > 0.2)
                        tokens.append((len(sequences) - 1, trained, current, anchor, behaviour, reference))
        return cls(sequences, tokens, rewards, group)

    def trained_of(self, sequence: int) -> list[int]:
        return [r for r, token in enumerate(self.tokens) if token[0] == sequence and token[1]]

    def trained_samples(self) -> list[int]:
        return [s for s in range(len(self.rewards)) if any(t[1] and self.sequences[t[0]] == s for t in self.tokens)]

    def sample_of(self, token: int) -> int:
        return self.sequences[self.tokens[token][0]]


Options = dict[str, object]

# -- advantages: of each trained token ---------------------------------------------------------------------------------


def _of_group(case: Case, sample: int) -> list[int]:
    return [s for s in case.trained_samples() if case.group[s] == case.group[sample]]


def grpo(case: Case, o: Options) -> list[float]:
    found = []
    for r in range(len(case.tokens)):
        s = case.sample_of(r)
        rewards = [case.rewards[other] for other in _of_group(case, s)]
        centred = case.rewards[s] - mean(rewards) if rewards else 0.0
        if o["normalize_by_std"]:
            n = len(rewards)
            deviation = stdev(rewards) if n > 1 else 0.0
            centred /= deviation * (1 if o["std_ddof"] else math.sqrt((n - 1) / n)) + 1e-6
        found.append(centred)
    return found


def rloo(case: Case, o: Options) -> list[float]:
    found = []
    for r in range(len(case.tokens)):
        s = case.sample_of(r)
        others = [case.rewards[other] for other in _of_group(case, s) if other != s]
        found.append(case.rewards[s] - mean(others) if others else 0.0)
    return found


def reinforce_pp(case: Case, o: Options) -> list[float]:
    shaped = []
    for r in range(len(case.tokens)):
        s = case.sample_of(r)
        rewards = [case.rewards[other] for other in _of_group(case, s)]
        own = [other for other in range(len(case.tokens)) if case.sample_of(other) == s]
        paid = sum(case.penalty[other] for other in own if other < r)  # before this token, so not part of its return
        shaped.append(case.rewards[s] + paid - (mean(rewards) if o["group_baseline"] and rewards else 0.0))
    of_batch = [value for value, token in zip(shaped, case.tokens, strict=True) if token[1]]
    return [(value - mean(of_batch)) / math.sqrt(stdev(of_batch) ** 2 + 1e-8) for value in shaped]


def pass_at_k(case: Case, o: Options) -> list[float]:
    found = []
    for r in range(len(case.tokens)):
        s = case.sample_of(r)
        others = [case.rewards[other] for other in _of_group(case, s) if other != s]
        found.append(max(0.0, case.rewards[s] - max(others)) if others else 0.0)
    return found


ADVANTAGES: dict[str, Callable[[Case, Options], list[float]]] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "pass_at_k": pass_at_k,
}

# -- surrogates: (loss, d loss / d logprob) of each trained token, given its advantage ---------------------------------

Values = dict[int, tuple[float, float]]


def _ratio_of_sequence(case: Case, sequence: int) -> float:
    logs = [case.tokens[r][2] - case.tokens[r][3] for r in case.trained_of(sequence)]
    return math.exp(mean(logs))


def clip(case: Case, advantages: list[float], o: Options) -> Values:
    found = {}
    for r, (_, trained, current, anchor, *_) in enumerate(case.tokens):
        if not trained:
            continue
        a, ratio = advantages[r], math.exp(current - anchor)
        low, high = 1 - o["clip_low"], 1 + o["clip_high"]
        loss, slope = -min(ratio * a, min(max(ratio, low), high) * a), -a * ratio
        if (a > 0 and ratio > high) or (a < 0 and ratio < low):
            slope = 0.0
        if o["dual_clip"] and a < 0 and loss > -o["dual_clip"] * a:
            loss, slope = -o["dual_clip"] * a, 0.0
        found[r] = loss, slope
    return found


def gspo(case: Case, advantages: list[float], o: Options) -> Values:
    found = {}
    for sequence in range(len(case.sequences)):
        if not (tokens := case.trained_of(sequence)):
            continue
        s = _ratio_of_sequence(case, sequence)
        for r in tokens:
            a = advantages[r]
            outside = (a > 0 and s > 1 + o["clip_high"]) or (a < 0 and s < 1 - o["clip_low"])
            clipped = min(max(s, 1 - o["clip_low"]), 1 + o["clip_high"])
            # the sequence's loss −min(s·A, clip(s)·A) has the slope −A·s / |y| in each token's logprob; here it is
            # repeated for each of the |y| tokens
            found[r] = -min(s * a, clipped * a), 0.0 if outside else -a * s
    return found


def cispo(case: Case, advantages: list[float], o: Options) -> Values:
    found = {}
    for r, (_, trained, current, anchor, *_) in enumerate(case.tokens):
        if trained:
            weight = min(max(math.exp(current - anchor), 1 - o["clip_low"]), 1 + o["clip_high"])
            found[r] = -weight * advantages[r] * current, -weight * advantages[r]
    return found


def sapo(case: Case, advantages: list[float], o: Options) -> Values:
    found = {}
    for r, (_, trained, current, anchor, *_) in enumerate(case.tokens):
        if trained:
            a, ratio = advantages[r], math.exp(current - anchor)
            tau = o["sapo_tau_positive"] if a > 0 else o["sapo_tau_negative"]
            gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
            found[r] = -4 / tau * gate * a, -4 * gate * (1 - gate) * ratio * a
    return found


SURROGATES: dict[str, Callable[[Case, list[float], Options], Values]] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
}

# -- corrections: weight of each trained token -------------------------------------------------------------------------


def _ratios(case: Case, level: object) -> dict[int, float]:
    """Of the anchor to the behaviour policy."""
    found = {}
    for sequence in range(len(case.sequences)):
        tokens = case.trained_of(sequence)
        logs = [case.tokens[r][3] - case.tokens[r][4] for r in tokens]
        for r, log in zip(tokens, logs, strict=True):
            found[r] = math.exp({"token": log, "sequence": sum(logs), "geometric": sum(logs) / len(logs)}[str(level)])
    return found


def tis(case: Case, o: Options) -> dict[int, float]:
    return {r: min(ratio, o["tis_cap"]) for r, ratio in _ratios(case, o["tis_level"]).items()}


def mis(case: Case, o: Options) -> dict[int, float]:
    inside = lambda ratio: o["mis_low"] <= ratio <= o["mis_high"]
    return {r: ratio if inside(ratio) else 0.0 for r, ratio in _ratios(case, o["mis_level"]).items()}


def reject(case: Case, o: Options) -> dict[int, float]:
    inside = lambda ratio: o["reject_low"] <= ratio <= o["reject_high"]
    return {r: float(inside(ratio)) for r, ratio in _ratios(case, o["reject_level"]).items()}


CORRECTIONS: dict[str, Callable[[Case, Options], dict[int, float]]] = {"tis": tis, "mis": mis, "reject": reject}

# -- regularisers: (value, d value / d logprob) of a token -------------------------------------------------------------


def kl(current: float, reference: float, behaviour: float, o: Options) -> tuple[float, float]:
    d = reference - current
    value, slope = {
        "k1": (-d, 1.0),
        "k2": (d * d / 2, -d),
        "k3": (math.exp(d) - 1 - d, 1 - math.exp(d)),
    }[str(o["kl_estimator"])]
    if o["kl_unbiased"]:
        ratio = math.exp(current - behaviour)
        value, slope = value * ratio, slope * ratio + value * ratio
    return value, slope


# -- aggregations: factor of each trained token's loss -----------------------------------------------------------------


def aggregation(case: Case, how: str, constant: int) -> dict[int, float]:
    trained = {q: case.trained_of(q) for q in range(len(case.sequences)) if case.trained_of(q)}
    of_sample: dict[int, int] = {}
    for q, tokens in trained.items():
        of_sample[case.sequences[q]] = of_sample.get(case.sequences[q], 0) + len(tokens)
    return {
        r: {
            "token_mean": 1 / sum(map(len, trained.values())),
            "sequence_mean": 1 / len(trained) / len(tokens),
            "sample_mean": 1 / len(of_sample) / of_sample[case.sequences[q]],
            "constant": 1 / len(of_sample) / constant,
        }[how]
        for q, tokens in trained.items()
        for r in tokens
    }
