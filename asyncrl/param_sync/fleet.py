"""Which replicas there are, and which of them hold a whole version."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.param_sync.handles import ReplicaHandle
from asyncrl.sample import PolicyVersion


class Fleet:
    """Replicas by name. A replica is *routable* while it serves one version, whole; new ones and those that failed are
    not, until a sync session has brought them one::

        fleet = Fleet()
        fleet.add("replica/0", handle)             # also puts a restarted replica in the place of a dead one
        await SyncSession(senders, fleet, config).run(version)
        fleet.routable                             # {"replica/0": version}

    A replica that is paused by a session stays routable: its engine queues what it is given.
    """

    def __init__(self) -> None:
        self._handles: dict[str, ReplicaHandle] = {}
        self._serving: dict[str, PolicyVersion] = {}
        self._out: dict[str, BaseException | None] = {}

    def add(self, name: str, handle: ReplicaHandle) -> None:
        self._handles[name] = handle
        self.evict(name, None)

    def remove(self, name: str) -> None:
        for table in (self._handles, self._serving, self._out):
            table.pop(name, None)

    def serve(self, name: str, version: PolicyVersion) -> None:
        """It holds ``version``, whole: route to it."""
        if name in self._handles:  # it may have been removed meanwhile
            self._serving[name] = version
            self._out.pop(name, None)

    def evict(self, name: str, why: BaseException | None) -> None:
        """Do not route to it before its next sync."""
        if name in self._handles:
            self._serving.pop(name, None)
            self._out[name] = why

    @property
    def handles(self) -> Mapping[str, ReplicaHandle]:
        return dict(self._handles)

    @property
    def routable(self) -> Mapping[str, PolicyVersion]:
        """Replicas that may be given work, and the version each serves."""
        return dict(self._serving)

    @property
    def out_of_service(self) -> Mapping[str, BaseException | None]:
        """All others, and what took them out (None: not yet synced)."""
        return dict(self._out)
