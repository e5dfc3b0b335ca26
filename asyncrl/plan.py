"""Which actor goes where, what it will hold in memory, and every figure that follows from the config: told before a
run starts, and by ``--dry-run`` instead of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from asyncrl.config.checks import local_cpus, ranks_per_copy
from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import tensor_shapes
from asyncrl.param_sync.manifest import DTYPE_BYTES
from asyncrl.param_sync.transports.choose import BUCKET_BYTES
from asyncrl.preflight import Preflight, kv_cache_bytes

GIB, MIB = 2**30, 2**20
TRAIN_BYTES = 16  # of a parameter: float32 weight, gradient and Adam's two moments
TOKEN_BYTES = 24  # of a queued sample: id, logprob, mask, and what a loop of several turns may add


class PlacementError(RuntimeError):
    """The cluster cannot hold the pools; the message says what is missing."""


@dataclass
class Machine:
    """A node of the cluster, with what is free of it."""

    address: str
    cpus: float
    gpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.address} with {self.cpus:g} CPU and {self.gpus:g} GPU"


@dataclass(frozen=True)
class Pool:
    """``count`` actors that each want ``cpus`` and ``gpus``, which no other has. ``strategy``: see `RayConfig`."""

    name: str
    actors: tuple[str, ...]
    cpus: float
    gpus: int
    strategy: str

    def __str__(self) -> str:
        each = f"{self.cpus:g} CPU" + (f" + {self.gpus} GPU" if self.gpus else "")
        return f"the {self.name} pool ({len(self.actors)} × {each}, {self.strategy})"


@dataclass(frozen=True)
class Plan:
    """``seats``: actor → address of its machine."""

    seats: Mapping[str, str]
    pools: Sequence[Pool]
    memory: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """As a table for people."""
        rows = [("actor", "machine", "CPU", "GPU", "memory (estimate)")]
        for pool in self.pools:
            for actor in pool.actors:
                gpus = str(pool.gpus) if pool.gpus else "–"
                rows.append((actor, self.seats[actor], f"{pool.cpus:g}", gpus, self.memory.get(pool.name, "")))
        rows += [("rollouter", "any", "–", "–", ""), ("queue", "the driver's", "–", "–", "")]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        for row in rows:
            yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]).rstrip()
        width = max(map(len, self.figures), default=0)
        yield from (f"{name.ljust(width)}  {value}" for name, value in self.figures.items())


def pools(config: Config) -> tuple[Pool, Pool]:
    """Trainer and rollout pool. ``config``: with devices resolved (no ``auto``)."""
    engine, ray = config.rollout.engine, config.ray
    trainer = Pool(
        "trainer",
        tuple(f"trainer/{i}" for i in range(config.trainer.ranks)),
        ray.cpus_per_rank,
        int(config.trainer.device == "cuda"),
        ray.trainer_strategy,
    )
    rollout = Pool(
        "rollout",
        tuple(f"replica/{i}" for i in range(config.rollout.replicas)),
        ray.cpus_per_replica,
        gpus_per_replica(config) if engine.device == "cuda" else 0,
        ray.rollout_strategy,
    )
    return trainer, rollout


def gpus_per_replica(config: Config) -> int:
    """With ``delivery: nccl`` the replica's process has one beside its server's: NCCL refuses two members on one."""
    engine = config.rollout.engine
    workers = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    return workers + (engine.delivery == "nccl")


def with_devices(config: Config, gpus: float) -> Config:
    """``auto`` becomes what is reserved, given the GPUs of the cluster: an actor without a reservation must not take a
    GPU that it can see."""
    trainer, engine = config.trainer, config.rollout.engine
    wants = [(trainer.device, trainer.ranks), (engine.device, config.rollout.replicas * gpus_per_replica(config))]
    wanted = sum(count for device, count in wants if device != "cpu")
    auto = "cuda" if gpus >= wanted > 0 else "cpu"
    resolve = lambda device: auto if device == "auto" else device
    return replace(
        config,
        trainer=replace(trainer, device=resolve(trainer.device)),
        rollout=replace(config.rollout, engine=replace(engine, device=resolve(engine.device))),
    )


def this_machine() -> Machine:
    return Machine("this machine", local_cpus(), torch.cuda.device_count())


def seats_on(config: Config, machines: Sequence[Machine]) -> dict[str, str]:
    """Where Ray would put the actors on these machines, if nothing else ran there. Raises PlacementError."""
    free = [replace(machine) for machine in machines]
    trainer, rollout = pools(config)
    taken = _seats(trainer, trainer.strategy, free, machines)
    if rollout.strategy == "auto":
        beside = [machine for machine in free if machine.address in taken.values()]
        try:
            return taken | _seats(rollout, "strict_pack", beside, machines)
        except PlacementError:
            return taken | _seats(rollout, "pack", free, machines)
    return taken | _seats(rollout, rollout.strategy, free, machines)


def _seats(pool: Pool, strategy: str, free: list[Machine], all_machines: Sequence[Machine]) -> dict[str, str]:
    fits = lambda machine, count=1: machine.cpus >= pool.cpus * count and machine.gpus >= pool.gpus * count
    used: dict[str, int] = {}
    seats: dict[str, str] = {}
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
        seats[actor] = chosen.address
    return seats


def _missing(pool: Pool, strategy: str, machines: Sequence[Machine]) -> str:
    where = {"strict_pack": " on one machine", "strict_spread": " on as many machines as there are actors"}
    wants = f"{pool.cpus * len(pool.actors):g} CPU and {pool.gpus * len(pool.actors)} GPU"
    return f"it wants {wants}{where.get(strategy, '')}, the cluster has {', '.join(map(str, machines)) or 'no machine'}"


def make_plan(config: Config, found: Preflight, seats: Mapping[str, str]) -> Plan:
    """``config``: with devices resolved; ``seats``: of ranks and replicas."""
    return Plan(seats, pools(config), _memory(config, found), _figures(config, found))


def _memory(config: Config, found: Preflight) -> dict[str, str]:
    """What each actor of a pool holds, without activations, the interpreter and its libraries."""
    parameters = sum(math.prod(shape) for shape in tensor_shapes(config.model.path).values())
    t, engine = config.trainer, config.rollout.engine
    cut = ranks_per_copy(config) // t.megatron.context_parallel_size if t.backend == "megatron" else t.ranks
    held = {"weights, gradients, optimizer": parameters * TRAIN_BYTES / cut}
    if config.model.lora.rank:  # what learns is small beside them, and they are the reference
        held = {"frozen weights": parameters * 4 / cut}
    elif config.algorithm.kl_coef:
        held["reference"] = parameters * 4 / cut
    held["logits"] = 2 * t.logprob_chunk_tokens * found.model.vocab_size * 4
    dtype = found.model.engine_dtype(engine.dtype)
    shared = gpus_per_replica(config)
    generates = {"weights": parameters * DTYPE_BYTES[dtype]}
    if config.param_sync.staging == "full":
        generates["host copy"] = generates["weights"]
    if engine.name == "native":
        drafts = config.mtp.enable_rollout
        generates["KV cache"] = kv_cache_bytes(found.model, engine.slots, found.context_tokens, dtype, drafts)
    rollout = _told(generates) + (f", over {shared} GPUs" if shared > 1 else "")
    if engine.name != "native":
        rollout += f", and what {engine.name} takes for its KV cache"
    return {"trainer": _told(held), "rollout": rollout}


def _told(parts: Mapping[str, float]) -> str:
    named = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in parts.items())
    return f"{_size(sum(parts.values()))}: {named}"


def _size(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{max(nbytes / MIB, 0.1):.1f} MiB"


def _figures(config: Config, found: Preflight) -> dict[str, str]:
    d, sync, a = found.derived, config.param_sync, config.async_training
    ahead = math.ceil((1 + d.staleness_threshold) * d.groups_per_version)
    group_bytes = config.rollout.n * found.context_tokens * TOKEN_BYTES
    sizes = {BUCKET_BYTES[sync.transport]} if sync.transport != "auto" else set(BUCKET_BYTES.values())
    buckets = [sync.bucket_bytes] if sync.bucket_bytes else sorted(sizes)
    return {
        "groups per step": f"{d.groups_per_step} of {config.rollout.n} samples",
        "groups per version": f"{d.groups_per_version}, a sync every {a.trigger_parameter_sync_step} steps",
        "groups in the run": f"{d.total_groups}, of {found.train_prompts} prompts",
        "staleness bound": f"{d.staleness_bound} versions (threshold {float(d.staleness_threshold):g})",
        "groups started ahead": f"at most {ahead} beyond those trained when their version was published",
        "queue memory": f"at most {_size(ahead * group_bytes)}, {_size(group_bytes)} for a group",
        "samples at once": f"{d.slots} in {config.rollout.engine.slots} slots per replica, and some that wait for one",
        "context": f"{found.context_tokens} tokens, of which a prompt may have {found.max_prompt_tokens}",
        "sync": f"{sync.transport} transport, pause {d.pause}, KV {sync.kv}, staging {sync.staging}",
        "buckets": f"2 a side of {' or '.join(_size(size) for size in buckets)}",
    }
