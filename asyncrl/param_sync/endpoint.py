"""A replica's half of a sync session, over any engine: it keeps the order of the steps and fences other sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from asyncrl.param_sync.digest import ROLES
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.handles import KVMode, PauseMode, ReceivePlan, Staging
from asyncrl.param_sync.intake import Intake
from asyncrl.param_sync.manifest import Role
from asyncrl.sample import PolicyVersion

#: the steps of a session, in order
_STEPS: dict[Staging, Sequence[str]] = {
    "bucket": ("plan", "pause", "unload", "transfer", "verify", "commit", "reload", "resume"),
    "full": ("plan", "transfer", "pause", "unload", "load", "verify", "commit", "reload", "resume"),
}


class SyncedEngine(Protocol):
    """What of an engine a sync session needs (see `asyncrl.rollouter.engine.Engine`)."""

    async def pause(self, mode: PauseMode, deadline_s: float) -> int: ...
    async def resume(self, version: PolicyVersion) -> None: ...
    async def release_kv(self) -> int: ...
    async def restore_kv(self) -> None: ...
    async def flush_kv(self) -> None: ...
    async def digest(self, role: Role) -> str: ...


class ReplicaEndpoint:
    """Implements `asyncrl.param_sync.handles.ReplicaHandle` in the replica's own process.

    All methods are coroutines of the engine's event loop. An evicted replica is simply no longer called: its connection
    breaks, its weights may be of no version, it stays paused, and the next session's ``plan`` starts it over.
    """

    def __init__(self, name: str, engine: SyncedEngine, intake: Intake) -> None:
        self._name, self._engine, self._intake = name, engine, intake
        self._session: str | None = None
        self._version: PolicyVersion | None = None  # the last one committed
        self._staging: Staging = "bucket"
        self._done = ""  # the last step of the session that was done
        self._committing: asyncio.Future[None] | None = None
        self._paused = self._kv_released = False
        self._planning = asyncio.Lock()

    async def needs_base(self) -> bool:
        return self._intake.needs_base()

    async def plan(self, plan: ReceivePlan) -> Sequence[str]:
        async with self._planning:
            await self._leave()
            if self._version is not None and plan.version < self._version:
                raise self._error("plan", f"version {plan.version} is older than {self._version}, which it holds")
            readers = await self._intake.open(plan)
            self._session, self._staging, self._done = plan.session, plan.staging, "plan"
            return readers

    async def pause(self, session: str, mode: PauseMode, deadline_s: float) -> int:
        """Returns how many requests were cut, kept or waited for; none if an earlier session left it paused."""
        self._enter(session, "pause")
        cut = 0 if self._paused else await self._engine.pause(mode, deadline_s)
        self._paused = True
        self._leave_step(session, "pause")
        return cut

    async def unload(self, session: str, kv: KVMode) -> int:
        """Returns the bytes freed."""
        self._enter(session, "unload")
        freed = 0
        if kv == "unload" and not self._kv_released:
            freed = await self._engine.release_kv()
            self._kv_released = True
        elif kv == "recompute":
            await self._engine.flush_kv()
        self._leave_step(session, "unload")
        return freed

    async def receive(self, session: str, deadline_s: float) -> int:
        self._enter(session, "transfer")
        nbytes = await self._intake.receive(deadline_s)
        self._leave_step(session, "transfer")
        return nbytes

    async def load(self, session: str) -> None:
        self._enter(session, "load")
        await self._intake.load()
        self._leave_step(session, "load")

    async def verify(self, session: str) -> dict[Role, str]:
        self._enter(session, "verify")
        await self._intake.verify()
        digests = {role: await self._engine.digest(role) for role in ROLES}
        self._leave_step(session, "verify")
        return digests

    async def commit(self, session: str, version: PolicyVersion) -> None:
        self._enter(session, "commit")
        # Shielded: if this step is given up meanwhile, the weights are new all the same.
        self._committing = asyncio.ensure_future(self._commit(version))
        await asyncio.shield(self._committing)
        self._leave_step(session, "commit")

    async def reload(self, session: str) -> None:
        self._enter(session, "reload")
        await self._restore_kv()
        self._leave_step(session, "reload")

    async def resume(self, session: str, version: PolicyVersion) -> None:
        self._enter(session, "resume")
        if version != self._version:
            raise self._error("resume", f"asked to serve version {version}, it holds {self._version}")
        await self._resume(version)
        self._session, self._done = None, ""

    async def abort(self, session: str) -> PolicyVersion | None:
        async with self._planning:
            whole = lambda: self._version is not None and self._intake.intact()
            if session == self._session:
                await self._leave()
                if self._version is not None and whole():
                    await self._restore_kv()
                    if self._paused:
                        await self._resume(self._version)
            return self._version if whole() and not self._paused else None

    async def close(self) -> None:
        await self._leave()
        await self._intake.close()

    # -- the order of things ------------------------------------------------------------------------------------------

    def _enter(self, session: str, step: str) -> None:
        if session != self._session:
            raise self._error(step, f"session {session} is over here; this replica takes part in {self._session}")
        steps = _STEPS[self._staging]
        if step not in steps:
            raise self._error(step, f"is no step of a session with staging {self._staging}")
        if self._done != (before := steps[steps.index(step) - 1]):
            raise self._error(step, f"comes after {before}, the last step done is {self._done}")
        self._done = f"{step} (not finished)"

    def _leave_step(self, session: str, step: str) -> None:
        if session != self._session:  # another session began, or this one was given up, while the step went on
            raise self._error(step, f"session {session} ended before this step did")
        self._done = step

    def _error(self, phase: str, message: str) -> SyncError:
        return SyncError(phase, self._name, self._version, None, message)

    async def _leave(self) -> None:
        """Be in no session; returns when nobody writes into the weights any more."""
        self._session, self._done = None, ""
        await self._intake.abort()
        if self._committing is not None:
            await asyncio.wait([self._committing])

    async def _commit(self, version: PolicyVersion) -> None:
        self._version = None
        await self._intake.commit(version)
        self._version = version

    async def _restore_kv(self) -> None:
        if self._kv_released:
            await self._engine.restore_kv()
            self._kv_released = False

    async def _resume(self, version: PolicyVersion) -> None:
        await self._engine.resume(version)
        self._paused = False
