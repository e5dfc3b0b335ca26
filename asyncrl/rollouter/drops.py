"""Dropped groups: which finished groups are dropped instead of trained, and how many drops in a row end the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.samples import FailedSample
from asyncrl.sample_queue.messages import POISON
from asyncrl.types.samples import Sample, effective_reward


class NothingToTrain(RuntimeError):
    """All recent groups were dropped: the run would continue forever without training."""


class DropPolicy:
    """Decides which finished groups to drop, and counts consecutive drops: report every outcome to `dropped` or
    `accepted`."""

    def __init__(self, config: Config, recorder: Recorder) -> None:
        self._rollout, self._algorithm, self._recorder = config.rollout, config.algorithm, recorder
        self._consecutive: Counter[str] = Counter()  # by reason

    def reason(self, samples: Sequence[Sample], failed: Sequence[FailedSample]) -> str | None:
        """Why to drop this group; None to keep it."""
        if len(samples) < self._rollout.min_group_size:
            return failed[0].reason if failed else "too_small"
        a = self._algorithm
        rewards = {
            effective_reward(s.reward, s.finish, a.overlong, a.overlong_penalty)
            for s in samples
            if s.reward is not None  # all have one by now
        } - {None}
        if len(rewards) <= 1:
            self._recorder.count("rollout/zero_variance_groups")
            if a.filter_zero_variance:
                return "zero_variance"
        return None

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
        check = "the task, the reward, or algorithm.filter_zero_variance"
        if self._consecutive.most_common(1)[0][0] == POISON:
            check = "the engine and its weights: they return impossible samples"
        raise NothingToTrain(f"the last {total} groups were all dropped ({counts}){last}. Check {check}")
