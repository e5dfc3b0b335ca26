"""How fast the run is beside what its pools could do: each alone, the ideal without waiting, and what split would suit.

A step of D trained tokens takes the trainer T_train = D / its own rate, and the rollouter T_rollout = D / its own rate,
where a pool's own rate is that of the time in which it works. Pools that never wait for each other take
``max(T_train, T_rollout)`` a step: the ideal. Its share of the step's real seconds is the fraction of the ideal:
waiting, syncing and dropped or unused tokens all lower it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BALANCED = 0.9  # the faster pool's time by the slower's, from which on no other split is advised
RECENT = 0.2  # weight of a step in the running means


@dataclass
class SpeedAccount:
    """``step(...)`` once for each train step gives its metrics; ``figures()`` are those of the whole run.

    ``trainer`` and ``rollout``: how many ``unit`` (CPUs or GPUs) each pool has."""

    trainer: float
    rollout: float
    unit: str
    seconds: float = 0.0
    ideal_s: float = 0.0
    train_s: float = 0.0
    rollout_s: float = 0.0
    _rollout_rate: float = math.nan  # running mean

    def step(
        self, seconds: float, trained: float, training_s: float, generated: float, generating_s: float, full_width: bool
    ) -> dict[str, float]:
        """Of a window of ``seconds`` in which ``trained`` tokens went into the weights and ``generated`` ones came:
        ``training_s`` and ``generating_s`` are the seconds of work, the mean over a pool's actors.

        A rollouter that was narrowed to the trainer's pace (not ``full_width``) shows less than it could do: what it
        did at full width before stands."""
        if generating_s > 0 and generated > 0 and (full_width or math.isnan(self._rollout_rate)):
            rate = generated / generating_s
            known = not math.isnan(self._rollout_rate)
            self._rollout_rate = (1 - RECENT) * self._rollout_rate + RECENT * rate if known else rate
        if not trained or not training_s or math.isnan(self._rollout_rate):
            return {}
        rollout_s = trained / self._rollout_rate
        ideal_s = max(training_s, rollout_s)
        self.seconds += seconds
        self.ideal_s += ideal_s
        self.train_s += training_s
        self.rollout_s += rollout_s
        return {
            "perf/trainer_alone_tokens_per_s": trained / training_s,
            "perf/rollout_alone_tokens_per_s": self._rollout_rate,
            "perf/ideal_step_s": ideal_s,
            "perf/fraction_of_ideal": ideal_s / seconds,
        }

    def figures(self) -> dict[str, float | str]:
        """Empty if no step was counted."""
        if not self.seconds:
            return {}
        return {"fraction_of_ideal": self.ideal_s / self.seconds, "advice": self.advice()}

    def advice(self) -> str:
        """Which pool binds, and what split of all CPUs or GPUs would let both take as long; one line."""
        slower, faster = ("training", "generation") if self.train_s > self.rollout_s else ("generation", "training")
        least, most = sorted((self.train_s, self.rollout_s))
        shares = [f"{seconds / self.seconds:.0%}" for seconds in (self.train_s, self.rollout_s)]
        times = f"training takes {shares[0]} of the time, generation {shares[1]}"
        if least >= BALANCED * most:
            return f"the pools are balanced: {times}"
        # work is time × resources: a split in proportion to it lets both take as long
        work, total = self.train_s * self.trainer, self.trainer + self.rollout
        trainer = total * work / (work + self.rollout_s * self.rollout)
        if self.unit == "GPU":
            trainer = min(max(round(trainer), 1), total - 1)
        return (
            f"{slower} binds, {faster} could do {most / least:.2g} times as much: {times}; of {total:g} {self.unit}s, "
            f"{trainer:.2g} for training and {total - trainer:.2g} for generation would balance them "
            f"(now {self.trainer:g} and {self.rollout:g})"
        )
