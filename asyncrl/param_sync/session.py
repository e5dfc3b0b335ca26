"""One sync session: the transaction that moves every replica from one policy version to the next.

::

    staging bucket   plan → pause → unload → transfer → verify → commit → reload → resume
    staging full     plan → transfer → pause → unload → load → verify → commit → reload → resume

The transfer is common to all replicas; each goes through the other phases at its own pace. With staging ``full`` the
transfer fills a copy on the replicas' hosts while they generate: the senders are free afterwards, pauses are short, and
replicas may change over one by one (``rollout_update: rolling``). A replica that fails is evicted and no longer called;
the others continue. The session fails if the manifest does not fit (before anything is paused), if a sender fails, or
if no replica is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from asyncrl.config.schema import ParamSyncConfig
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.digest import combine_hashes
from asyncrl.param_sync.errors import ALL_REPLICAS, SyncError
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.manifest import ROLES, Manifest, ManifestError, Role
from asyncrl.param_sync.session_protocol import (
    KVMode,
    PauseMode,
    ReceivePlan,
    ReplicaSession,
    SenderSession,
    SendPlan,
    Staging,
)
from asyncrl.processes.tasks import cancelled
from asyncrl.types.versions import PolicyVersion

T = TypeVar("T")

_Calls = dict[str, Coroutine[Any, Any, Any]]  # of a replica, by phase, in order

_LAST_WORDS_S = 1.0  # for a party to report its own error, and for a sender to receive an abort
PHASES = ("plan", "pause", "unload", "transfer", "load", "verify", "commit", "reload", "resume")


@dataclass
class SyncReport:
    """Result of a session. ``seconds``: by phase, from the first replica's entry to the last one's exit, so phases may
    overlap; of phases called at once a relay may report the end of several together, and the first one then gets their
    time. ``held_requests``: requests that the pause aborted, kept or waited for. ``freed_bytes``: of KV cache, by
    replica. Both without replicas that failed. ``paused_s``: by replica. ``evicted``: errors by replica. ``ceiling``:
    speed of the slowest link in bytes per second, if all senders measured theirs."""

    session: str
    version: PolicyVersion
    seconds: dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0
    nbytes: int = 0
    ceiling: float | None = None
    held_requests: int = 0
    freed_bytes: dict[str, int] = field(default_factory=dict)
    paused_s: dict[str, float] = field(default_factory=dict)
    evicted: dict[str, SyncError] = field(default_factory=dict)
    digests: dict[Role, str] = field(default_factory=dict)


class SyncSession:
    """Runs once. ``senders``: every trainer rank by name; ``config.pause`` must be a mode, not ``auto``; ``only``: the
    replicas that take part (None: the whole fleet). ``on_sent`` is called when the senders are free again, and
    ``on_changed`` awaited after each replica of a rolling update. ::

    report = await SyncSession(senders, fleet, config.param_sync, recorder).run(PolicyVersion(0, 7))
    """

    def __init__(
        self,
        senders: Mapping[str, SenderSession],
        fleet: Fleet,
        config: ParamSyncConfig,
        recorder: Recorder | None = None,
        only: Collection[str] | None = None,
        on_sent: Callable[[], None] = lambda: None,
        on_changed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        if config.pause not in ("abort", "keep", "wait"):
            raise ValueError(
                f"param_sync.pause: expected abort, keep or wait in a sync session, found {config.pause!r}"
            )
        self._senders, self._fleet, self._config = dict(senders), fleet, config
        self._deadlines = config.deadlines
        self._recorder = recorder or Recorder("sync")
        self._on_sent, self._on_changed = on_sent, on_changed
        self._full = config.staging == "full"
        self._active: dict[str, ReplicaSession] = {
            name: session for name, session in fleet.sessions.items() if only is None or name in only
        }
        self._served = dict(fleet.routable)  # versions to roll back to
        self._times: dict[str, tuple[float, float]] = {}
        self._pausing_since: dict[str, float] = {}
        self._receiving: dict[str, asyncio.Task[int]] = {}
        self._readers: dict[str, tuple[str, ...]] = {}  # by replica
        self._dropped: dict[str, str] = {}

    async def run(self, version: PolicyVersion) -> SyncReport:
        """Move every replica of the fleet to ``version``.

        Raises ManifestError if a replica's parameters do not match the manifest (nothing was paused), and SyncError if
        a sender fails or no replica is left. Replicas with intact weights then serve their old version again."""
        started_s = now_s()
        self._version, self._session = version, f"{version}-{uuid.uuid4().hex[:12]}"
        self._report = SyncReport(self._session, version)
        try:
            manifest = await self._plan()
            if self._full:
                await self._transfer(manifest)
                await self._each(self._received)
                await self._change_over()
            else:
                await self._each(self._quiesce)
                await self._transfer(manifest)
                await self._each(self._receive_and_adopt)
        except BaseException:
            await self._roll_back()
            raise
        finally:
            for task in self._receiving.values():
                task.cancel()
            await asyncio.gather(*self._receiving.values(), return_exceptions=True)
        self._report.seconds = {p: end_s - start_s for p, (start_s, end_s) in self._times.items()}
        self._report.total_s = now_s() - started_s
        return self._report

    # -- the phases ---------------------------------------------------------------------------------------------------

    async def _plan(self) -> Manifest:
        found = await asyncio.gather(*(self._call("plan", name, s.offer()) for name, s in self._senders.items()))
        offers = [offer for offer in found if offer is not None]
        manifest = offers[0].manifest
        if manifest.adapter is not None and not await self._base_is_needed():
            manifest = manifest.without_base()
        addresses = tuple(offer.address for offer in offers)
        staging: Staging = "full" if self._full else "bucket"
        deadline_s, limits = self._deadlines.plan_s, {phase: self._limit_s(phase) for phase in PHASES}
        plan = ReceivePlan(self._session, self._version, manifest, addresses, deadline_s, staging, limits)

        async def join(name: str, replica: ReplicaSession) -> None:
            self._readers[name] = tuple(await self._call("plan", name, replica.plan(plan)))

        await self._each(join)
        return manifest

    async def _base_is_needed(self) -> bool:
        """True if any replica is new or lost its base. The base is then sent to all, because they share one stream."""
        needed: list[bool] = []

        async def ask(name: str, replica: ReplicaSession) -> None:
            needed.append(await self._call("plan", name, replica.needs_base()))

        await self._each(ask)
        return any(needed)

    async def _quiesce(self, name: str, replica: ReplicaSession) -> None:
        self._note_pause(name, await self._in_turn(name, self._pause_calls(replica)))

    def _pause_calls(self, replica: ReplicaSession) -> _Calls:
        mode, kv = cast(PauseMode, self._config.pause), cast(KVMode, self._config.kv)
        return {
            "pause": replica.pause(self._session, mode, self._deadlines.pause_s),
            "unload": replica.unload(self._session, kv),
        }

    def _note_pause(self, name: str, answers: Mapping[str, Any]) -> None:
        self._report.held_requests += answers["pause"]
        self._report.freed_bytes[name] = answers["unload"]

    async def _change_over(self) -> None:
        """Staging ``full``: load the host copies, in all replicas at once or one after the other."""

        async def change(name: str, replica: ReplicaSession) -> None:
            load: _Calls = {"load": replica.load(self._session)}
            calls = self._pause_calls(replica) | load | self._adopt_calls(replica)
            self._note_pause(name, await self._in_turn(name, calls))
            self._serve(name)

        if self._config.rollout_update == "rolling":
            for name in list(self._active):
                await self._each(change, [name])
                if self._on_changed is not None:
                    await self._on_changed()  # the samples of an evicted one must not wait for all others
        else:
            await self._each(change)

    async def _transfer(self, manifest: Manifest) -> None:
        """Send to all active replicas. Afterwards their receive calls have returned or are about to."""
        limit_s = self._deadlines.transfer_s
        # A stalled replica costs half of the deadline; the other half is left to the others.
        plan = SendPlan(
            self._session,
            self._version,
            manifest,
            tuple(reader for name in self._active for reader in self._readers[name]),
            limit_s,
            limit_s / 2,
            self._config.checksum,
            keep=self._full,
        )
        calls = ((name, sender.send(plan)) for name, sender in self._senders.items())
        sending = [asyncio.create_task(self._call("transfer", name, call)) for name, call in calls]
        for name, replica in self._active.items():
            receive = self._call("transfer", name, replica.receive(self._session, limit_s))
            self._receiving[name] = asyncio.create_task(receive)
        try:
            reports = await asyncio.gather(*sending)  # the first failure at once: it may keep the others waiting
        finally:
            for task in sending:
                task.cancel()
        replica_of = {reader: name for name, readers in self._readers.items() for reader in readers}
        self._dropped = {
            replica_of[reader]: f"{sender} dropped it: {why}"
            for sender, report in zip(self._senders, reports, strict=True)
            for reader, why in report.dropped.items()
        }
        for role in ROLES:
            hashes = {name: h for report in reports for name, h in report.hashes[role].items()}
            self._report.digests[role] = combine_hashes(hashes)
        self._report.nbytes = sum(report.nbytes for report in reports)
        ceilings = [report.ceiling for report in reports if report.nbytes]
        measured = [ceiling for ceiling in ceilings if ceiling is not None]
        self._report.ceiling = min(measured) if measured and measured == ceilings else None
        self._on_sent()

    async def _received(self, name: str, replica: ReplicaSession) -> None:
        if name in self._dropped:
            # Prefer the replica's own error, if it is still alive to report it.
            await asyncio.wait([self._receiving[name]], timeout=_LAST_WORDS_S)
            own = self._receiving[name].exception() if self._receiving[name].done() else None
            if not isinstance(own, SyncError) or own.bucket is None:
                account = f"{own.message}; " if isinstance(own, SyncError) else ""
                raise SyncError("transfer", name, self._version, None, f"{account}{self._dropped[name]}") from own
        await self._receiving[name]

    async def _receive_and_adopt(self, name: str, replica: ReplicaSession) -> None:
        """One step, so that a replica with all its weights does not wait, paused, for the others."""
        await self._received(name, replica)
        await self._in_turn(name, self._adopt_calls(replica))
        self._serve(name)

    def _adopt_calls(self, replica: ReplicaSession) -> _Calls:
        return {
            "verify": replica.verify(self._session, self._report.digests),
            "commit": replica.commit(self._session, self._version),
            "reload": replica.reload(self._session),
            "resume": replica.resume(self._session, self._version),
        }

    def _serve(self, name: str) -> None:
        self._fleet.serve(name, self._version)
        self._report.paused_s[name] = now_s() - self._pausing_since.pop(name)

    # -- failure ------------------------------------------------------------------------------------------------------

    async def _each(
        self, step: Callable[[str, ReplicaSession], Awaitable[None]], names: Collection[str] | None = None
    ) -> None:
        """Run a step for all active replicas, or for ``names``, concurrently; evict those that fail."""

        async def guarded(name: str, replica: ReplicaSession) -> None:
            try:
                await step(name, replica)
            except SyncError as error:
                self._evict(name, error)

        chosen = [(name, replica) for name, replica in self._active.items() if names is None or name in names]
        await asyncio.gather(*(guarded(name, replica) for name, replica in chosen))
        self._need_replicas()

    def _evict(self, name: str, error: SyncError) -> None:
        del self._active[name]
        self._fleet.evict(name, error)
        self._report.evicted[name] = error
        if (since_s := self._pausing_since.pop(name, None)) is not None:
            self._report.paused_s[name] = now_s() - since_s

    def _need_replicas(self) -> None:
        if not self._active:
            causes = "; ".join(str(e) for e in self._report.evicted.values()) or "the fleet is empty"
            phase = next(iter(self._report.evicted.values())).phase if self._report.evicted else "plan"
            raise SyncError(phase, ALL_REPLICAS, self._version, None, f"no replica is left: {causes}")

    async def _roll_back(self) -> None:
        """Abort the session everywhere. A replica that fails to abort is evicted; the original error is raised."""
        limit_s = self._deadlines.reload_s + self._deadlines.resume_s

        async def release(name: str, replica: ReplicaSession) -> None:
            try:
                whole = await asyncio.wait_for(replica.abort(self._session), limit_s)
            except Exception as error:
                self._fleet.evict(name, error)
                return
            if name not in self._served:
                return
            if whole is None:
                message = "aborted during the transfer: its weights match no version until the next sync sends them all"
                self._fleet.evict(name, SyncError("transfer", name, self._version, None, message))
            else:
                self._fleet.serve(name, whole)

        async def dismiss(sender: SenderSession) -> None:
            with contextlib.suppress(Exception):  # a hanging sender gets the call when it wakes
                await asyncio.wait_for(sender.abort(self._session), _LAST_WORDS_S)

        releases = [release(name, replica) for name, replica in self._active.items()]
        await asyncio.gather(*releases, *(dismiss(sender) for sender in self._senders.values()))

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _in_turn(self, name: str, calls: _Calls) -> dict[str, Any]:
        """Answers of a replica's calls, by phase. They are made all at once, as the replica goes through them in turn:
        so it does not wait, paused, for the next one. Each has its deadline from the answer before."""
        if "pause" in calls:
            self._pausing_since[name] = now_s()
        made = {phase: asyncio.ensure_future(call) for phase, call in calls.items()}
        try:
            return {phase: await self._call(phase, name, call) for phase, call in made.items()}
        finally:
            await cancelled(made.values())

    async def _call(self, phase: str, who: str, answer: Awaitable[T]) -> T:
        """Await a call of this phase within its deadline; a party that keeps the deadline itself has a moment longer to
        say what it waited for. Every failure except ManifestError becomes a SyncError with phase, party and version."""
        limit_s = self._limit_s(phase)
        with self._timed(phase, who):
            try:
                async with asyncio.timeout(limit_s):
                    return await answer
            except ManifestError:
                raise
            except SyncError as e:
                raise e.located(who, self._version) from e
            except TimeoutError as e:
                message = str(e) or f"no answer within the deadline of {limit_s - _LAST_WORDS_S:g} s"
                raise SyncError(phase, who, self._version, None, message) from e
            except Exception as e:
                raise SyncError(phase, who, self._version, None, f"{type(e).__name__}: {e}") from e

    def _limit_s(self, phase: str) -> float:
        deadline_s: float = getattr(self._deadlines, f"{'transfer' if phase == 'load' else phase}_s")
        return deadline_s + _LAST_WORDS_S

    @contextlib.contextmanager
    def _timed(self, phase: str, who: str) -> Iterator[dict[str, Any]]:
        start_s = now_s()
        with self._recorder.span(f"sync/{phase}", who=who, version=str(self._version)) as args:
            try:
                yield args
            finally:
                first_s, last_s = self._times.get(phase, (start_s, start_s))
                self._times[phase] = (min(first_s, start_s), max(last_s, now_s()))
