"""How many groups may be started now, so that no trained token can ever be too old.

Let G be the groups that one policy version consumes, s the staleness threshold, and number the groups that are not
dropped 1, 2, 3, … in the order in which they are issued. Let T(v) be how many were trained when version number v was
published. Trained in their order, group i is trained under number v + floor((i − 1 − T(v)) / G) for any v published
before: each version consumes G of them.

A group may start under version v only while

    issued − dropped < T(v) + (1 + s) · G.

So it has i ≤ T(v) + ⌈(1 + s)·G⌉, is trained under number v + floor((⌈(1 + s)·G⌉ − 1) / G) ≤ v + ⌈s⌉ at the latest, and
its staleness is at most ⌈s⌉: v + ⌈s⌉ is its *deadline*. A drop only lowers the i of those behind it. With s = 0 exactly
the G groups of the coming version are issued: synchronous training. Arithmetic is exact: a threshold such as 0.1 is the
fraction 1/10.

*Any other order* of training keeps the bound too as long as, for each number d from the current one on, no more groups
with a deadline up to d are outstanding than the batches of versions up to d still take:

    outstanding(d) ≤ T(v) + (d − v + 1) · G − trained                          (v: the current number)

The rule above grants this to every group that starts; `fits` says whether taking some groups first keeps it.

*Rolling updates*: while replicas serve different versions, a group that starts on one of them counts from its version.

*A failed sync* publishes nothing: T and v stay, and the budget with them, until one succeeds.

*A restore* to a checkpoint of version v begins again at v's number with T(v) as it was, in a new lineage. Groups keep
their places i, so what was issued before, under whichever version, is trained no later than it would have been. What is
in flight must be admitted again (`admits`): under v it might be too early for the place it has. If G has become smaller
meanwhile, some groups may come too late: `late` finds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from asyncrl.sample import PolicyVersion


@dataclass
class Admission:
    """The staleness budget, as a pure object: feed it events, ask it how many groups may start.

    ``groups_per_version`` is G, ``staleness_threshold`` s, ``total_groups`` all that the run will train. ``served``:
    the versions that replicas serve, oldest first, and T of each; the last one is the current version."""

    groups_per_version: int
    staleness_threshold: Fraction
    total_groups: int
    issued: int = 0
    dropped: int = 0
    trained: int = 0
    served: dict[PolicyVersion, int] = field(default_factory=dict)

    @property
    def version(self) -> PolicyVersion | None:
        """The current version; None before the first."""
        return next(reversed(self.served), None)

    @property
    def bound(self) -> int:
        """No trained token is staler: ⌈s⌉."""
        return math.ceil(self.staleness_threshold)

    def counted(self, version: PolicyVersion | None) -> PolicyVersion:
        """The version that a group counts from which starts under ``version``: the oldest one served if that is not
        known, or not served any more."""
        return version if version in self.served else next(iter(self.served))

    def limit(self, version: PolicyVersion | None = None) -> int:
        """How many groups that are not dropped there may be when one starts under ``version`` (the oldest one served,
        if None)."""
        if not self.served:
            return 0
        trained = self.served[self.counted(version)]
        # `issued − dropped < budget` admits one more group as long as it holds: ceil for fractional budgets
        budget = math.ceil(trained + (1 + self.staleness_threshold) * self.groups_per_version)
        return min(budget, self.total_groups)

    def available(self, version: PolicyVersion | None = None) -> int:
        """Groups that may start now under ``version`` (0 or more)."""
        return max(0, self.limit(version) - (self.issued - self.dropped))

    def admits(self, place: int, version: PolicyVersion | None = None) -> bool:
        """Whether the group that was issued before as the i-th of those not dropped may start now."""
        return place <= self.limit(version)

    def deadline(self, version: PolicyVersion) -> int:
        """The last version number under which a group started under ``version`` may be trained."""
        return version.number + self.bound

    def fits(self, deadlines: Sequence[int], taken: int) -> bool:
        """Whether all other groups keep their deadlines if ``taken`` groups are trained next.

        ``deadlines``: of the outstanding groups that would be left, ascending."""
        version = self.version
        if version is None:
            return False
        room = self.served[version] + self.groups_per_version - self.trained - taken  # left of the current version
        return all(
            position < room + (deadline - version.number) * self.groups_per_version
            for position, deadline in enumerate(deadlines)
        )

    def late(self, deadlines: Sequence[int]) -> list[int]:
        """Indices of the outstanding groups that are trained after their deadline if trained in this order."""
        version = self.version
        if version is None:
            return []
        done = self.trained - self.served[version]
        return [
            place
            for place, deadline in enumerate(deadlines)
            if version.number + max(0, done + place) // self.groups_per_version > deadline
        ]

    def publish(self, version: PolicyVersion, trained: int | None = None, rolling: bool = False) -> None:
        """``version`` was committed on the replicas: groups start under it from now on; with ``rolling``, under older
        ones too until they are `retire`d. ``trained``: T of it, if it differs from what is trained now (a restore).

        A version of the current number in a new lineage (the same place in training, other weights) keeps its T."""
        now = self.version
        if trained is None:
            trained = self.served[now] if now is not None and now.number == version.number else self.trained
        if not rolling:
            self.served.clear()
        self.served[version] = trained

    def retire(self, version: PolicyVersion) -> None:
        """No replica serves ``version`` any more. The current one stays."""
        if version != self.version:
            self.served.pop(version, None)
