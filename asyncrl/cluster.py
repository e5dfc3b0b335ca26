"""The Ray side of a run: a cluster joined or started, places for both pools, and the actors in them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from asyncrl.config.checks import local_cpus
from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.environments import interpreter
from asyncrl.param_sync.transports.choose import Place, TransportError, choose
from asyncrl.plan import Machine, PlacementError, Pool, make_plan, pools, with_devices
from asyncrl.preflight import Preflight
from asyncrl.priority import never_interrupt
from asyncrl.ray_client import ActorClient, RestartableClient
from asyncrl.rollouter.actors import EngineReplicaActor, RollouterActor, SyncedReplica
from asyncrl.rollouter.engine import Capabilities
from asyncrl.run_folder import RunFolder
from asyncrl.sample_queue.actor import SampleQueueActor
from asyncrl.telemetry.recorder import Batch
from asyncrl.trainer.actors import QueueOfRay, RankGroup, TrainerRankActor

log = logging.getLogger(__name__)

CALLS_AT_ONCE = 1000  # of one actor: most of them wait on a condition
BESIDE_TRAINERS_S = 5.0  # to find room for the replicas on the trainers' machine
CLOSING_S = 3.0  # for an actor to close by itself
OBJECT_STORE_BYTES = 512 * 1024 * 1024  # of a cluster started here: batches pass through it, nothing stays


def joins_a_cluster(config: Config) -> bool:
    """Whether the run joins a cluster that exists, rather than starting one on this machine."""
    return bool(config.ray.address or os.environ.get("RAY_ADDRESS"))


class Cluster:
    """``start()`` makes everything that the first sync needs; ``close()`` leaves nothing behind."""

    def __init__(self, config: Config, preflight: Preflight, folder: RunFolder) -> None:
        self._config, self._preflight, self._journal = config, preflight, folder.journal
        self._logs = folder.logs
        self._groups: list[PlacementGroup] = []
        self._handles: list[Any] = []
        self._init: asyncio.Future[None] | None = None
        begun = folder.checkpoint.cut if folder.checkpoint is not None else None
        self._total_groups = preflight.derived.total_groups
        if begun is not None:  # steps may have been of another size before
            steps_left = max(0, config.trainer.total_steps - begun.step)
            self._total_groups = begun.trained + steps_left * preflight.derived.groups_per_step
        self._places: dict[str, tuple[str, int]] = {}  # actor → node and process
        self._made = 0  # actors so far
        self.rank_names: list[str] = []
        self.replica_names: list[str] = []
        self.senders: dict[str, Any] = {}
        self.replicas: dict[str, ActorClient] = {}
        self.receivers: dict[str, Any] = {}
        self.queue: Any = None
        self.rollouter: Any = None

    async def start(self) -> None:
        """Raises PlacementError, ConfigError (the engine cannot do what is asked of it), or what an actor raised."""
        config = self._config
        self._init = asyncio.ensure_future(asyncio.to_thread(self._init_ray))
        await asyncio.shield(self._init)  # Ray must not be left half started: `close` waits for it
        never_interrupt()
        config = with_devices(config, ray.cluster_resources().get("GPU", 0))
        trainer, rollout = pools(config)
        until_s = time.monotonic() + config.ray.placement_timeout_s
        trainers = self._reserve(trainer, trainer.strategy)
        seats = await self._placed(trainers, trainer, until_s)
        rollouts = await self._reserve_rollouts(rollout, trainers, config.param_sync.transport)
        seats |= await self._placed(rollouts, rollout, until_s)
        config = _with_transport(config, trainers, rollouts)
        for line in make_plan(config, self._preflight, seats).lines():
            log.info("%s", line)
        self.rank_names, self.replica_names = list(trainer.actors), list(rollout.actors)
        self._config, self._trainers, self._rollouts = config, trainers, rollouts
        self._make_ranks()
        for name in self.replica_names:
            self._make_replica(name)
        self.queue = QueueOfRay(self._make_queue(), "queue")
        await self.queue.start()
        self.rollouter = RestartableClient(self._make_rollouter(), "rollouter")
        started = await asyncio.gather(
            *(replica.start() for replica in self.replicas.values()), self.ranks.start(), self.rollouter.once.start()
        )
        for capabilities in started[: len(self.replicas)]:
            self._check(capabilities)
        await self.locate(*self._actors())

    # -- actors that died, or are to die -------------------------------------------------------------------------------

    async def restart_replica(self, name: str) -> None:
        """A new replica in the place of one that died; it has no version yet."""
        await self.kill(name)
        self._make_replica(name)
        await self.replicas[name].start()
        await self.locate(name)

    async def restart_rollouter(self) -> None:
        """A new rollouter, which goes on with the groups that the ledger has in flight."""
        await self.kill("rollouter")
        client = ActorClient(self._make_rollouter(), "rollouter")
        await client.start()
        self.rollouter.replace(client.handle)
        self._places["rollouter"] = await client.where()

    async def restart_ranks(self) -> None:
        """New ranks in the place of all, with the weights that the run began with."""
        for name in self.rank_names:
            await self.kill(name)
        self._make_ranks()
        await self.ranks.start()
        await self.locate(*self.rank_names)

    async def end(self, name: str, why: str) -> None:
        """An actor lives, but is of no use: end its process, so that it is found dead."""
        log.warning("supervision: %s %s; it is ended", name, why)
        await self.kill(name)

    async def kill(self, name: str) -> None:
        """End an actor's process, also one that is stopped or stuck."""
        if name != "queue":  # which Ray starts again, unless it has ended it itself
            ray.kill(self._actors()[name].handle)
        node, pid = self._places.pop(name, ("", 0))
        if node == ray.get_runtime_context().get_node_id():  # a stopped process does not obey Ray
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _actors(self) -> dict[str, ActorClient]:
        clients = [*self.senders.values(), *self.replicas.values(), self.queue, self.rollouter.once]
        return {client.name: client for client in clients}

    async def locate(self, *names: str) -> None:
        """Learn the processes of new actors, as soon as they answer: from then on they are drained."""
        actors = self._actors()
        self._places |= dict(zip(names, await asyncio.gather(*(actors[name].where() for name in names))))

    def _make_ranks(self) -> None:
        config, own = self._config, interpreter(self._config.trainer.python)
        ranks, threads = config.trainer.ranks, config.trainer.threads
        for i, name in enumerate(self.rank_names):
            self.senders[name] = self._place(
                TrainerRankActor, self._trainers, i, threads, name, config, i, ranks, python=own
            )
        self.ranks = RankGroup(list(self.senders.values()))

    def _make_replica(self, name: str) -> None:
        index, threads = self.replica_names.index(name), self._config.rollout.engine.threads
        own = interpreter(self._config.rollout.engine.python)
        self.replicas[name] = self._place(
            EngineReplicaActor, self._rollouts, index, threads, name, self._config, name, python=own
        )
        self.receivers[name] = SyncedReplica(self.replicas[name])

    def _make_queue(self) -> Any:
        derived, options = self._preflight.derived, self._config.async_training
        threshold = derived.staleness_threshold
        return self._start(
            SampleQueueActor,
            {
                "name": self._actor_name("queue"),
                "num_cpus": 0,
                # its state is on this node's disk
                "scheduling_strategy": NodeAffinitySchedulingStrategy(
                    ray.get_runtime_context().get_node_id(), soft=False
                ),
                # how often at most is the supervisor's to say
                "max_restarts": -1 if self._config.supervision.max_restarts else 0,
                "max_task_retries": -1 if self._config.supervision.max_restarts else 0,
            },
            self._journal,
            derived.groups_per_version,
            (threshold.numerator, threshold.denominator),
            self._total_groups,
            options.queue_policy,
            options.overdue,
            {"prompts": self._preflight.prompts_fingerprint},
            self._config.supervision.backoff_s,
        )

    def _make_rollouter(self) -> Any:
        return self._start(
            RollouterActor,
            {"name": self._actor_name("rollouter"), "num_cpus": 0},
            self._config,
            self._preflight.derived,
            self._preflight.max_prompt_tokens,
            self.queue.handle,
            {name: client.handle for name, client in self.replicas.items()},
        )

    def pool_resources(self) -> tuple[float, float, str]:
        """How much the trainer and the rollout pool have, and of what."""
        trainer, rollout = pools(self._config)
        of = lambda pool, unit: len(pool.actors) * (pool.gpus if unit == "GPU" else pool.cpus)
        unit = "GPU" if trainer.gpus and rollout.gpus else "CPU"
        return of(trainer, unit), of(rollout, unit), unit

    def drains(self) -> dict[str, Callable[[], Awaitable[Batch]]]:
        """How to fetch what each actor recorded; those that are being started do not answer yet."""
        actors = (*self.senders.values(), *self.replicas.values(), self.rollouter.once)
        return {a.name: a.drain for a in actors if a.name in self._places}

    async def close(self) -> None:
        """End every actor, give back the places, and end the cluster if it was started here."""
        if self._init is not None:
            await asyncio.wait([self._init])
        if self.rollouter is not None:  # reward workers, and what reward functions started, are the rollouter's to end
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.rollouter.once.close(), CLOSING_S)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if not ray.is_initialized():
            return
        for handle in reversed(self._handles):  # the rollouter before the queue that it calls
            ray.kill(handle)
        self._handles.clear()
        for group in self._groups:
            remove_placement_group(group)
        ray.shutdown()

    def _init_ray(self) -> None:
        common: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": True}
        if joins_a_cluster(self._config):
            ray.init(address=self._config.ray.address or os.environ["RAY_ADDRESS"], **common)
            return
        ray.init(
            address="local",
            num_cpus=local_cpus(),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=self._config.ray.temp_dir or None,
            _system_config={"worker_niceness": 0},  # at Ray's 15, the pools would get what other programs leave
            **common,
        )

    async def _reserve_rollouts(self, pool: Pool, trainers: PlacementGroup, transport: str) -> PlacementGroup:
        """With strategy ``auto`` on the machine of the trainers if it has room; else elsewhere, if the transport
        reaches so far."""
        if pool.strategy != "auto":
            return self._reserve(pool, pool.strategy)
        if transport in ("nccl", "gloo"):
            return self._reserve(pool, "pack")
        group = self._reserve(pool, "strict_pack", {_machine_of(trainers): 0.001})
        if transport == "auto" and not await asyncio.to_thread(group.wait, BESIDE_TRAINERS_S):
            remove_placement_group(group)
            self._groups.remove(group)
            return self._reserve(pool, "pack")
        return group

    def _reserve(self, pool: Pool, strategy: str, beside: dict[str, float] | None = None) -> PlacementGroup:
        bundle = {"CPU": pool.cpus, **({"GPU": float(pool.gpus)} if pool.gpus else {}), **(beside or {})}
        name = f"asyncrl-{self._config.name}-{pool.name}"
        group = placement_group([bundle] * len(pool.actors), strategy=strategy.upper(), name=name)
        self._groups.append(group)
        return group

    async def _placed(self, group: PlacementGroup, pool: Pool, until_s: float) -> dict[str, str]:
        """Actor → address of its machine. Raises PlacementError if the pool has no place by then."""
        if not await asyncio.to_thread(group.wait, max(0.1, until_s - time.monotonic())):
            limit_s, free = self._config.ray.placement_timeout_s, ray.available_resources()
            wants = {"CPU": pool.cpus * len(pool.actors), "GPU": pool.gpus * len(pool.actors)}
            told = ", ".join(f"{v:g} {kind} (free: {free.get(kind, 0):g})" for kind, v in wants.items() if v)
            raise PlacementError(
                f"the {pool.name} pool was not placed within {limit_s:g} s: it wants {told}, {pool.strategy}; the "
                f"cluster has {', '.join(map(str, _nodes().values()))}"
            )
        address = {node: machine.address for node, machine in _nodes().items()}
        nodes = placement_group_table(group)["bundles_to_node_id"]
        return {actor: address[nodes[i]] for i, actor in enumerate(pool.actors)}

    def _check(self, engine: Capabilities) -> None:
        pair = (self._preflight.derived.pause, self._config.param_sync.kv)
        if pair not in engine.pause_kv:
            legal = ", ".join(f"{pause}+{kv}" for pause, kv in sorted(engine.pause_kv))
            raise ConfigError(
                [f"param_sync.kv: the {engine.name} engine cannot pause with {'+'.join(pair)}; it can {legal}"]
            )
        if self._config.param_sync.staging not in engine.staging:
            raise ConfigError(
                [f"param_sync.staging: the {engine.name} engine offers {', '.join(sorted(engine.staging))}"]
            )

    def _place(
        self, cls: Any, group: PlacementGroup, index: int, threads: int, name: str, *args: Any, python: str = ""
    ) -> ActorClient:
        bundle = group.bundle_specs[index]
        # spinning OpenMP threads of two actors on shared cores slow each other down twentyfold
        runtime: dict[str, Any] = {
            "env_vars": {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
            **({"py_executable": python} if python else {}),
        }
        options = {
            "name": self._actor_name(name),
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            "runtime_env": runtime,
        }
        return ActorClient(self._start(cls, options, *args), name)

    def _start(self, actor: Any, options: dict[str, Any], *args: Any) -> Any:
        self._made += 1
        options["name"] += f"/{self._made}"  # a name may be taken still by one that died
        handle = actor.options(max_concurrency=CALLS_AT_ONCE, **options).remote(*args, logs=self._logs)
        self._handles.append(handle)
        return handle

    def _actor_name(self, role: str) -> str:
        """Readable in Ray's dashboard, and unique where several runs share a cluster."""
        return f"asyncrl/{self._config.name}/{os.getpid()}/{role}"


def _with_transport(config: Config, trainers: PlacementGroup, rollouts: PlacementGroup) -> Config:
    """Raises ConfigError if the transport does not join the places that the pools have got."""
    try:
        transport, why = choose(
            config.param_sync.transport,
            _places(trainers, config.trainer.device, "trainer"),
            _places(rollouts, config.rollout.engine.device, "rollout"),
        )
    except TransportError as e:
        raise ConfigError([str(e)]) from None
    log.info("param_sync: weights travel by %s (%s)", transport, why)
    return replace(config, param_sync=replace(config.param_sync, transport=transport))


def _places(group: PlacementGroup, device: str, pool: str) -> list[Place]:
    """Where each bundle is. Ray gives every bundle a GPU of its own."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [Place(node, f"{pool}/{bundle}" if device == "cuda" else None) for bundle, node in nodes.items()]


def _nodes() -> dict[str, Machine]:
    """Ray's id of a machine → the machine."""
    found = {}
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"].get
            found[node["NodeID"]] = Machine(node["NodeManagerAddress"], has("CPU", 0), has("GPU", 0))
    return found


def machines_of(config: Config) -> list[Machine]:
    """Those of the cluster that a run would join. Raises what Ray raises if there is none."""
    ray.init(address=config.ray.address or os.environ["RAY_ADDRESS"], logging_level="ERROR")  # type: ignore[arg-type]
    try:
        return list(_nodes().values())
    finally:
        ray.shutdown()


def _machine_of(group: PlacementGroup) -> str:
    """Ray's resource of the machine on which a placed group is."""
    (node, *_) = placement_group_table(group)["bundles_to_node_id"].values()
    (address,) = [n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node]
    return f"node:{address}"
