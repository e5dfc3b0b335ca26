"""A replica's side of sync sessions, over any engine: enforces the order of the phases and refuses other sessions."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.manifest import Role
from asyncrl.param_sync.session_protocol import KVMode, PauseMode, ReceivePlan, ReplicaSession, Staging
from asyncrl.param_sync.weight_receiver import WeightReceiver
from asyncrl.types.versions import PolicyVersion

T = TypeVar("T")

#: the phases of a session, in order
PHASES_OF: dict[Staging, Sequence[str]] = {
    "bucket": ("plan", "pause", "unload", "transfer", "verify", "commit", "reload", "resume"),
    "full": ("plan", "transfer", "pause", "unload", "load", "verify", "commit", "reload", "resume"),
}


class SyncedEngine(Protocol):
    """The part of an engine that a sync session drives, see `asyncrl.rollouter.engines.base.Engine`."""

    async def pause(self, mode: PauseMode, deadline_s: float) -> int: ...
    async def resume(self, version: PolicyVersion) -> None: ...
    async def release_kv(self) -> int: ...
    async def restore_kv(self) -> None: ...
    async def flush_kv(self) -> None: ...
    async def digest(self, role: Role) -> str: ...


class EngineSession(ReplicaSession):
    """The replica's side in the replica's own process.

    All methods are coroutines of the engine's event loop. A phase goes to its end even if its caller gives up, and
    `abort` and the next ``plan`` wait for that. After one that failed, or that took too long, the session's later
    phases fail: an evicted replica's connection breaks, its weights may match no version, it stays paused, and
    the next session's ``plan`` starts over.
    """

    def __init__(self, name: str, engine: SyncedEngine, receiver: WeightReceiver) -> None:
        self._name, self._engine, self._receiver = name, engine, receiver
        self._session: str | None = None
        self._version: PolicyVersion | None = None  # the last one committed
        self._limits: Mapping[str, float] = {}
        #: of each phase of the session, in order: why the next one cannot begin, or None, once it has ended
        self._ends: dict[str, asyncio.Future[str | None]] = {}
        self._begun: set[str] = set()
        self._phase: asyncio.Task[Any] | None = None  # under way, or the last one
        self._paused = self._kv_released = False
        self._planning = asyncio.Lock()

    async def needs_base(self) -> bool:
        return self._receiver.needs_base()

    async def plan(self, plan: ReceivePlan) -> Sequence[str]:
        async with self._planning:
            await self._leave()
            if self._version is not None and plan.version < self._version:
                raise self._error("plan", f"version {plan.version} is older than the committed {self._version}")
            readers = await self._receiver.open(plan)
            self._session, self._limits, self._begun = plan.session, plan.limits, {"plan"}
            self._ends = {phase: asyncio.get_running_loop().create_future() for phase in PHASES_OF[plan.staging]}
            self._ends["plan"].set_result(None)
            return readers

    async def pause(self, session: str, mode: PauseMode, deadline_s: float) -> int:
        async def pause() -> int:
            if self._paused:
                return 0
            self._paused = True  # also after an error: it may be paused, and its router has aborted what it had
            try:
                return await self._engine.pause(mode, deadline_s)
            except (TimeoutError, asyncio.CancelledError):  # taken back
                self._paused = False
                raise

        return await self._run("pause", session, pause)

    async def unload(self, session: str, kv: KVMode) -> int:
        async def unload() -> int:
            freed = 0
            if kv == "unload" and not self._kv_released:
                freed = await self._engine.release_kv()
                self._kv_released = True
            elif kv == "recompute":
                await self._engine.flush_kv()
            return freed

        return await self._run("unload", session, unload)

    async def receive(self, session: str, deadline_s: float) -> int:
        async def receive() -> int:
            try:
                return await self._receiver.receive(deadline_s)
            except Exception:
                # its connections break: else senders, and with them the other replicas, would wait half of the deadline
                with contextlib.suppress(Exception):
                    await self._receiver.abort()
                raise

        return await self._run("transfer", session, receive)

    async def load(self, session: str) -> None:
        await self._run("load", session, self._receiver.load)

    async def verify(self, session: str, digests: Mapping[Role, str]) -> None:
        async def verify() -> None:
            await self._receiver.verify()
            for role, sent in digests.items():
                if (found := await self._engine.digest(role)) != sent:
                    message = f"the {role}'s digest is {found}, the senders' is {sent}: different weights arrived"
                    raise SyncError("verify", self._name, None, None, message)

        await self._run("verify", session, verify)

    async def commit(self, session: str, version: PolicyVersion) -> None:
        async def commit() -> None:
            self._version = None
            await self._receiver.commit(version)
            self._version = version

        await self._run("commit", session, commit)

    async def reload(self, session: str) -> None:
        await self._run("reload", session, self._restore_kv)

    async def resume(self, session: str, version: PolicyVersion) -> None:
        async def resume() -> None:
            if version != self._version:
                raise self._error("resume", f"expected the committed version {self._version}, found {version}")
            await self._resume(version)

        await self._run("resume", session, resume)
        self._end_session()

    async def abort(self, session: str) -> PolicyVersion | None:
        async with self._planning:
            whole = lambda: self._version is not None and self._receiver.intact()
            if session == self._session:
                await self._leave()
                if self._version is not None and whole():
                    await self._restore_kv()
                    if self._paused:
                        await self._resume(self._version)
            return self._version if whole() and not self._paused else None

    async def close(self) -> None:
        await self._leave()
        await self._receiver.close()

    # -- the order of phases ------------------------------------------------------------------------------------------

    async def _run(self, phase: str, session: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Go through a phase of the session, after those before it, which may be called a moment later. Raises
        SyncError if one of them failed, if this phase was gone through before, or if the session ended meanwhile:
        another one began, or this one was aborted."""
        self._check(session, phase)
        ends, phases = self._ends, list(self._ends)
        if phase not in phases:
            raise self._error(phase, f"expected one of {', '.join(phases)}")
        before = phases[phases.index(phase) - 1]
        problem = await asyncio.shield(ends[before]) if phase not in self._begun else None
        self._check(session, phase)
        if phase in self._begun:
            problem = "called again"
        if problem is not None:
            raise self._error(phase, problem)
        self._begun.add(phase)
        self._phase = under_way = asyncio.create_task(work(), name=phase)
        under_way.add_done_callback(partial(self._phase_ended, ends, now_s()))
        try:
            result = await asyncio.shield(under_way)
        except asyncio.CancelledError:
            if not under_way.cancelled():  # the caller gave up
                raise
            raise self._error(phase, f"session {session} ended, and took it back") from None
        if session != self._session:
            raise self._error(phase, f"session {session} ended during this phase")
        return result

    def _check(self, session: str, phase: str) -> None:
        if session != self._session:
            raise self._error(phase, f"session {session} is over; this replica is in session {self._session}")

    def _phase_ended(
        self, ends: Mapping[str, asyncio.Future[str | None]], began_s: float, task: asyncio.Task[Any]
    ) -> None:
        """Called even if its caller has given up."""
        phase = task.get_name()
        if task.cancelled() or task.exception() is not None:
            _stop(ends, f"expected after {phase}, which failed")
        elif now_s() - began_s > self._limits.get(phase, math.inf):
            _stop(ends, f"expected after {phase}, for which the session no longer waited")
        elif not ends[phase].done():
            ends[phase].set_result(None)

    def _error(self, phase: str, message: str) -> SyncError:
        return SyncError(phase, self._name, self._version, None, message)

    async def _leave(self) -> None:
        """Leave the session; returns when nothing of it is under way any more: the engine is paused or not, and nothing
        writes into the weights. A pause, which may wait for long samples, is taken back."""
        self._end_session()
        if (phase := self._phase) is not None and phase.get_name() == "commit":  # all or nothing
            await asyncio.wait([phase])
        await self._receiver.abort()
        if phase is not None:
            if phase.get_name() == "pause":
                phase.cancel()
            await asyncio.wait([phase])

    def _end_session(self) -> None:
        _stop(self._ends, "the session is over")
        self._session, self._ends = None, {}

    async def _restore_kv(self) -> None:
        if self._kv_released:
            await self._engine.restore_kv()
            self._kv_released = False

    async def _resume(self, version: PolicyVersion) -> None:
        await self._engine.resume(version)
        self._paused = False


def _stop(ends: Mapping[str, asyncio.Future[str | None]], why: str) -> None:
    """No phase begins any more."""
    for end in ends.values():
        if not end.done():
            end.set_result(why)
