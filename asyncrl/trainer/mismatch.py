"""Mismatch alarm: a run ends if its replicas do not sample from the policy that the trainer holds.

In the first optimizer step of a batch the trainer computes logprobs under the weights that it has published, or under
slightly newer ones. For each sampler (a replica under a policy version) they are compared with the behaviour logprobs
of its trained tokens, at no extra forward pass. Of *fresh* tokens, sampled under the trainer's very weights, the two
differ only by rounding; of *older* ones also by what training has changed since. Wrong weights, another temperature,
another tokenizer or a broken kernel show as a larger difference.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.types.versions import PolicyVersion, Sampler

log = logging.getLogger(__name__)

STOP_AFTER = 3  # consecutive steps of one replica, as a single step may be a coincidence
OLDER_FACTOR = 5.0  # by which the bounds of older tokens are higher
MIN_TOKENS = 32  # fewer tell too little about their sampler


class SamplerKL(NamedTuple):
    """Mean over ``tokens`` of one sampler of k3 = e^d − 1 − d, in nats, with d = trainer − behaviour logprob: an
    estimate of KL(sampler ‖ trainer)."""

    sampler: Sampler
    tokens: int
    kl: float

    def __str__(self) -> str:
        who = self.sampler.replica or "a replica unknown to the agent loop"
        return f"{self.kl:.3g} nats for {who} under version {self.sampler.version} ({self.tokens} tokens)"


class MismatchError(RuntimeError):
    """A replica samples from another policy than the trainer's: training on its tokens would be wrong."""


class MismatchAlarm:
    """Watches every replica over the steps of a run. ``warn`` and ``stop``: bounds of the KL of fresh tokens, in nats;
    0: none."""

    def __init__(self, warn: float, stop: float) -> None:
        self._warn, self._stop = warn, stop
        #: by replica: consecutive steps beyond ``stop``
        self._beyond: Counter[str] = Counter()
        self._warned: set[str] = set()

    def check(self, step: int, found: Sequence[SamplerKL], trainer: PolicyVersion | None) -> dict[str, float]:
        """Metrics of a step. ``trainer``: the version that the trainer held before the step; None if its weights were
        between two versions.

        Warns of each replica beyond ``warn``, once until it is back below. Raises MismatchError for a replica beyond
        ``stop`` in STOP_AFTER consecutive steps that used enough of its tokens."""
        fresh = [kl for kl in found if kl.sampler.version == trainer]
        older = [kl for kl in found if kl.sampler.version != trainer]
        bounded = [(kl.kl, kl) for kl in fresh] + [(kl.kl / OLDER_FACTOR, kl) for kl in older]
        worst = {kl.sampler.replica: (scaled, kl) for scaled, kl in sorted(bounded) if kl.tokens >= MIN_TOKENS}
        for replica, (scaled, kl) in worst.items():
            self._judge(step, replica, scaled, kl)
        return {
            "mismatch/fresh_tokens": float(sum(kl.tokens for kl in fresh)),
            **{f"mismatch/{name}_kl": _mean(of) for name, of in (("fresh", fresh), ("older", older)) if of},
        }

    def _judge(self, step: int, replica: str, scaled: float, kl: SamplerKL) -> None:
        if self._stop and scaled > self._stop:
            self._beyond[replica] += 1
        else:
            del self._beyond[replica]
        what = f"step {step}: the trainer's policy differs from the one that sampled by {kl}"
        causes = "wrong weights, temperature or tokenizer in the engine, or too different numerics"
        if self._beyond[replica] >= STOP_AFTER:
            raise MismatchError(
                f"{what}, in {STOP_AFTER} consecutive steps beyond supervision.mismatch_stop={self._stop:g} "
                f"({self._stop * OLDER_FACTOR:g} for older tokens); possible causes: {causes}"
            )
        if not self._warn or scaled <= self._warn:
            self._warned.discard(replica)
        elif replica not in self._warned or self._beyond[replica]:
            self._warned.add(replica)
            log.warning("%s; possible causes: %s", what, causes)


def _mean(of: Sequence[SamplerKL]) -> float:
    return sum(kl.kl * kl.tokens for kl in of) / sum(kl.tokens for kl in of)
