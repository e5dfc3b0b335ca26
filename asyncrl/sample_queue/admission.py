"""How many groups may be started now, so that no trained token can ever be too old.

Let G be the groups that one policy version consumes, s the staleness threshold, and number the groups that are not
dropped 1, 2, 3, … in the order in which they are issued. They are trained in that order (first in, first out), so
group i is trained by the batches of the version number floor((i − 1) / G), counted from the first version of the run.

A group may start under version v only while

    issued − dropped < trained_when_v_was_published + (1 + s) · G.

When v was published, trained_when_v_was_published = v · G groups were trained. So the group started then has
i ≤ v·G + ⌈(1 + s)·G⌉, is trained under version floor((i − 1)/G) ≤ v + ⌈s⌉, and its staleness is at most ⌈s⌉. A drop
only lowers the i of those behind it. With s = 0 exactly the G groups of the coming version are issued: synchronous
training. Arithmetic is exact: a threshold such as 0.1 is the fraction 1/10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass
class Admission:
    """The staleness budget, as a pure object: feed it events, ask it how many groups may start.

    ``groups_per_version`` is G, ``staleness_threshold`` s, ``total_groups`` all that the run will train.
    """

    groups_per_version: int
    staleness_threshold: Fraction
    total_groups: int
    issued: int = 0
    dropped: int = 0
    trained: int = 0
    trained_at_publish: int = 0

    def available(self) -> int:
        """Groups that may start now under the published version (0 or more)."""
        budget = self.trained_at_publish + (1 + self.staleness_threshold) * self.groups_per_version
        # `issued − dropped < budget` admits one more group as long as it holds: ceil for fractional budgets
        limit = min(math.ceil(budget), self.total_groups)
        return max(0, limit - (self.issued - self.dropped))

    def publish(self) -> None:
        """A new version was committed on the replicas: groups start under it from now on."""
        self.trained_at_publish = self.trained
