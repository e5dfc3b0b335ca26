"""Mismatch alarm: a run ends if its replicas do not sample from the policy that the trainer holds.

In the first optimizer step of a batch the trainer computes logprobs under the weights that it has published, or under
slightly newer ones. For each sampler (a replica under a policy version) they are compared with the behaviour logprobs
of its trained tokens, those of samples that the step computes, at no extra forward pass. Of *fresh* tokens, sampled
under the trainer's own weights, the two differ only by rounding; of *older* ones also by what training has changed
since. Wrong weights, another temperature, another tokenizer or a broken kernel show as a larger difference.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.types.versions import PolicyVersion, Sampler

log = logging.getLogger(__name__)

STOP_AFTER = 3  # consecutive measurements of one replica, as a single one may be a coincidence
OLDER_FACTOR = 5.0  # by which the bounds of older tokens are higher
MIN_TOKENS = 100  # of a measurement; a replica with fewer in a step is measured over several

_CAUSES = "wrong weights, temperature or tokenizer in the engine, or too different numerics"


class SamplerKL(NamedTuple):
    """Means over ``tokens`` of one sampler, with d = trainer − behaviour logprob: ``kl`` of e^d − 1 − d, in nats, an
    estimate of KL(sampler ‖ trainer), and ``ratio`` of e^d, near 1 unless tokens are missing."""

    sampler: Sampler
    tokens: int
    kl: float
    ratio: float = 1.0

    def __str__(self) -> str:
        who = self.sampler.replica or "a replica that the agent loop does not name"
        return f"{self.kl:.3g} nats for {who} under version {self.sampler.version} ({self.tokens} tokens)"


class MismatchError(RuntimeError):
    """Replicas sample from another policy than the trainer's: training on their tokens would be wrong."""


class _Series(NamedTuple):
    """What is measured together: the fresh, or the older tokens of a replica."""

    replica: str
    fresh: bool


class MismatchAlarm:
    """Watches every replica over the steps of a run. ``warn`` and ``stop``: bounds of the KL of fresh tokens, in nats;
    0: none. Tokens of another lineage than the trainer's are not judged: after a restore the queue may hold some that
    were sampled before the cause was corrected."""

    def __init__(self, warn: float, stop: float) -> None:
        self._warn, self._stop = warn, stop
        self._begun: dict[_Series, SamplerKL] = {}  # measurements with too few tokens yet
        self._beyond: dict[_Series, list[SamplerKL]] = defaultdict(list)  # consecutive ones beyond ``stop``
        self._warned: set[_Series] = set()

    def restored(self) -> None:
        """Training went back to a checkpoint, from which it takes the same steps again."""
        self._begun.clear()
        self._beyond.clear()

    def observe(self, step: int, found: Sequence[SamplerKL], trainer: PolicyVersion, fresh: bool) -> dict[str, float]:
        """Metrics of a step. Warns of replicas beyond ``warn``, once until they are back within. ``trainer``: the
        trainer's version; ``fresh``: its weights before the step were exactly those of that version."""
        series: dict[_Series, list[SamplerKL]] = defaultdict(list)
        for kl in found:
            series[_Series(kl.sampler.replica, fresh and kl.sampler.version == trainer)].append(kl)
        for name, of in series.items():
            if judged := [kl for kl in of if kl.sampler.version.lineage == trainer.lineage]:
                self._measure(step, name, judged)
        own = [kl for name, of in series.items() for kl in of if name.fresh]
        older = [kl for name, of in series.items() for kl in of if not name.fresh]
        return {
            "mismatch/fresh_tokens": float(sum(kl.tokens for kl in own)),
            **{f"mismatch/{kind}_kl": _pooled(of).kl for kind, of in (("fresh", own), ("older", older)) if of},
        }

    def check(self) -> None:
        """Raises MismatchError if a replica was beyond ``stop`` in STOP_AFTER consecutive measurements."""
        beyond = [last[-1] for last in self._beyond.values() if len(last) >= STOP_AFTER]
        if beyond:
            beyond.sort(key=lambda kl: -kl.kl)
            raise MismatchError(
                f"the trainer's policy differs from the one that sampled by {', '.join(map(str, beyond))}: beyond "
                f"supervision.mismatch_stop={self._stop:g} ({self._stop * OLDER_FACTOR:g} for versions before the "
                f"trainer's weights) in {STOP_AFTER} consecutive measurements. Possible causes: {_CAUSES}"
            )

    def _measure(self, step: int, series: _Series, found: Sequence[SamplerKL]) -> None:
        kl = _pooled([*([self._begun.pop(series)] if series in self._begun else []), *found])
        if kl.tokens < MIN_TOKENS:
            self._begun[series] = kl
            return
        factor = 1.0 if series.fresh else OLDER_FACTOR
        if self._stop and kl.kl > self._stop * factor:
            self._beyond[series].append(kl)
        else:
            self._beyond.pop(series, None)
        if not self._warn or kl.kl <= self._warn * factor:
            self._warned.discard(series)
        elif series not in self._warned:
            self._warned.add(series)
            what = "step %d: the trainer's policy differs from the one that sampled by %s; possible causes: %s"
            log.warning(what, step, kl, _CAUSES)


def by_staleness(found: Sequence[SamplerKL], trainer: PolicyVersion) -> dict[str, float]:
    """Metrics ``fully_async/kl_by_staleness/0`` and so on: means over the tokens that are so many versions old."""
    ages: dict[int, list[SamplerKL]] = defaultdict(list)
    for kl in found:
        ages[max(0, trainer.number - kl.sampler.version.number)].append(kl)
    figures = {}
    for age, pooled in ((age, _pooled(of)) for age, of in sorted(ages.items())):
        figures[f"fully_async/kl_by_staleness/{age}"] = pooled.kl
        figures[f"fully_async/ratio_by_staleness/{age}"] = pooled.ratio
    return figures


def _pooled(found: Sequence[SamplerKL]) -> SamplerKL:
    """All together, under the name of the worst."""
    tokens = sum(kl.tokens for kl in found)
    worst = max(found, key=lambda kl: kl.kl)
    mean_kl = sum(kl.kl * kl.tokens for kl in found) / tokens
    return SamplerKL(worst.sampler, tokens, mean_kl, sum(kl.ratio * kl.tokens for kl in found) / tokens)
