"""The parameter-sync group of a run: its senders and replicas, and one session after the other between them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from asyncrl.config.schema import ParamSyncConfig
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.handles import ReplicaHandle, SenderHandle
from asyncrl.param_sync.session import SyncReport, SyncSession
from asyncrl.sample import PolicyVersion
from asyncrl.telemetry.recorder import Recorder, now_s

log = logging.getLogger(__name__)


class ParameterSyncGroup:
    """``await group(version)`` moves all replicas to a version and returns the session's metrics. One session runs at a
    time, others wait for it.

    ``on_routable`` is told which replicas may be given work whenever that changes, ``on_unfit`` which one to end, and
    why, when a session had none left. ``config.pause`` must be a mode. ``senders`` may change between sessions."""

    def __init__(
        self,
        config: ParamSyncConfig,
        senders: Mapping[str, SenderHandle],
        replicas: Mapping[str, ReplicaHandle],
        on_routable: Callable[[Sequence[str]], Awaitable[None]],
        recorder: Recorder,
        on_unfit: Callable[[str, str], Awaitable[None]] | None = None,
    ) -> None:
        self._config, self._senders, self._recorder = config, senders, recorder
        self._on_routable, self._on_unfit = on_routable, on_unfit
        self._routable: frozenset[str] = frozenset(replicas)  # what the router believes at first
        self._joined = asyncio.Event()
        self._one_session = asyncio.Lock()
        self.last_sync_s = now_s()
        self.fleet = Fleet()
        for name, handle in replicas.items():
            self.fleet.add(name, handle)

    async def __call__(self, version: PolicyVersion, on_sent: Callable[[], None] = lambda: None) -> dict[str, float]:
        """``on_sent`` is called when the senders are free again. Raises what `SyncSession.run` raises; an evicted
        replica is told on stderr and left out until the next."""
        self._joined.clear()
        return metrics(await self._session(version, None, on_sent))

    async def rejoin(self, version: PolicyVersion) -> None:
        """Bring the replicas that are out of service to ``version``, which the others serve and which the senders still
        hold. Those that fail stay out."""
        self._joined.clear()
        out = self.fleet.out_of_service
        if out:
            with contextlib.suppress(SyncError):  # told by its evictions
                await self._session(version, list(out))

    async def renew(self) -> None:
        """End the replicas that are out of service, so that they are started again."""
        for name, why in self.fleet.out_of_service.items():
            if self._on_unfit is not None and not self._joined.is_set():
                await self._on_unfit(name, f"is out of service ({why or 'not synced yet'})")

    async def someone_to_join(self) -> None:
        """Wait until `join` was called since the last session."""
        await self._joined.wait()
        self._joined.clear()

    def join(self, name: str, replica: ReplicaHandle) -> None:
        """A replica that was started again; it serves from its first session on."""
        self.fleet.add(name, replica)
        self._joined.set()

    async def leave(self, name: str) -> None:
        """A replica died. If nobody serves any more, one that waits for the next session is wanted at once."""
        self.fleet.remove(name)
        if self.fleet.handles and not self.fleet.routable:
            self._joined.set()
        await self._tell()

    def routable(self) -> list[str]:
        return sorted(self.fleet.routable)

    async def _session(
        self, version: PolicyVersion, only: Sequence[str] | None, on_sent: Callable[[], None] = lambda: None
    ) -> SyncReport:
        async with self._one_session:
            session = SyncSession(self._senders, self.fleet, self._config, self._recorder, only, on_sent)
            try:
                report = await session.run(version)
            finally:
                self.last_sync_s = now_s()
                await self._tell()
        for error in report.evicted.values():
            log.warning("evicted until the next sync: %s", error)
        return report

    async def _tell(self) -> None:
        if (now := frozenset(self.fleet.routable)) != self._routable:
            self._routable = now
            await self._on_routable(sorted(now))


def metrics(report: SyncReport) -> dict[str, float]:
    """A session's figures under their public names."""
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
        **{f"param_sync/paused_s/{name}": seconds for name, seconds in paused.items()},
        "param_sync/kv_freed_bytes": sum(report.freed_bytes.values()),
        **({"param_sync/link_fraction": rate / report.ceiling} if report.ceiling else {}),
        "param_sync/held_requests": report.held_requests,
        "param_sync/evicted": len(report.evicted),
    }
