"""Curriculum: classes of prompts come as often as they teach.

The weight of a class with success p, the mean over its last ``window`` groups that have ended (0 for one that ended
without samples, also because it was overdue), is::

    floor + (1 − floor) · 4 p (1 − p),    1 without any

p (1 − p) is the variance of a reward that is 0 or 1, so it is highest where half of the answers succeed (Foster et al.
2025, "Learning to Reason at the Frontier of Learnability", arXiv 2502.12272). The ledger has all that a
resumed run needs: which groups were issued, under which version, and how each one ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np


@dataclass
class _Issued:
    """A group: the version under which it was issued, and its success once it has ended."""

    version: int
    success: float | None = None


class Curriculum:
    """Draws the class of each next prompt, from how the groups of the classes ended.

    A draw under version v looks at groups that were issued under versions before v. With staleness 0 these have all
    ended by then, so that draws do not depend on timing; and a draw's random number depends only on ``seed`` and on
    the number of draws before. ``shares`` [classes]: factors of the weights."""

    def __init__(self, shares: Sequence[float], seed: int, window: int, floor: float) -> None:
        self._shares, self._seed, self._window, self._floor = np.array(shares), seed, window, floor
        self._drawn = 0
        self._groups: list[dict[str, _Issued]] = [{} for _ in shares]  # of a class, by uid in the order of issue

    def draw(self, version: int) -> int:
        """Class of the next prompt."""
        weights = self.weights(version).cumsum()
        random = np.random.default_rng([self._seed, self._drawn]).random()
        return int(np.searchsorted(weights, random * weights[-1], side="right"))

    def issued(self, uid: str, class_: int, version: int) -> None:
        self._groups[class_][uid] = _Issued(version)
        self._drawn += 1

    def ended(self, uid: str, success: float | None) -> None:
        """``success``: share of the group's samples that succeeded; None if it has none, which counts as 0: else a
        class that cannot be sampled would come most. A group that is sampled again ends again, and the last time
        counts."""
        for groups in self._groups:
            if uid in groups:
                groups[uid].success = success or 0.0

    def success(self, version: int) -> list[float | None]:
        """Of each class, as a draw under ``version`` sees it."""
        found: list[float | None] = []
        for groups in self._groups:
            ended = (
                (uid, g.success) for uid, g in reversed(groups.items()) if g.success is not None and g.version < version
            )
            counted = dict(islice(ended, self._window))
            found.append(sum(counted.values()) / len(counted) if counted else None)
            if counted:  # earlier ones are never looked at again
                for uid in list(takewhile(next(reversed(counted)).__ne__, groups)):
                    if groups[uid].success is not None:
                        del groups[uid]
        return found

    def weights(self, version: int) -> np.ndarray:
        """float64 [classes]"""
        teaches = [1.0 if p is None else 4 * p * (1 - p) for p in self.success(version)]
        return self._shares * (self._floor + (1 - self._floor) * np.array(teaches))
