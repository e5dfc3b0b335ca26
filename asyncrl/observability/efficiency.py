"""Efficiency of the run: its speed relative to pools that never wait for each other, and the split that balances them.

A step of D trained tokens takes the trainer T_train = D / its rate and the rollouter T_rollout = D / (kept · its rate),
with rates in tokens per busy second; ``kept`` is the share of the generated groups that are not dropped. Without waits
a step takes ``max(T_train, T_rollout)``: the ideal. The fraction of the ideal is the ideal divided by the step's real
time; waits and syncs lower it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

BALANCED = 0.9  # ratio of the pools' busy times from which the pools count as balanced
BUSY = 0.9  # share of the time from which rewards count as always under way
WAITING = 0.7  # fraction of the ideal below which both pools wait for something else
RECENT = 0.2  # weight of a step in the running means
RECENT_STEPS = 4  # whose times decide about the number of replicas


@dataclass
class EfficiencyTracker:
    """Metrics of each train step by ``step(...)``, and of the whole run by ``figures()``.

    ``trainer`` and ``rollout``: size of each pool in ``unit``, such as CPU or GPU. ``train_s`` and ``rollout_s``: what
    the steps so far took each pool, ``…_work``: times its size, ``recent``: of the last ones, since a pool's size
    changed."""

    trainer: float
    rollout: float
    unit: str
    seconds: float = 0.0
    ideal_s: float = 0.0
    train_s: float = 0.0
    rollout_s: float = 0.0
    reward_s: float = 0.0
    train_work: float = 0.0
    rollout_work: float = 0.0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _rollout_rate: float = math.nan  # running mean
    _ended: float = 0.0  # groups, the later ones weigh more
    _dropped: float = 0.0  # of these

    def resize(self, trainer: float, rollout: float) -> None:
        """The sizes of the pools."""
        if (trainer, rollout) != (self.trainer, self.rollout):
            self._rollout_rate *= rollout / self.rollout
            self.trainer, self.rollout = trainer, rollout
            self.recent.clear()

    def balance(self) -> float | None:
        """How many times as many replicas would generate what the trainer can train, by the recent steps; None before
        there are `RECENT_STEPS` of them."""
        if len(self.recent) < RECENT_STEPS:
            return None
        train_s, rollout_s = (sum(seconds) for seconds in zip(*self.recent, strict=True))
        return rollout_s / train_s

    def step(
        self,
        seconds: float,
        trained: float,
        training_s: float,
        generated: float,
        generating_s: float,
        rewarding_s: float,
        unthrottled: bool,
        ended: float = 0.0,
        dropped: float = 0.0,
    ) -> dict[str, float]:
        """Metrics of a step of ``seconds`` that trained ``trained`` tokens while ``generated`` tokens were generated.

        ``training_s``, ``generating_s``: busy seconds, the mean over a pool's actors. ``rewarding_s``: seconds in which
        samples waited for their rewards. A rollouter throttled to the trainer's pace (not ``unthrottled``) understates
        its rate, so its last unthrottled rate is kept. ``ended``: groups that were accepted or dropped meanwhile,
        ``dropped`` of them."""
        if generating_s > 0 and generated > 0 and (unthrottled or math.isnan(self._rollout_rate)):
            rate = generated / generating_s
            known = not math.isnan(self._rollout_rate)
            self._rollout_rate = (1 - RECENT) * self._rollout_rate + RECENT * rate if known else rate
        self._ended = (1 - RECENT) * self._ended + ended
        self._dropped = (1 - RECENT) * self._dropped + dropped
        if not trained or not training_s or math.isnan(self._rollout_rate):
            return {}
        # of at least one group, since a resumed run trains what its queue held while all that it makes may be dropped
        kept_rate = max(self._ended - self._dropped, 1.0) / max(self._ended, 1.0) * self._rollout_rate
        rollout_s = trained / kept_rate
        ideal_s = max(training_s, rollout_s)
        self.seconds += seconds
        self.ideal_s += ideal_s
        self.train_s += training_s
        self.rollout_s += rollout_s
        self.reward_s += rewarding_s
        self.train_work += training_s * self.trainer
        self.rollout_work += rollout_s * self.rollout
        self.recent.append((training_s, rollout_s))
        return {
            "perf/trainer_alone_tokens_per_s": trained / training_s,
            "perf/rollout_alone_tokens_per_s": kept_rate,
            "perf/ideal_step_s": ideal_s,
            "perf/fraction_of_ideal": ideal_s / seconds,
        }

    def figures(self) -> dict[str, float | str]:
        """Figures of the whole run; empty before the first step."""
        if not self.seconds:
            return {}
        # a short resumed run is faster than its own generation: it trains what its queue held
        return {"fraction_of_ideal": min(self.ideal_s / self.seconds, 1.0), "advice": self.advice()}

    def advice(self) -> str:
        """In one line the bottleneck, and the split of CPUs or GPUs that would balance the pools."""
        slower, faster = ("training", "generation") if self.train_s > self.rollout_s else ("generation", "training")
        least, most = sorted((self.train_s, self.rollout_s))
        shares = [f"{seconds / self.seconds:.0%}" for seconds in (self.train_s, self.rollout_s)]
        times = f"training takes {shares[0]} of the time, generation {shares[1]}"
        if self.reward_s >= BUSY * self.seconds and self.ideal_s < WAITING * self.seconds:
            waiting = f"{self.reward_s / self.seconds:.0%}"
            return f"the reward is the bottleneck, samples wait for it {waiting} of the time: {times}"
        if least >= BALANCED * most:
            return f"the pools are balanced: {times}"
        # Work is busy time × resources: a split in proportion to the work balances the pools.
        total = self.trainer + self.rollout
        trainer = total * self.train_work / (self.train_work + self.rollout_work)
        if self.unit != "CPU":  # which are divided
            trainer = min(max(round(trainer), 1), total - 1)
        return (
            f"{slower} is the bottleneck, {faster} could do {most / least:.2g} times as much: {times}; of {total:g} "
            f"{self.unit}s, {trainer:.2g} for training and {total - trainer:.2g} for generation would balance them "
            f"(now {self.trainer:g} and {self.rollout:g})"
        )
