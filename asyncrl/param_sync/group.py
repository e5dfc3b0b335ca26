"""The parameter-sync group of a run: its senders and replicas, and one session after the other between them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence

from asyncrl.config.schema import ParamSyncConfig
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.handles import ReplicaHandle, SenderHandle
from asyncrl.param_sync.session import SyncReport, SyncSession
from asyncrl.sample import PolicyVersion
from asyncrl.telemetry.recorder import Recorder


class ParameterSyncGroup:
    """``await group(version)`` moves all replicas to a version and returns the session's metrics.

    ``on_routable`` is told which replicas may be given work whenever that changes. ``config.pause`` must be a mode."""

    def __init__(
        self,
        config: ParamSyncConfig,
        senders: Mapping[str, SenderHandle],
        replicas: Mapping[str, ReplicaHandle],
        on_routable: Callable[[Sequence[str]], Awaitable[None]],
        recorder: Recorder,
    ) -> None:
        self._config, self._senders, self._recorder = config, senders, recorder
        self._on_routable = on_routable
        self._routable: frozenset[str] = frozenset(replicas)  # what the router believes at first
        self.fleet = Fleet()
        for name, handle in replicas.items():
            self.fleet.add(name, handle)

    async def __call__(self, version: PolicyVersion) -> dict[str, float]:
        """Raises what `SyncSession.run` raises; an evicted replica is told on stderr and left out until the next."""
        try:
            report = await SyncSession(self._senders, self.fleet, self._config, self._recorder).run(version)
        finally:
            if (now := frozenset(self.fleet.routable)) != self._routable:
                self._routable = now
                await self._on_routable(sorted(now))
        for error in report.evicted.values():
            print(f"evicted until the next sync: {error}", file=sys.stderr, flush=True)
        return metrics(report)


def metrics(report: SyncReport) -> dict[str, float]:
    """A session's figures under their public names."""
    transfer_s = report.seconds["transfer"]
    paused = report.paused_s.values()
    return {
        **{f"param_sync/{phase}_s": seconds for phase, seconds in report.seconds.items()},
        "param_sync/total_s": report.total_s,
        "param_sync/bytes": report.nbytes,
        "param_sync/gb_per_s": report.nbytes / 1e9 / transfer_s if transfer_s else 0.0,
        "param_sync/paused_s": max(paused, default=0.0),
        "param_sync/evicted": len(report.evicted),
    }
