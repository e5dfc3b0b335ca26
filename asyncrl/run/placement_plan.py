"""Placement plan: machine and memory estimate of each actor, and figures derived from the config. Logged before a run
starts, printed by ``--dry-run``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from asyncrl.config.checks import gpus_per_replica
from asyncrl.config.schema import Config
from asyncrl.param_sync.transports.choose import AUTO, across_machines, bucket_sizes
from asyncrl.rollouter.engines.base import ENGINES
from asyncrl.run.machine import local_cpus
from asyncrl.run.memory_plan import checkpoint_bytes, replica_bytes, trainer_bytes
from asyncrl.run.preflight import Preflight
from asyncrl.run.rollouters import shard_names

GIB, MIB = 2**30, 2**20
TOKEN_BYTES = 24  # per token of a queued sample: id, logprob, mask, and additions of multi-turn loops


class PlacementError(RuntimeError):
    """The cluster cannot hold the pools; the message names what is missing."""


@dataclass
class Machine:
    """A node of the cluster and its free resources."""

    address: str
    cpus: float
    gpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.address} with {self.cpus:g} CPU and {self.gpus:g} GPU"


@dataclass(frozen=True)
class Pool:
    """Actors that each reserve ``cpus`` and ``gpus``. ``strategy``: see `RayConfig`."""

    name: str
    actors: tuple[str, ...]
    cpus: float
    gpus: float
    strategy: str

    def __str__(self) -> str:
        each = f"{self.cpus:g} CPU" + (f" + {self.gpus:g} GPU" if self.gpus else "")
        return f"the {self.name} pool ({len(self.actors)} × {each}, {self.strategy})"


@dataclass(frozen=True)
class Plan:
    """``machines``: pools' actor → address of its machine. ``memory``: pool → estimate for each of its actors."""

    machines: Mapping[str, str]
    pools: Sequence[Pool]
    memory: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    anywhere: Sequence[str] = ("rollouter",)  # actors on any machine

    def lines(self) -> Iterator[str]:
        """The plan as a table."""
        rows = [("actor", "machine", "CPU", "GPU", "memory (estimate)")]
        for pool in self.pools:
            for actor in pool.actors:
                gpus = f"{pool.gpus:g}" if pool.gpus else "–"
                rows.append((actor, self.machines[actor], f"{pool.cpus:g}", gpus, self.memory.get(pool.name, "")))
        rows += [(actor, "any", "–", "–", "") for actor in self.anywhere]
        rows.append(("queue", "the driver's", "–", "–", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        for row in rows:
            yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]).rstrip()
        width = max(map(len, self.figures), default=0)
        yield from (f"{name.ljust(width)}  {value}" for name, value in self.figures.items())


def pools(config: Config) -> tuple[Pool, Pool]:
    """Trainer and rollout pool. ``config``: with devices resolved (no ``auto``)."""
    engine, ray = config.rollout.engine, config.ray
    share = 0.5 if ray.share_gpus else 1  # of a GPU, for one of its two users
    trainer = Pool(
        "trainer",
        tuple(f"trainer/{i}" for i in range(config.trainer.ranks)),
        ray.cpus_per_rank,
        share if config.trainer.device == "cuda" else 0,
        ray.trainer_strategy,
    )
    rollout = Pool(
        "rollout",
        tuple(f"replica/{i}" for i in range(config.rollout.replicas)),
        ray.cpus_per_replica,
        gpus_per_replica(config) * share if engine.device == "cuda" else 0,
        ray.rollout_strategy,
    )
    return trainer, rollout


def with_devices(config: Config, gpus: float) -> Config:
    """Resolve device ``auto`` by the cluster's GPUs: without a reservation, an actor must use no GPU that it sees."""
    trainer, engine = config.trainer, config.rollout.engine
    wants = [(trainer.device, trainer.ranks), (engine.device, config.rollout.replicas * gpus_per_replica(config))]
    counts = [count for device, count in wants if device != "cpu"]
    wanted = max(counts, default=0) if config.ray.share_gpus else sum(counts)
    auto: Literal["cpu", "cuda"] = "cuda" if gpus >= wanted > 0 else "cpu"
    if trainer.device == "auto":
        trainer = replace(trainer, device=auto)
    if engine.device == "auto":
        engine = replace(engine, device=auto)
    return replace(config, trainer=trainer, rollout=replace(config.rollout, engine=engine))


def this_machine() -> Machine:
    return Machine("this machine", local_cpus(), torch.cuda.device_count())


def assign_machines(config: Config, machines: Sequence[Machine]) -> dict[str, str]:
    """Actor → address of the machine that Ray would choose if nothing else ran there. Raises PlacementError."""
    free = [replace(machine) for machine in machines]
    trainer, rollout = pools(config)
    if config.ray.share_gpus:
        both = replace(trainer, cpus=trainer.cpus + rollout.cpus, gpus=trainer.gpus + rollout.gpus)
        taken = _assign(both, trainer.strategy, free, machines)
        return taken | {replica: taken[rank] for rank, replica in zip(trainer.actors, rollout.actors, strict=True)}
    taken = _assign(trainer, trainer.strategy, free, machines)
    if rollout.strategy == "auto":
        beside = [machine for machine in free if machine.address in taken.values()]
        try:
            return taken | _assign(rollout, "strict_pack", beside, machines)
        except PlacementError as e:
            transport = config.param_sync.transport
            if transport != AUTO and not across_machines(transport):
                raise PlacementError(f"{e}; param_sync.transport={transport} needs it beside the trainers") from None
            return taken | _assign(rollout, "pack", free, machines)
    return taken | _assign(rollout, rollout.strategy, free, machines)


def _assign(pool: Pool, strategy: str, free: list[Machine], all_machines: Sequence[Machine]) -> dict[str, str]:
    """As `assign_machines`, for one pool; takes its resources from ``free``."""
    fits = lambda machine, count=1: machine.cpus >= pool.cpus * count and machine.gpus >= pool.gpus * count
    used: dict[str, int] = {}
    assigned: dict[str, str] = {}
    for actor in pool.actors:
        able = [machine for machine in free if fits(machine)]
        if strategy == "strict_pack" and not used:
            able = [machine for machine in free if fits(machine, len(pool.actors))]
        elif strategy == "strict_pack":
            able = [machine for machine in able if machine.address in used]
        elif strategy == "strict_spread":
            able = [machine for machine in able if machine.address not in used]
        if not able:
            raise PlacementError(f"{pool} does not fit; {_missing(pool, strategy, all_machines)}")
        times = lambda machine: used.get(machine.address, 0)
        chosen = min(able, key=times) if "spread" in strategy else max(able, key=times)
        chosen.cpus -= pool.cpus
        chosen.gpus -= pool.gpus
        used[chosen.address] = times(chosen) + 1
        assigned[actor] = chosen.address
    return assigned


def _missing(pool: Pool, strategy: str, machines: Sequence[Machine]) -> str:
    where = {"strict_pack": " on one machine", "strict_spread": " on as many machines as there are actors"}
    wants = f"{pool.cpus * len(pool.actors):g} CPU and {pool.gpus * len(pool.actors):g} GPU"
    return f"it needs {wants}{where.get(strategy, '')}, the cluster has {', '.join(map(str, machines)) or 'no machine'}"


def make_plan(config: Config, found: Preflight, machines: Mapping[str, str]) -> Plan:
    """``config``: with devices resolved; ``machines``: address of each rank's and replica's machine."""
    roles = ("rollouter", "endpoint") if config.rollout.agent.enabled else ("rollouter",)
    anywhere = [name for role in roles for name in shard_names(role, config.rollout.shards)]
    return Plan(machines, pools(config), _memory(config, found), _figures(config, found), anywhere)


def _memory(config: Config, found: Preflight) -> dict[str, str]:
    """Memory estimate for each actor of a pool, without the interpreter and its libraries."""
    trainer, rollout = _itemized(trainer_bytes(config, found)), _itemized(replica_bytes(config, found))
    if copies := checkpoint_bytes(config):
        trainer += f", and {_size(copies)} of host memory for checkpoints"
    if (shared := gpus_per_replica(config)) > 1:
        rollout += f", over {shared} GPUs"
    if not ENGINES.find(config.rollout.engine.name).preallocates_kv:
        rollout += f", plus the KV cache of {config.rollout.engine.name}"
    return {"trainer": trainer, "rollout": rollout}


def _itemized(parts: Mapping[str, float]) -> str:
    named = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in parts.items())
    return f"{_size(sum(parts.values()))}: {named}"


def _size(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{max(nbytes / MIB, 0.1):.1f} MiB"


def _figures(config: Config, found: Preflight) -> dict[str, str]:
    d, sync, a = found.derived, config.param_sync, config.async_training
    ahead = math.ceil((1 + d.staleness_threshold) * d.groups_per_version)
    group_bytes = config.rollout.n * found.context_tokens * TOKEN_BYTES
    return {
        "groups per step": f"{d.groups_per_step} of {config.rollout.n} samples",
        "groups per version": f"{d.groups_per_version}, a sync every {a.trigger_parameter_sync_step} steps",
        "groups in the run": f"{d.total_groups}, of {found.train_prompts} prompts",
        "staleness bound": f"{d.staleness_bound} versions (threshold {float(d.staleness_threshold):g})",
        "groups started ahead": f"at most {ahead} beyond those trained when their version was published",
        "queue memory": f"at most {_size(ahead * group_bytes)}, {_size(group_bytes)} for a group",
        "samples at once": f"{d.slots} in {config.rollout.engine.slots} slots per replica, plus some waiting for one",
        "context": f"{found.context_tokens} tokens, of which a prompt may have {found.max_prompt_tokens}",
        "sync": f"{sync.transport} transport, pause {d.pause}, KV {sync.kv}, staging {sync.staging}",
        "buckets": f"2 per side, each {' or '.join(_size(size) for size in bucket_sizes(config))}",
    }
