"""Policy versions of a run: announced, published, and served by the replicas.

    announce(v)            replicas may serve v soon: groups that hold its tokens are accepted
    publish(v)             replicas serve v; with ``rolling``, some still serve older versions
    retire_before(v)       no replica serves a version before v
    withdraw()             the weights went back to a checkpoint: nothing is served until the next publish

Pure, like `asyncrl.sample_queue.group_state`: ``changes`` collects the rows to persist.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.observability.telemetry.clock import unix_s
from asyncrl.sample_queue.group_state import QueueError
from asyncrl.sample_queue.records import Changes, Recovered, VersionRecord
from asyncrl.types.versions import PolicyVersion


class VersionTable:
    """``announced``: all versions ever announced. ``latest``: published last, in any lineage. ``served``: versions that
    replicas serve, oldest first, each with T, the number of groups trained when its number was first published."""

    def __init__(self, found: Recovered, changes: Changes, clock: Callable[[], float] = unix_s) -> None:
        self._changes, self._clock = changes, clock
        self.announced, self.latest, self.served = set(found.versions), found.version, dict(found.served)

    @property
    def current(self) -> PolicyVersion | None:
        """Newest version served; None before the first, and after `withdraw`."""
        return next(reversed(self.served), None)

    @property
    def oldest(self) -> PolicyVersion | None:
        """Oldest version served: new groups count from it, as their replica may still serve it."""
        return next(iter(self.served), None)

    def announce(self, version: PolicyVersion) -> None:
        if version not in self.announced:
            self.announced.add(version)
            self._changes.versions[version] = VersionRecord(*version, 0, None)

    def publish(self, version: PolicyVersion, trained: int, rolling: bool = False) -> None:
        """``trained`` is T. Raises QueueError unless ``version`` is the highest so far."""
        if self.latest is not None and version <= self.latest:
            raise QueueError(f"version {version} was published after {self.latest}, expected a higher one")
        if not rolling:
            self.served.clear()
        self.served[version] = trained
        self.latest = version
        self.announced.add(version)
        self._changes.versions[version] = VersionRecord(*version, trained, self._clock())
        self._note_oldest()

    def retire_before(self, version: PolicyVersion) -> None:
        """Stops serving versions before ``version``, except the current one."""
        for older in [served for served in self.served if served < version and served != self.current]:
            del self.served[older]
        self._note_oldest()

    def withdraw(self) -> None:
        self.served.clear()
        self._note_oldest()

    def _note_oldest(self) -> None:
        self._changes.meta["served_from"] = str(self.oldest or "")
