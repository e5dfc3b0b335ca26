"""Coordinates a run's sync sessions between its senders and replicas, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from asyncrl.config.schema import ParamSyncConfig
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.errors import ALL_REPLICAS, SyncError
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.session import SyncReport, SyncSession
from asyncrl.param_sync.session_protocol import ReplicaSession, SenderSession
from asyncrl.types.versions import PolicyVersion

log = logging.getLogger(__name__)


class ParameterSyncCoordinator:
    """``await coordinator(version)`` moves all replicas to a version and returns the session's metrics.

    ``on_routable`` gets the routable replicas whenever they change; ``on_unfit`` the name of each replica that must be
    restarted, and why. ``strands``: whether samples wait if only these replicas are routable; by default if none is.
    ``config.pause`` must be a mode. ``senders`` may change between sessions."""

    def __init__(
        self,
        config: ParamSyncConfig,
        senders: Mapping[str, SenderSession],
        replicas: Mapping[str, ReplicaSession],
        on_routable: Callable[[Sequence[str]], Awaitable[None]],
        recorder: Recorder,
        on_unfit: Callable[[str, str], Awaitable[None]] | None = None,
        strands: Callable[[Collection[str]], bool] = lambda routable: not routable,
    ) -> None:
        self._strands = strands
        self._config, self._senders, self._recorder = config, senders, recorder
        self._on_routable, self._on_unfit = on_routable, on_unfit
        self._routable: frozenset[str] = frozenset(replicas)  # the router's initial set
        self._joined = asyncio.Event()
        self._one_session = asyncio.Lock()
        self._evicted: set[str] = set()  # in the last session, and still in the fleet
        self._last_sync_s = now_s()
        self.fleet = Fleet()
        for name, session in replicas.items():
            self.fleet.add(name, session)

    async def __call__(self, version: PolicyVersion, on_sent: Callable[[], None] = lambda: None) -> dict[str, float]:
        """``on_sent`` is called when the senders are free again. Raises like `SyncSession.run`; an evicted replica is
        logged and stays out until the next session."""
        self._joined.clear()
        return metrics(await self._session(version, None, on_sent))

    async def rejoin(self, version: PolicyVersion) -> None:
        """Sync the replicas that are out of service to ``version``, which the others serve and the senders still hold.
        A replica that fails stays out. Raises SyncError if a sender fails."""
        self._joined.clear()
        out = self.fleet.out_of_service
        if out:
            try:
                await self._session(version, list(out))
            except SyncError as e:
                if e.who != ALL_REPLICAS:
                    raise
                log.warning("%s", e)  # the session gave no report to list the evictions

    async def renew(self) -> None:
        """Have the replicas that are out of service restarted."""
        for name, why in self.fleet.out_of_service.items():
            if self._on_unfit is not None and not self._joined.is_set():
                await self._on_unfit(name, f"is out of service ({why or 'not synced yet'})")

    async def someone_to_join(self) -> None:
        """Wait until a replica needs a sync: one joined since the last session or `joiners_seen`, or one left and
        strands samples."""
        await self._joined.wait()

    def joiners_seen(self) -> None:
        """Those that wait for a sync until now need not be reported again."""
        self._joined.clear()

    def join(self, name: str, replica: ReplicaSession) -> None:
        """Add a restarted replica; it serves after its first session."""
        self.fleet.add(name, replica)
        self._evicted.discard(name)
        self._joined.set()

    async def leave(self, name: str) -> None:
        """Remove a dead replica. If samples are stranded now, the waiting replicas must be synced at once."""
        self.fleet.remove(name)
        if self.fleet.out_of_service and self.stranded():
            self._joined.set()
        await self._report_routable()

    async def retire(self, name: str) -> None:
        """Remove a replica that lives, once no session is under way."""
        async with self._one_session:
            await self.leave(name)

    @property
    def last_sync_s(self) -> float:
        """When the last session ended; now, while one is under way."""
        return now_s() if self._one_session.locked() else self._last_sync_s

    def routable(self) -> list[str]:
        return sorted(self.fleet.routable)

    def stranded(self) -> bool:
        """True if samples wait for a replica until a sync brings one back: the trainer may wait for them."""
        return self._strands(self.fleet.routable)

    async def _session(
        self, version: PolicyVersion, only: Sequence[str] | None, on_sent: Callable[[], None] = lambda: None
    ) -> SyncReport:
        async with self._one_session:
            before = dict(self.fleet.sessions)
            session = SyncSession(
                self._senders, self.fleet, self._config, self._recorder, only, on_sent, self._report_routable
            )
            try:
                report = await session.run(version)
            finally:
                self._last_sync_s = now_s()
                await self._report_routable()
        for error in report.evicted.values():
            log.warning("evicted until the next sync: %s", error)
        # a replica that was replaced meanwhile starts over
        evicted = {name for name in report.evicted if self.fleet.sessions.get(name) is before[name]}
        again, self._evicted = self._evicted & evicted, evicted
        unfit = {name: "failed two syncs in a row" for name in again}
        if self.stranded():
            unfit |= dict.fromkeys(evicted - again, "failed a sync, and samples wait for it")
        for name, why in sorted(unfit.items()):
            if self._on_unfit is not None:
                await self._on_unfit(name, f"{why} ({report.evicted[name]})")
        return report

    async def _report_routable(self) -> None:
        if (now := frozenset(self.fleet.routable)) != self._routable:
            self._routable = now
            await self._on_routable(sorted(now))


def metrics(report: SyncReport) -> dict[str, float]:
    """Metrics of a session under their public names."""
    transfer_s = report.seconds["transfer"]
    rate = report.nbytes / transfer_s if transfer_s else 0.0
    paused = report.paused_s
    return {
        **{f"param_sync/{phase}_s": seconds for phase, seconds in report.seconds.items()},
        "param_sync/total_s": report.total_s,
        "param_sync/bytes": report.nbytes,
        "param_sync/gb_per_s": rate / 1e9,
        "param_sync/paused_s": max(paused.values(), default=0.0),
        "param_sync/paused_total_s": sum(paused.values()),
        "param_sync/replicas": len(paused),
        "param_sync/kv_freed_bytes": sum(report.freed_bytes.values()),
        **({"param_sync/link_fraction": rate / report.ceiling} if report.ceiling else {}),
        "param_sync/held_requests": report.held_requests,
        "param_sync/evicted": len(report.evicted),
    }
