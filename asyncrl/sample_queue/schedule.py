"""Scheduling policy: selects the groups that may start, those to train next, and those that are too late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import Literal

from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.group_state import GroupTable, QueueError
from asyncrl.sample_queue.messages import Ticket
from asyncrl.sample_queue.records import QUEUED, GroupRecord
from asyncrl.sample_queue.versions import VersionTable
from asyncrl.types.versions import PolicyVersion

Order = Literal["fifo", "ready_first"]
Overdue = Literal["wait", "mask", "drop"]


class Schedule:
    """Read-only decisions over the groups and versions of a run.

    ``order``: ``fifo`` trains in the order of issue; ``ready_first`` trains finished groups first, the earliest
    deadline first. ``overdue``: treatment of groups past the staleness bound. With ``wait`` the trainer waits for
    groups that must come first, so that none passes the bound (unless G shrank on resume: such groups are dropped);
    ``mask`` excludes tokens that are too old from the loss; ``drop`` drops the group."""

    def __init__(
        self, table: GroupTable, versions: VersionTable, admission: Admission, order: Order, overdue: Overdue
    ) -> None:
        self._table, self._versions, self._admission = table, versions, admission
        self._order, self._overdue = order, overdue

    # -- starting --------------------------------------------------------------------------------------------------

    def startable(
        self, tickets: Sequence[Ticket], count: int, room: int, may_restart: Callable[[GroupRecord], bool]
    ) -> tuple[list[Ticket], list[Ticket]]:
        """The first ``count`` tickets that may start now, those that ``may_restart`` and up to ``room`` new ones; and
        those before them that never will, as their places are taken. Raises QueueError for a gap."""
        if (oldest := self._versions.oldest) is None:
            return [], []
        start: list[Ticket] = []
        passed: list[Ticket] = []
        again: list[GroupRecord] = []
        issued = self._table.issued
        for ticket in tickets:
            if len(start) == count:
                break
            group = self._table.open.get(ticket.uid)
            if group is not None and may_restart(group):
                again.append(group)
            elif ticket.place < issued:
                passed.append(ticket)
                continue
            elif ticket.place > issued:
                raise QueueError(f"issue: group {ticket.uid} has place {ticket.place}, expected {issued}")
            elif room:
                room, issued = room - 1, issued + 1
            else:
                break
            start.append(ticket)
        if again and (may := self._startable_again(again, oldest)) < len(again):
            del start[[ticket.uid for ticket in start].index(again[may].uid) :]
        return start, passed

    def room(self) -> int:
        """Number of new groups that may start now."""
        if (oldest := self._versions.oldest) is None:
            return 0
        return max(0, self._admission.limit(self._versions.served[oldest]) - self._table.held)

    def _startable_again(self, groups: Sequence[GroupRecord], oldest: PolicyVersion) -> int:
        """Number of these groups in flight, from the front, that may start again."""
        if not self._keeps_deadlines:
            limit = self._admission.limit(self._versions.served[oldest])
            places = {uid: place for place, uid in enumerate(self._table.open, start=self._table.trained + 1)}
            admitted = [places[group.uid] <= limit for group in groups]
            return admitted.index(False) if False in admitted else len(groups)
        numbers = self._table.in_flight_of + self._table.queued_of
        for count, group in enumerate(groups):
            if group.number > oldest.number:
                numbers.subtract([group.number])
                numbers.update([oldest.number])
                if not self._fits(numbers):
                    return count
        return len(groups)

    # -- training --------------------------------------------------------------------------------------------------

    def next_batch(self, count: int) -> list[GroupRecord] | None:
        """The ``count`` groups of the next step; None until all of them are finished."""
        if self._table.queued < count:  # asked after each change of the queue: too few to look for the right ones
            return None
        waiting = self._table.waiting()  # in the order of issue
        if self._order == "fifo":
            taken = list(islice(takewhile(lambda group: group.state == QUEUED, waiting), count))
            return taken if len(taken) == count else None
        if self._keeps_deadlines and not self._fits(self._left_without(count), taken=count):
            return None  # a group in flight must come first
        return self.in_training_order(group for group in waiting if group.state == QUEUED)[:count]

    def in_training_order(self, groups: Iterable[GroupRecord]) -> list[GroupRecord]:
        if self._order == "fifo":
            return sorted(groups, key=lambda group: group.seq)
        return sorted(groups, key=lambda group: (self._deadline(group), group.seq))

    def mask_before(self) -> int | None:
        """Tokens of versions numbered below this are not trained; None: all are."""
        current = self._versions.current
        return current.number - self._admission.bound if self._overdue == "mask" and current is not None else None

    def overdue(self) -> list[GroupRecord]:
        """Unleased groups that can no longer be trained in time."""
        if (current := self._versions.current) is None:
            return []
        if self._overdue == "mask":
            return self.in_training_order(filter(self.all_masked, self._table.waiting()))
        waiting = self.in_training_order(self._table.waiting())
        if self._overdue == "drop" and self._order == "ready_first":
            return [group for group in waiting if self._deadline(group) < current.number]
        late = []
        consumed = self._consumed(current)
        while found := self._admission.late([self._deadline(g) for g in waiting], current.number, consumed):
            late.append(waiting.pop(found[0]))  # the groups behind it move up
        return late

    def all_masked(self, group: GroupRecord) -> bool:
        """True if the group is finished, and all of its tokens are too old to be trained."""
        oldest = self.mask_before()
        return oldest is not None and group.newest is not None and group.newest.number < oldest

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _keeps_deadlines(self) -> bool:
        """True if the order of training depends on deadlines and no group may miss its own."""
        return self._order == "ready_first" and self._overdue == "wait"

    def _deadline(self, group: GroupRecord) -> int:
        return self._admission.deadline(group.version)

    def _left_without(self, count: int) -> Counter[int]:
        """Groups in flight or queued, by the number of the version under which they started, without the first
        ``count`` queued ones."""
        left = self._table.in_flight_of + self._table.queued_of
        for number in sorted(self._table.queued_of):
            taken = min(count, self._table.queued_of[number])
            left[number] -= taken
            count -= taken
        return left

    def _fits(self, numbers: Mapping[int, int], taken: int = 0) -> bool:
        """``numbers``: version number under which groups started → how many of them are left; ``taken``: groups about
        to be leased, beside those leased already."""
        if (current := self._versions.current) is None:
            return False
        deadlines = {number + self._admission.bound: count for number, count in numbers.items()}
        return self._admission.fits(deadlines, current.number, self._consumed(current) + taken)

    def _consumed(self, current: PolicyVersion) -> int:
        """Groups of the current version that are trained or leased."""
        return self._table.trained - self._versions.served[current] + len(self._table.leased)
