"""Dropped groups: which finished groups are dropped instead of trained, and how many drops in a row end the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from asyncrl.algorithms.rewards import shaped, too_easy_or_hard
from asyncrl.config.schema import Config
from asyncrl.rollouter.samples import FailedSample
from asyncrl.sample_queue.messages import POISON
from asyncrl.types.samples import Sample


class NothingToTrain(RuntimeError):
    """All recent groups were dropped: the run would continue forever without training."""


class DropPolicy:
    """Decides which finished groups to drop, and counts consecutive drops: report every outcome to `dropped` or
    `accepted`."""

    def __init__(self, config: Config) -> None:
        self._rollout, self._algorithm = config.rollout, config.algorithm
        self._consecutive: Counter[str] = Counter()  # by reason

    def reason(self, samples: Sequence[Sample], failed: Sequence[FailedSample], flat: bool) -> str | None:
        """Why to drop this group, ``flat`` if it is `without_variance`; None to keep it."""
        if len(samples) < self._rollout.min_group_size:
            return failed[0].reason if failed else "too_small"
        options = self._algorithm
        if options.filter_zero_variance and flat:
            return "zero_variance"
        if too_easy_or_hard(np.array([s.succeeded for s in samples]), options):
            return "success_band"
        return None

    def without_variance(self, samples: Sequence[Sample]) -> bool:
        """True if all samples of a group, unless it is too small, are trained with the same reward or not at all."""
        if len(samples) < self._rollout.min_group_size:
            return False
        rewards = np.array([s.reward for s in samples], np.float32)  # all have one by now
        effective, trained = shaped(
            rewards,
            np.array([max(len(q.tokens) for q in s.sequences) for s in samples]),
            np.array([s.finish.truncated for s in samples]),
            self._algorithm,
            self._rollout.max_response_tokens,
        )
        return len(np.unique(effective[trained])) <= 1

    def accepted(self) -> None:
        self._consecutive.clear()

    def dropped(self, reason: str, message: str = "") -> None:
        """Raises NothingToTrain at ``rollout.max_consecutive_drops``."""
        self._consecutive[reason] += 1
        total = self._consecutive.total()
        if total < self._rollout.max_consecutive_drops:
            return
        counts = ", ".join(f"{n} × {reason}" for reason, n in self._consecutive.most_common())
        last = f"; the last one: {message}" if message else ""
        check = "the task, the reward, or algorithm.filter_zero_variance and filter_success_low and _high"
        if self._consecutive.most_common(1)[0][0] == POISON:
            check = "the engine and its weights: they return impossible samples"
        raise NothingToTrain(f"the last {total} groups were all dropped ({counts}){last}. Check {check}")
