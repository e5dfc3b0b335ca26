"""A whole sync session of the quickstart's model between its own actors, over what it cannot do without."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import ray
import torch

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import read_tensors
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.session import SyncSession
from asyncrl.param_sync.session_protocol import remote_session
from asyncrl.processes.actor_client import ActorClient, start_ray
from asyncrl.rollouter.actors import EngineReplicaActor
from asyncrl.trainer.actors import RankGroup, TrainerRankActor
from asyncrl.types.versions import PolicyVersion
from benchmarks import quickstart

#: empty calls, those of one number at once: what the sender offers, the plan, pause and unload, the transfer of both
#: sides, verify to resume
TOGETHER = (1, 1, 2, 2, 4)
#: frozen: as sessions were, a call for each phase after the other; that of one side of the transfer counts
ONE_BY_ONE = (1,) * 9


@dataclass(frozen=True)
class SessionTimes:
    """Medians in seconds. ``copy_s``: all weights, within one process. ``calls_s``: empty calls of the replica,
    `ONE_BY_ONE`; ``together_s``: those `TOGETHER`. ``phases_s``: by phase."""

    session_s: float
    copy_s: float
    calls_s: float
    together_s: float
    phases_s: dict[str, float]


def session_times(rounds: int) -> SessionTimes:
    """Time sessions of the quickstart's trainer rank and engine replica, both idle, in their own Ray actors."""
    checkpoint, data = quickstart.ROOT / "checkpoints/arith-mimo", quickstart.ROOT / "data/arithmetic"
    quickstart.ensure_inputs(checkpoint, data)
    config = load_config(str(quickstart.ROOT / "configs/quickstart.yaml"), [f"model.path={checkpoint}"])
    config.param_sync = replace(config.param_sync, pause="abort", transport="shared_memory")
    config.trainer.device = config.rollout.engine.device = "cpu"
    with tempfile.TemporaryDirectory(prefix="asyncrl-ray-", ignore_cleanup_errors=True) as folder:
        start_ray(num_cpus=2, object_store_memory=128 * 1024 * 1024, logging_level="ERROR", _temp_dir=folder)
        try:
            return asyncio.run(_time_sessions(config, checkpoint, rounds))
        finally:
            ray.shutdown()


async def _time_sessions(config: Config, checkpoint: Path, rounds: int) -> SessionTimes:
    rank = ActorClient(TrainerRankActor.remote(config, 0, 1, True), "trainer/0")  # type: ignore[attr-defined]
    replica = ActorClient(EngineReplicaActor.remote(config, "replica/0"), "replica/0")  # type: ignore[attr-defined]
    await asyncio.gather(RankGroup([rank]).start(), replica.start())
    fleet = Fleet()
    fleet.add("replica/0", remote_session(replica.sync))
    weights = read_tensors(checkpoint)
    live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    reports, copies_s, calls_s, together_s = [], [], [], []
    for version in range(rounds + 1):
        reports.append(await SyncSession({"trainer/0": rank}, fleet, config.param_sync).run(PolicyVersion(0, version)))
        for counts, seconds in ((ONE_BY_ONE, calls_s), (TOGETHER, together_s)):
            began_s = time.perf_counter()
            for count in counts:
                await asyncio.gather(*(replica.where() for _ in range(count)))
            seconds.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        for name, tensor in weights.items():
            live[name].copy_(tensor)
        copies_s.append(time.perf_counter() - began_s)
    median = lambda values: statistics.median(values[1:])  # after a warm-up
    return SessionTimes(
        median([report.total_s for report in reports]),
        median(copies_s),
        median(calls_s),
        median(together_s),
        {phase: median([report.seconds[phase] for report in reports]) for phase in reports[0].seconds},
    )
