"""Staleness budget: how many groups may start now, so that no trained token can ever be too old.

Let G be the number of groups that one policy version consumes, s the staleness threshold, and number the groups that
are not dropped 1, 2, 3, … in the order of issue. Let T(v) be the number of groups trained when version number v was
published. Trained in that order, group i is trained under number v + floor((i − 1 − T(v)) / G), for any v published
before: each version consumes G of them.

A group may start under version v only while

    issued − dropped < T(v) + (1 + s) · G.

Then i ≤ T(v) + ⌈(1 + s)·G⌉, so it is trained under number v + floor((⌈(1 + s)·G⌉ − 1) / G) ≤ v + ⌈s⌉ at the latest, and
its staleness is at most ⌈s⌉: v + ⌈s⌉ is its *deadline*. A drop only lowers the i of the groups behind it. With s = 0
exactly the G groups of the coming version are issued: synchronous training. Arithmetic is exact: a threshold such as
0.1 is the fraction 1/10.

*Any other order* of training keeps the bound as long as, for each number d from the current one on, the outstanding
groups with a deadline up to d are no more than the batches of versions up to d still take:

    outstanding(d) ≤ T(v) + (d − v + 1) · G − trained                          (v: the current number)

The rule above grants this to every group that starts; `fits` checks that it survives taking some groups first.

*Rolling updates*: while replicas serve different versions, a group counts from the oldest one served, as it may start
on any replica.

*A failed sync* publishes nothing: T, v and the budget stay until a sync succeeds.

*A restore* to a checkpoint of version v continues with v's number and its original T(v), in a new lineage. Groups keep
their places i, so those issued before, under any version, are trained no later than they would have been. Groups in
flight must be admitted again (`limit`): under v a group may be too early for its place. If G has become smaller, some
groups may be too late: `late` finds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from asyncrl.types.versions import PolicyVersion


@dataclass(frozen=True)
class Admission:
    """``groups_per_version``: G. ``staleness_threshold``: s. ``total_groups``: number of groups that the run trains."""

    groups_per_version: int
    staleness_threshold: Fraction
    total_groups: int

    @property
    def bound(self) -> int:
        """⌈s⌉: no trained token is staler."""
        return math.ceil(self.staleness_threshold)

    def limit(self, trained_at_publish: int) -> int:
        """Most groups that are not dropped, and the last place in the order of issue that may start, under a version
        with this T."""
        return min(trained_at_publish + self._ahead, self.total_groups)

    @cached_property
    def _ahead(self) -> int:
        # `issued − dropped < budget` admits one more group as long as it holds: ceil for fractional budgets
        return math.ceil((1 + self.staleness_threshold) * self.groups_per_version)

    def deadline(self, version: PolicyVersion) -> int:
        """Last version number under which a group started under ``version`` may be trained."""
        return version.number + self.bound

    def fits(self, outstanding: Mapping[int, int], number: int, consumed: int) -> bool:
        """True if all outstanding groups keep their deadlines.

        ``outstanding``: deadline → number of groups. ``number``: of the current version; ``consumed``: groups that it
        has trained or is about to train before them."""
        room = self.groups_per_version - consumed  # left in the current version
        before = 0
        for deadline in sorted(outstanding):
            before += outstanding[deadline]
            if outstanding[deadline] and before > room + (deadline - number) * self.groups_per_version:
                return False
        return True

    def late(self, deadlines: Sequence[int], number: int, consumed: int) -> list[int]:
        """Indices of the outstanding groups, of these ``deadlines``, that miss them if trained in this order; other
        arguments as in `fits`."""
        return [
            place
            for place, deadline in enumerate(deadlines)
            if number + max(0, consumed + place) // self.groups_per_version > deadline
        ]
