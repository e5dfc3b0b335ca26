"""Registry of replicas and the version that each of them serves."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.param_sync.session_protocol import ReplicaSession
from asyncrl.types.versions import PolicyVersion


class Fleet:
    """Replicas by name. A replica is *routable* while it serves a complete version; new and failed ones become routable
    with their next sync session::

        fleet = Fleet()
        fleet.add("replica/0", session)            # also replaces a dead replica by its restarted one
        await SyncSession(senders, fleet, config).run(version)
        fleet.routable                             # {"replica/0": version}

    A replica that a session has paused stays routable: its engine queues new requests.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, ReplicaSession] = {}
        self._serving: dict[str, PolicyVersion] = {}
        self._out: dict[str, BaseException | None] = {}

    def add(self, name: str, session: ReplicaSession) -> None:
        self._sessions[name] = session
        self.evict(name, None)

    def remove(self, name: str) -> None:
        for table in (self._sessions, self._serving, self._out):
            table.pop(name, None)

    def serve(self, name: str, version: PolicyVersion) -> None:
        """Mark the replica routable: its weights are those of ``version``."""
        if name in self._sessions:  # it may have been removed meanwhile
            self._serving[name] = version
            self._out.pop(name, None)

    def evict(self, name: str, why: BaseException | None) -> None:
        """Make the replica unroutable until its next sync."""
        if name in self._sessions:
            self._serving.pop(name, None)
            self._out[name] = why

    @property
    def sessions(self) -> Mapping[str, ReplicaSession]:
        return dict(self._sessions)

    @property
    def routable(self) -> Mapping[str, PolicyVersion]:
        """Replicas that may receive requests, and the version of each."""
        return dict(self._serving)

    @property
    def out_of_service(self) -> Mapping[str, BaseException | None]:
        """All other replicas, and why they are out (None: not synced yet)."""
        return dict(self._out)
