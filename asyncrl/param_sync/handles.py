"""What a sync session asks of the two sides, wherever they run: actor calls in production, pipes or plain objects in
tests. An exception of any other kind than those named here counts as the failure of the one that was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from asyncrl.param_sync.manifest import Manifest, Role
from asyncrl.param_sync.sender import SendPlan, SendReport
from asyncrl.param_sync.transports.base import Address
from asyncrl.sample import PolicyVersion

PauseMode = Literal["abort", "keep", "wait"]
KVMode = Literal["keep", "recompute", "unload"]
Staging = Literal["bucket", "full"]


@dataclass(frozen=True)
class ReceivePlan:
    """What a replica is told of a session. ``addresses``: of every sender. ``staging``: ``bucket``, or ``full``."""

    session: str
    version: PolicyVersion
    manifest: Manifest
    addresses: tuple[Address, ...]
    deadline_s: float
    staging: Staging = "bucket"


class SenderHandle(Protocol):
    """A trainer rank, see `asyncrl.param_sync.sender.Sender`. All ranks of a collective export take part."""

    async def manifest(self) -> Manifest: ...

    async def address(self) -> Address | None: ...

    async def send(self, plan: SendPlan) -> SendReport:
        """Export and send; returns when the readers have read everything."""
        ...

    async def abort(self, session: str) -> None:
        """Let a `send` in progress go on without readers."""


class ReplicaHandle(Protocol):
    """A replica, see `asyncrl.param_sync.endpoint.ReplicaEndpoint`. All that follow ``plan`` raise SyncError for any
    other session than the planned one."""

    async def needs_base(self) -> bool:
        """Whether an adapter alone would not make it whole: it was started, or cut off amid its base."""
        ...

    async def plan(self, plan: ReceivePlan) -> Sequence[str]:
        """Check the manifest and connect to the senders; generation goes on. Returns the names of its readers, one per
        engine worker. Raises ManifestError."""
        ...

    async def pause(self, session: str, mode: PauseMode, deadline_s: float) -> int: ...

    async def unload(self, session: str, kv: KVMode) -> int: ...

    async def receive(self, session: str, deadline_s: float) -> int:
        """Take every bucket; returns their bytes. Into the live weights, under pause; with staging ``full`` into a copy
        on this host, while generation goes on."""
        ...

    async def load(self, session: str) -> None:
        """Staging ``full``: write that copy into the live weights."""

    async def verify(self, session: str) -> dict[Role, str]:
        """Everything has arrived; returns the digests of the live weights."""
        ...

    async def commit(self, session: str, version: PolicyVersion) -> None: ...

    async def reload(self, session: str) -> None: ...

    async def resume(self, session: str, version: PolicyVersion) -> None: ...

    async def abort(self, session: str) -> PolicyVersion | None:
        """Give the session up. Returns the version that the replica serves again, or None if it has no whole one."""
        ...
