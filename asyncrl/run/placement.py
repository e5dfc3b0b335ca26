"""Ray side of placement: joins or starts a cluster, reserves a bundle per actor, and resolves devices and transport."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray._private.services import resolve_ip_for_localhost
from ray._private.state import state as ray_state
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.cpu.priority import never_interrupt
from asyncrl.param_sync.transports.choose import TransportError, across_machines, choose
from asyncrl.param_sync.transports.placement import DevicePlacement
from asyncrl.processes.actor_client import start_ray
from asyncrl.processes.tasks import in_daemon_thread
from asyncrl.run.machine import local_cpus
from asyncrl.run.placement_plan import Machine, PlacementError, Pool, pools, with_devices

log = logging.getLogger(__name__)

WATCH_S = 2.0  # between looks at the driver's node
REACH_S = 10.0  # for a cluster to accept a connection
BESIDE_TRAINERS_S = 5.0  # to find room for the replicas on the trainers' machine
OBJECT_STORE_BYTES = 512 * 1024 * 1024  # of a cluster started here: batches pass through it, nothing stays


def joins_a_cluster(config: Config) -> bool:
    """True if the run joins an existing cluster instead of starting one on this machine."""
    return bool(config.ray.address or os.environ.get("RAY_ADDRESS"))


def cluster_machines(config: Config) -> list[Machine]:
    """Machines of the cluster that the run would join. Raises ConfigError if there is none."""
    _join(config, logging_level="ERROR")
    try:
        return list(_nodes().values())
    finally:
        ray.shutdown()


def _join(config: Config, **options: Any) -> None:
    address = config.ray.address or os.environ["RAY_ADDRESS"]
    try:
        _reach(address)
        ray.init(address=address, **options)
    except (OSError, ValueError) as e:
        why = " ".join(str(e).split())
        raise ConfigError([f"ray.address: expected a Ray cluster at {address}, found none ({why})"]) from None


def _reach(address: str) -> None:
    """Raises OSError if nothing answers at a ``host:port``: Ray itself would go on trying for many minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        host = resolve_ip_for_localhost(host.strip("[]"))  # where Ray looks for it
        socket.create_connection((host, int(port)), REACH_S).close()


class NodeDied(RuntimeError):
    """The driver's Ray node is gone, so nothing can be started, killed or called through it."""


class Placement:
    """Connection to Ray and a placement group per pool. After `open`, ``config`` has devices and transport resolved and
    ``machines`` maps each actor to the address of its machine."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.machines: dict[str, str] = {}
        self.draining: set[str] = set()  # ids of nodes that Ray will take away
        self._groups: list[PlacementGroup] = []
        self._numbers = itertools.count()  # of groups, whose names Ray keeps apart
        self._bundles: dict[str, tuple[PlacementGroup, int]] = {}  # of each replica
        #: bundles of replicas that left, in groups that others use, and the address of each
        self._vacant: list[tuple[PlacementGroup, int, str]] = []
        self._trainers: PlacementGroup
        self._rollouts: PlacementGroup
        self._init: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Join or start Ray and place both pools. Raises PlacementError and ConfigError."""
        config = self.config
        self._init = asyncio.ensure_future(asyncio.to_thread(self._init_ray))
        await asyncio.shield(self._init)  # Ray must not be left half started: `settled` waits for it
        never_interrupt()
        config = with_devices(config, ray.cluster_resources().get("GPU", 0))
        await self._reserve_pools(config)
        self.config = _with_transport(config, self._trainers, self._rollouts)

    async def _reserve_pools(self, config: Config) -> None:
        """A group of bundles for each pool; one for both if their GPUs are shared."""
        self._pools = trainer, rollout = pools(config)
        until_s = time.monotonic() + config.ray.placement_timeout_s
        if config.ray.share_gpus:
            both = replace(trainer, cpus=trainer.cpus + rollout.cpus, gpus=trainer.gpus + rollout.gpus)
            self._trainers = self._rollouts = self._reserve(both, trainer.strategy)
            self.machines = await self._placed(self._trainers, both, until_s)
            pairs = zip(trainer.actors, rollout.actors, strict=True)
            self.machines |= {replica: self.machines[rank] for rank, replica in pairs}
            self._bundles = {replica: (self._rollouts, i) for i, replica in enumerate(rollout.actors)}
            return
        self._trainers = self._reserve(trainer, trainer.strategy)
        self.machines = await self._placed(self._trainers, trainer, until_s)
        self._rollouts = await self._reserve_rollouts(rollout, self._trainers, config.param_sync.transport)
        self.machines |= await self._placed(self._rollouts, rollout, until_s)
        self._bundles = {replica: (self._rollouts, i) for i, replica in enumerate(rollout.actors)}

    async def add_replicas(self, names: Sequence[str]) -> None:
        """Reserve a bundle for each. They come beside the others where the transport of weights or the pool's strategy
        demands it, else on any machine. Raises PlacementError if they do not all fit within ``placement_timeout_s``."""
        config, vacant = self.config, self._vacant[: len(names)]
        del self._vacant[: len(vacant)]
        for name, (group, index, address) in zip(names, vacant):  # at once: replicas may leave meanwhile
            self._bundles[name], self.machines[name] = (group, index), address
        if new := names[len(vacant) :]:
            pool = replace(self._pools[1], actors=tuple(new))
            near = self.on_one_machine or not across_machines(config.param_sync.transport)
            beside = {_machine_of(self._rollouts): 0.001} if near or pool.strategy == "strict_pack" else None
            group = self._reserve(pool, "pack" if pool.strategy == "auto" else pool.strategy, beside)
            try:
                machines = await self._placed(group, pool, time.monotonic() + config.ray.placement_timeout_s)
            except BaseException:
                self._release(group)
                for name in names[: len(vacant)]:
                    self.remove_replica(name)
                raise
            self.machines |= machines
            self._bundles |= {name: (group, i) for i, name in enumerate(new)}

    def remove_replica(self, name: str) -> None:
        """Its resources are free once no other replica is left of those that were added with it; until then the next
        ones that are added get them."""
        group, index = self._bundles.pop(name)
        self._vacant.append((group, index, self.machines.pop(name)))
        if group is not self._rollouts and all(used is not group for used, _ in self._bundles.values()):
            self._vacant = [vacant for vacant in self._vacant if vacant[0] is not group]
            self._release(group)

    def rank_options(self, index: int) -> dict[str, Any]:
        """Ray options that put a trainer rank into its bundle."""
        return _bundle_options(self._trainers, index, self._pools[0])

    def replica_options(self, name: str) -> dict[str, Any]:
        """Ray options that put a replica into its bundle."""
        return _bundle_options(*self._bundles[name], self._pools[1])

    @property
    def on_one_machine(self) -> bool:
        """True if all ranks and replicas are on one machine, so that their sockets can listen on loopback."""
        return len(set(self.machines.values())) == 1

    async def watch(self) -> None:
        """Keeps ``draining`` up to date. Raises NodeDied when Ray declares the driver's node dead, some 20 s after the
        death of its raylet. Ray itself ends a process that has not reached the GCS for 60 s."""
        node = ray.get_runtime_context().get_node_id()
        while node in await in_daemon_thread(_nodes):  # blocks while the GCS does not answer
            self.draining = set(await in_daemon_thread(ray_state.get_draining_nodes))
            await asyncio.sleep(WATCH_S)
        raise NodeDied("the raylet of the driver's machine died: Ray can start nothing here any more")

    async def settled(self) -> None:
        """Wait until Ray is up, or has failed to start, if `open` was called."""
        if self._init is not None:
            await asyncio.wait([self._init])

    def close(self) -> None:
        """Release the bundles and disconnect, which ends a cluster that was started here."""
        for group in self._groups:
            remove_placement_group(group)
        ray.shutdown()

    def _init_ray(self) -> None:
        common: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": True}
        if joins_a_cluster(self.config):
            _join(self.config, **common)
            return
        start_ray(
            num_cpus=local_cpus(),
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=self.config.ray.temp_dir or None,
            _system_config={"worker_niceness": 0},  # Ray's default, 15, would yield the cores to other programs
            **common,
        )

    async def _reserve_rollouts(self, pool: Pool, trainers: PlacementGroup, transport: str) -> PlacementGroup:
        """With strategy ``auto``: packed anywhere if the named transport works across machines, else on the trainers'
        machine. With transport ``auto``: on the trainers' machine if it has room, else packed anywhere."""
        if pool.strategy != "auto":
            return self._reserve(pool, pool.strategy)
        if across_machines(transport):
            return self._reserve(pool, "pack")
        group = self._reserve(pool, "strict_pack", {_machine_of(trainers): 0.001})
        if transport == "auto" and not await asyncio.to_thread(group.wait, BESIDE_TRAINERS_S):
            self._release(group)
            return self._reserve(pool, "pack")
        return group

    def _reserve(self, pool: Pool, strategy: str, beside: dict[str, float] | None = None) -> PlacementGroup:
        bundle = {"CPU": pool.cpus, **({"GPU": float(pool.gpus)} if pool.gpus else {}), **(beside or {})}
        name = f"asyncrl-{self.config.name}-{pool.name}-{next(self._numbers)}"
        group = placement_group([bundle] * len(pool.actors), strategy=strategy.upper(), name=name)
        self._groups.append(group)
        return group

    def _release(self, group: PlacementGroup) -> None:
        remove_placement_group(group)
        self._groups.remove(group)

    async def _placed(self, group: PlacementGroup, pool: Pool, until_s: float) -> dict[str, str]:
        """Actor → address of its machine. Raises PlacementError if the pool is not placed by then."""
        if not await asyncio.to_thread(group.wait, max(0.1, until_s - time.monotonic())):
            limit_s, free = self.config.ray.placement_timeout_s, ray.available_resources()
            wants = {"CPU": pool.cpus * len(pool.actors), "GPU": pool.gpus * len(pool.actors)}
            wanted = ", ".join(f"{v:g} {kind} (free: {free.get(kind, 0):g})" for kind, v in wants.items() if v)
            raise PlacementError(
                f"the {pool.name} pool was not placed within {limit_s:g} s: it needs {wanted}, {pool.strategy}; the "
                f"cluster has {', '.join(map(str, _nodes().values()))}"
            )
        address = {node: machine.address for node, machine in _nodes().items()}
        nodes = placement_group_table(group)["bundles_to_node_id"]
        return {actor: address[nodes[i]] for i, actor in enumerate(pool.actors)}


def _bundle_options(group: PlacementGroup, index: int, pool: Pool) -> dict[str, Any]:
    return {
        "num_cpus": pool.cpus,
        "num_gpus": pool.gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }


def _with_transport(config: Config, trainers: PlacementGroup, rollouts: PlacementGroup) -> Config:
    """Raises ConfigError if the transport does not connect the pools where they are placed."""
    names = ("shared", "shared") if config.ray.share_gpus else ("trainer", "rollout")
    try:
        transport, why = choose(
            config.param_sync.transport,
            _device_placements(trainers, config.trainer.device, names[0]),
            _device_placements(rollouts, config.rollout.engine.device, names[1]),
        )
    except TransportError as e:
        raise ConfigError([str(e)]) from None
    log.info("param_sync: weights are sent over %s (%s)", transport, why)
    return replace(config, param_sync=replace(config.param_sync, transport=transport))


def _device_placements(group: PlacementGroup, device: str, pool: str) -> list[DevicePlacement]:
    """Node and device of each bundle. Ray gives every bundle of a group its own GPU."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [DevicePlacement(node, f"{pool}/{bundle}" if device == "cuda" else None) for bundle, node in nodes.items()]


def _nodes() -> dict[str, Machine]:
    """Ray's node id → machine, of all live nodes."""
    found = {}
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"].get
            found[node["NodeID"]] = Machine(node["NodeManagerAddress"], has("CPU", 0), has("GPU", 0))
    return found


def _machine_of(group: PlacementGroup) -> str:
    """Ray's resource of the machine that a packed group is on."""
    (node, *_) = placement_group_table(group)["bundles_to_node_id"].values()
    (address,) = [n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node]
    return f"node:{address}"
