"""Calls that a sync session makes to trainer ranks and replicas.

In production these are actors, in tests processes behind a pipe or plain objects. SyncError and ManifestError keep
their type on the way back; any other exception counts as a failure of the called party.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, cast

from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.manifest import ROLES, Manifest, Role
from asyncrl.types.versions import PolicyVersion

#: address of a transport's writer: a small picklable value that only its own transport reads
Address = Any
PauseMode = Literal["abort", "keep", "wait"]
KVMode = Literal["keep", "recompute", "unload"]
Staging = Literal["bucket", "full"]


@dataclass(frozen=True)
class SendPlan:
    """Description of a session for a sender. ``readers``: names of the connected readers; one that is silent for
    ``stall_s`` is dropped, so that the others still meet the ``deadline_s`` of the whole transfer. ``keep``: readers
    need the buckets again later (staging ``full``)."""

    session: str
    version: PolicyVersion
    manifest: Manifest
    readers: tuple[str, ...]
    deadline_s: float
    stall_s: float
    checksum: bool
    keep: bool = False


@dataclass(frozen=True)
class SendReport:
    """Result of one sender. ``hashes``: of its tensors by role and name; the hashes of all senders combine to the
    digests. ``dropped``: lost readers and the reasons. Once no reader is left, nothing is hashed. ``ceiling``: speed of
    the bare link in bytes per second, if its transport measured it."""

    nbytes: int = 0
    hashes: dict[Role, dict[str, bytes]] = field(default_factory=lambda: {role: {} for role in ROLES})
    dropped: dict[str, str] = field(default_factory=dict)
    ceiling: float | None = None


@dataclass(frozen=True)
class ReceivePlan:
    """Description of a session for a replica. ``addresses``: of all senders. ``limits``: seconds that the session waits
    for a phase, by phase."""

    session: str
    version: PolicyVersion
    manifest: Manifest
    addresses: tuple[Address, ...]
    deadline_s: float
    staging: Staging = "bucket"
    limits: Mapping[str, float] = field(default_factory=dict)


class Offer(NamedTuple):
    """``manifest``: the same of all senders. ``address``: for the readers."""

    manifest: Manifest
    address: Address


class SenderSession(Protocol):
    """A trainer rank's side of a sync session, see `asyncrl.param_sync.sender.Sender`. All ranks of a collective
    export take part."""

    async def offer(self) -> Offer | None:
        """What it sends, and where; None for a rank that sends nothing."""
        ...

    async def send(self, plan: SendPlan) -> SendReport:
        """Export and send; returns when the readers have read everything."""
        ...

    async def abort(self, session: str) -> None:
        """Make a running `send` finish without readers."""


class ReplicaSession(Protocol):
    """A replica's side of a sync session, and the only list of its calls.

    `asyncrl.param_sync.replica_session.EngineSession` implements it in the engine's process, `remote_session` forwards
    it to another process. Several phases may be called at once: they are gone through in their order. Every call after
    ``plan`` but ``abort`` raises SyncError for a session other than the planned one, and if an earlier phase failed.
    """

    async def needs_base(self) -> bool:
        """True if an adapter alone is not enough: no base was committed here, or its transfer was interrupted."""
        ...

    async def plan(self, plan: ReceivePlan) -> Sequence[str]:
        """Check the manifest and connect to the senders, while generation continues. Returns the names of the readers,
        one per engine worker. Raises ManifestError."""
        ...

    async def pause(self, session: str, mode: PauseMode, deadline_s: float) -> int:
        """Stop generating. Returns how many requests were aborted, kept or waited for; 0 if an earlier session left
        the replica paused."""
        ...

    async def unload(self, session: str, kv: KVMode) -> int:
        """Free or flush the KV cache as ``kv`` says. Returns the bytes freed."""
        ...

    async def receive(self, session: str, deadline_s: float) -> int:
        """Receive all buckets; returns their bytes. Staging ``bucket`` writes into the live weights, under pause;
        staging ``full`` into a copy on this host, while generation continues."""
        ...

    async def load(self, session: str) -> None:
        """Staging ``full``: write the host copy into the live weights."""

    async def verify(self, session: str, digests: Mapping[Role, str]) -> None:
        """Check that everything arrived, and that the live weights have the senders' digests."""

    async def commit(self, session: str, version: PolicyVersion) -> None:
        """Declare the new weights, target and draft, to be those of ``version``."""

    async def reload(self, session: str) -> None:
        """Allocate the KV cache that ``unload`` freed."""

    async def resume(self, session: str, version: PolicyVersion) -> None:
        """Generate under ``version``; ends the session."""

    async def abort(self, session: str) -> PolicyVersion | None:
        """Abandon the session. Returns the version that the replica serves again, or None if its weights match no
        version."""
        ...


REPLICA_CALLS = frozenset(name for name in vars(ReplicaSession) if not name.startswith("_"))


def remote_session(call: Callable[..., Awaitable[Any]]) -> ReplicaSession:
    """The session of a replica in another process: ``await call(name, *args)`` makes the call there."""
    return cast(ReplicaSession, _Remote(call))


class _Remote:
    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in REPLICA_CALLS:
            raise AttributeError(f"{name} is not a call of a replica's sync session")
        return partial(self._call, name)


async def answer(session: ReplicaSession, name: str, *args: Any) -> Any:
    """The other end of `remote_session`. Raises ValueError for a call that `ReplicaSession` does not declare."""
    if name not in REPLICA_CALLS:
        raise ValueError(f"expected a call of ReplicaSession ({', '.join(sorted(REPLICA_CALLS))}), found {name}")
    return await getattr(session, name)(*args)


def repeatable(session: ReplicaSession) -> ReplicaSession:
    """The session, but a phase that is called again, because its first answer was lost, is not gone through again: the
    call waits for the first one, or has its answer."""
    return cast(ReplicaSession, _Repeatable(session))


_REMEMBERED = 64  # sessions, the last of which a late call may belong to


class _Repeatable:
    def __init__(self, session: ReplicaSession) -> None:
        self._whole = session
        self._phases: dict[tuple[str, str], asyncio.Future[Any]] = {}  # since the last plan, by session and call
        self._planned: deque[str] = deque(maxlen=_REMEMBERED)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return getattr(self._whole, name) if name in ("needs_base", "abort") else partial(self._once, name)

    async def _once(self, name: str, of: ReceivePlan | str, *args: Any) -> Any:
        phase = (of.session if isinstance(of, ReceivePlan) else of), name
        if phase not in self._phases:
            if isinstance(of, ReceivePlan):
                if of.session in self._planned:  # its first plan was answered long ago; do not leave the present one
                    raise SyncError("plan", None, of.version, None, "an earlier session was planned again, late")
                self._phases = {}
                self._planned.append(of.session)
            self._phases[phase] = asyncio.ensure_future(getattr(self._whole, name)(of, *args))
        return await asyncio.shield(self._phases[phase])
