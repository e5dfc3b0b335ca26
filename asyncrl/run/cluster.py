"""Creates, starts, locates and kills the actors of a run on a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Batch
from asyncrl.param_sync.session_protocol import ReplicaSession, remote_session
from asyncrl.processes.actor_client import ActorClient, ActorDied, RestartableClient
from asyncrl.processes.identity import Process
from asyncrl.processes.relay import Relayed
from asyncrl.processes.tasks import cancelled
from asyncrl.rollouter.actors import (
    SYNC_GATHER_S,
    EndpointActor,
    EngineReplicaActor,
    RelayActor,
    ReplicaHandle,
    RollouterActor,
    Route,
    relay_silent_s,
)
from asyncrl.run.environments import interpreter
from asyncrl.run.placement import Placement, joins_a_cluster
from asyncrl.run.placement_plan import PlacementError, make_plan, pools
from asyncrl.run.preflight import FINGERPRINT, Preflight, memory_problem
from asyncrl.run.rollouters import RollouterClient, Rollouters, shard_names
from asyncrl.run.run_folder import RunFolder
from asyncrl.sample_queue.actor import SampleQueueActor
from asyncrl.sample_queue.messages import Holder
from asyncrl.trainer.actors import RankGroup, SampleQueueClient, TrainerRankActor

log = logging.getLogger(__name__)

T = TypeVar("T")

CALLS_AT_ONCE = 1000  # per actor; most calls wait on a condition
REMOTE_KILL_S = 20.0  # for an actor on another machine
CLOSING_S = 3.0  # for rollouters and endpoints to close by themselves, and for killed processes to end
RELAYED_REPLICAS = 4  # on a machine, from which on calls to them go through a relay there
RELAYS_PER_CALL = 16  # relays that the driver reaches through the first of them
RELAY_START_S = 60.0
_ACTORS_PER_DRIVER = 10**6  # more than a driver ever starts

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Cluster:
    """``open()`` places the pools; ``start_…()`` kills an actor's predecessor and starts the actor in its bundle;
    ``close()`` ends everything. ``replicas`` and ``sessions`` hold those that have started; calls to ``queue`` and
    ``rollouters`` wait for their start."""

    def __init__(self, config: Config, preflight: Preflight, folder: RunFolder) -> None:
        self._config, self._preflight = config, preflight
        self._journal, self._logs = folder.journal, folder.logs
        self._placement = Placement(config)
        self._actors: dict[str, ActorClient] = {}  # the newest of each name
        self._processes: dict[str, tuple[str, Process]] = {}  # actor → node id and process, once it answers
        self._epoch = folder.epoch.number
        self._made = self._epoch * _ACTORS_PER_DRIVER  # number of the newest actor
        self.rank_names: list[str] = []
        self.replica_names: list[str] = []
        self.senders: dict[str, Any] = {}
        self.replicas: dict[str, ActorClient] = {}
        self.sessions: dict[str, ReplicaSession] = {}
        self._relays: dict[str, tuple[ActorClient, Relayed]] = {}  # by node id, in order
        self._routes: dict[str, Route] = {}  # by replica, if it has one
        self._relayed: dict[str, Any] = {}  # clients by replica, through relays if it has a route
        self.queue: Any = RestartableClient(None, "queue", SampleQueueClient)
        shards = config.rollout.shards
        rollouters = [RollouterClient(None, name) for name in shard_names("rollouter", shards)]
        self.rollouters = Rollouters(rollouters, config.rollout)
        endpoints = shard_names("endpoint", shards) if config.rollout.agent.enabled else []
        self.endpoints: Sequence[Any] = [RestartableClient(None, name) for name in endpoints]  # of each shard

    async def open(self) -> None:
        """Join or start Ray and place the pools. Raises PlacementError and ConfigError."""
        await self._placement.open()
        self._config = self._placement.config
        for line in make_plan(self._config, self._preflight, self._placement.machines).lines():
            log.info("%s", line)
        trainer, rollout = pools(self._config)
        self.rank_names, self.replica_names = list(trainer.actors), list(rollout.actors)

    # -- start and kill actors -------------------------------------------------------------------------------------
    # Each start raises ActorDied if a process dies meanwhile, or the exception of an actor.

    async def start_queue(self) -> None:
        """A queue with the state of the journal."""
        await self.kill("queue")
        queue = self._make_queue()
        await self._started([queue], queue.start())
        self.queue.replace(queue.handle)

    async def start_replica(self, name: str) -> None:
        """A replica without a version."""
        await self.kill(name)
        replica = self._make_replica(name)
        await self._started([replica], replica.start())
        relayed = await self._through_relays(replica)
        self.replicas[name], self._relayed[name], self.sessions[name] = replica, relayed, remote_session(relayed.sync)

    def replica_handle(self, name: str) -> ReplicaHandle:
        """How rollouters call a replica that has started: not through a relay of which the driver knows that it hangs,
        which each would have to find out."""
        _, relayed = self._relays.get(self._node(name) or "", (None, None))
        route = self._routes.get(name) if relayed is not None and relayed.alive else None
        return ReplicaHandle(self.replicas[name].handle, route)

    async def add_replicas(self, names: Sequence[str]) -> None:
        """Reserve what replicas need, which can be started then. Raises PlacementError."""
        if not joins_a_cluster(self._config):
            found, replicas = self._preflight, len(self.replica_names) + len(names)
            if problem := memory_problem(self._config, found.model, found.context_tokens, replicas):
                raise PlacementError(problem)
        await self._placement.add_replicas(names)
        self.replica_names += names

    async def remove_replica(self, name: str) -> None:
        """Kill a replica and give back what it needs."""
        await self.kill(name)
        self.replica_names.remove(name)
        for table in (self._actors, self.replicas, self.sessions, self._relayed, self._routes):
            table.pop(name, None)
        self._placement.remove_replica(name)

    def draining(self) -> list[str]:
        """Replicas whose machine Ray will take away."""
        return [name for name in self.replica_names if self._node(name) in self._placement.draining]

    async def start_endpoint(self, shard: int) -> None:
        """An endpoint without sessions; the agents of an earlier one have ended with it."""
        client = self.endpoints[shard]
        await self.kill(client.name)
        endpoint = self._make(
            EndpointActor, client.name, {"num_cpus": 0}, self._config, client.name, self._preflight.tokenizer
        )
        await self._started([endpoint], endpoint.start())
        client.replace(endpoint.handle)

    async def start_rollouter(self, shard: int, routable: Callable[[], Sequence[str]]) -> None:
        """A rollouter that resumes its shard's groups in flight. ``routable()``: replicas that rollouters may use."""
        client = self.rollouters.shards[shard]
        await self.kill(client.name)
        rollouter = self._make_rollouter(shard, client.name)
        await self._started([rollouter], rollouter.start())
        own = lambda: [name for name in routable() if self.rollouters.of(name) is client]
        await rollouter.set_routable(own())  # before any call that waits for this rollouter
        client.replace(rollouter.handle)
        await rollouter.set_routable(own())  # which may have changed since, and was not sent to it

    async def start_ranks(self) -> None:
        """All ranks, with the run's initial weights."""
        await asyncio.gather(*map(self.kill, self.rank_names))  # each may wait for a machine that is gone
        self.senders.update({name: self._make_rank(i, name) for i, name in enumerate(self.rank_names)})
        self.ranks = RankGroup(list(self.senders.values()), self._config.supervision.train_s)
        await self._started(list(self.senders.values()), self.ranks.start())

    def silent(self, name: str) -> str:
        """Names of the actors started as ``name`` that have not answered yet; all of them if all have."""
        names = self.rank_names if name == "trainer" else [name]
        return ", ".join([n for n in names if n not in self._processes] or names)

    async def end(self, name: str, why: str) -> None:
        """Kill an unresponsive actor, so that the supervisor restarts it."""
        log.warning("supervision: %s %s; killing it", name, why)
        await self.kill(name)

    async def kill(self, name: str) -> None:
        """Kill an actor's process, even a stopped or stuck one."""
        if (actor := self._actors.get(name)) is None:
            return
        ray.kill(actor.handle)
        if (located := self._processes.pop(name, None)) is None:
            return
        node, process = located  # Ray needs seconds to kill a stopped process, or does not
        if node == ray.get_runtime_context().get_node_id():
            process.kill()
            return
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        try:
            await asyncio.wait_for(_kill.options(scheduling_strategy=there).remote(process), REMOTE_KILL_S)
        except (RayError, TimeoutError) as e:
            log.warning("supervision: %s could not be killed on its machine (%s), which may be gone", name, e)

    async def _started(self, actors: Sequence[ActorClient], starting: Awaitable[T]) -> T:
        """Result of ``starting``, which waits for these actors, or their first failure. Locates each as soon as it
        answers."""
        started = asyncio.ensure_future(starting)
        located = [asyncio.ensure_future(self._locate(actor)) for actor in actors]
        try:
            await asyncio.gather(started, *located)
            return started.result()
        finally:
            await cancelled([started, *located])

    async def _through_relays(self, replica: ActorClient) -> Any:
        """The replica's client, through relays if its machine has many: a sync session has eight calls to each."""
        self._routes.pop(replica.name, None)
        machines, node = self._placement.machines, self._node(replica.name)
        on_machine = [name for name in self.replica_names if machines[name] == machines[replica.name]]
        if len(on_machine) < RELAYED_REPLICAS or node is None:  # None: it was killed just now
            return replica
        if node not in self._relays:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            name, silent_s = f"relay/{len(self._relays)}", relay_silent_s(self._config)
            made = self._make(RelayActor, name, {"num_cpus": 0, "scheduling_strategy": there}, name, silent_s)
            self._relays[node] = made, Relayed(made, "driver", SYNC_GATHER_S, silent_s)
        number, relays = list(self._relays).index(node), list(self._relays.values())
        (relay, through), (first, through_first) = relays[number], relays[number - number % RELAYS_PER_CALL]
        client: Any = replica
        if not through.alive:
            return client
        with contextlib.suppress(ActorDied, RayError, TimeoutError):  # left out if it is dead, or its machine is
            if relay.name not in self._processes:
                await asyncio.wait_for(self._locate(relay), RELAY_START_S)
            target = await asyncio.wait_for(relay.register(replica.name, replica.handle), RELAY_START_S)
            route = self._routes[replica.name] = Route(relay.name, relay.handle, target)
            client = through.client(target, replica)
            if first is not relay and through_first.alive:
                registered = first.register(replica.name, replica.handle, route)
                client = through_first.client(await asyncio.wait_for(registered, RELAY_START_S), client)
        return client

    def _node(self, name: str) -> str | None:
        located = self._processes.get(name)
        return located[0] if located is not None else None

    async def _locate(self, actor: ActorClient) -> None:
        self._processes[actor.name] = await actor.where()

    def _make_rank(self, index: int, name: str) -> ActorClient:
        trainer, loopback = self._config.trainer, self._placement.on_one_machine
        options = self._placement.rank_options(index) | _runtime(trainer.threads, trainer.python, loopback)
        return self._make(TrainerRankActor, name, options, self._config, index, trainer.ranks, loopback)

    def _make_replica(self, name: str) -> ActorClient:
        engine = self._config.rollout.engine
        runtime = _runtime(engine.threads, engine.python, self._placement.on_one_machine)
        options = self._placement.replica_options(name) | runtime
        return self._make(EngineReplicaActor, name, options, self._config, name)

    def _make_queue(self) -> ActorClient:
        derived, options = self._preflight.derived, self._config.async_training
        threshold = derived.staleness_threshold
        return self._make(
            SampleQueueActor,
            "queue",
            {
                "num_cpus": 0,
                # its journal is on this node's disk
                "scheduling_strategy": NodeAffinitySchedulingStrategy(
                    ray.get_runtime_context().get_node_id(), soft=False
                ),
                "max_task_retries": -1,  # repeats calls that were lost in transit
            },
            self._journal,
            derived.groups_per_version,
            (threshold.numerator, threshold.denominator),
            derived.total_groups,  # a resumed run says how many when it goes back to its checkpoint
            options.queue_policy,
            options.overdue,
            self._preflight.model.vocab_size,
            self._config.rollout.max_attempts,
            self._config.rollout.shards,
            self._epoch,
            {FINGERPRINT: self._preflight.prompts_fingerprint},
        )

    def _make_rollouter(self, shard: int, name: str) -> ActorClient:
        of_shard = self.rollouters.shards[shard]
        return self._make(
            RollouterActor,
            name,
            {"num_cpus": 0},
            self._config,
            name,
            self._preflight.tokenizer,
            self._preflight.max_prompt_tokens,
            self.queue.handle,
            {name: self.replica_handle(name) for name in self.replicas if self.rollouters.of(name) is of_shard},
            Holder(shard, self._made),  # the newest rollouter has the highest token, also over drivers
            self.endpoints[shard].handle if self.endpoints else None,
        )

    def pool_resources(self) -> tuple[float, float, str]:
        """(trainer pool's size, rollout pool's size, their unit: CPU or GPU)"""
        trainer, rollout = pools(self._config)
        of = lambda pool, unit: pool.gpus if unit == "GPU" else pool.cpus
        unit = "GPU" if trainer.gpus and rollout.gpus else "CPU"
        return len(self.rank_names) * of(trainer, unit), len(self.replica_names) * of(rollout, unit), unit

    def drains(self) -> dict[str, Callable[[], Awaitable[Batch]]]:
        """Calls that fetch each actor's records: ranks answer while they start, replicas and the rollouter do not."""
        of_shards = (client.once for client in (*self.endpoints, *self.rollouters.shards))
        actors = (*self.senders.values(), *self.replicas.values(), *of_shards)
        answering = (a for a in actors if a.name in self._processes and a.handle is self._actors[a.name].handle)
        return {actor.name: self._relayed.get(actor.name, actor).drain for actor in answering}

    async def watch(self) -> None:
        """Raises NodeDied when the driver's Ray node dies."""
        await self._placement.watch()

    async def close(self) -> None:
        """End every actor, release the bundles, and end a cluster that was started here."""
        await self._placement.settled()
        clients = (*self.rollouters.shards, *self.endpoints)  # they must end their children themselves
        closing = [client.once.close() for client in clients if client.handle is not None]
        if self.queue.handle is not None:
            # step 0 has no groups: only a failed step's waiting lease ends, which Ray would else log as to be retried.
            # After a run that has finished the call fails, since its journal is closed.
            closing.append(self.queue.once.release(0))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), CLOSING_S)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if not ray.is_initialized():
            return
        queue, here = self.queue.handle, ray.get_runtime_context().get_node_id()
        processes = {name: process for name, (node, process) in self._processes.items() if node == here}
        try:
            for actor in self._actors.values():
                if actor.handle is not queue:
                    ray.kill(actor.handle)
            # first: Ray would log a call to the ended queue as to be retried
            callers = [process for name, process in processes.items() if name != "queue"]
            deadline = time.monotonic() + CLOSING_S
            while any(process.alive for process in callers) and time.monotonic() < deadline:
                time.sleep(0.01)
            if queue is not None:
                ray.kill(queue)
            self._actors.clear()
            self._placement.close()
        finally:
            for process in processes.values():  # Ray kills nothing on a node whose raylet died
                process.kill()

    def _make(self, cls: Any, name: str, options: dict[str, Any], *args: Any) -> ActorClient:
        self._made += 1
        unique = f"{self._actor_name(name)}/{self._made}"  # a dead actor may still hold its name
        options = {"runtime_env": {"env_vars": _huge_pages()}} | options
        handle = cls.options(name=unique, max_concurrency=CALLS_AT_ONCE, **options).remote(*args, logs=self._logs)
        self._actors[name] = ActorClient(handle, name)
        return self._actors[name]

    def _actor_name(self, role: str) -> str:
        """Readable in Ray's dashboard, and unique among the runs of a cluster."""
        return f"asyncrl/{self._config.name}/{os.getpid()}/{role}"


@ray.remote(num_cpus=0, max_retries=0)
def _kill(process: Process) -> None:
    """Runs on the machine of the process."""
    process.kill()


def _huge_pages() -> dict[str, str]:
    """Environment of processes whose memory is in huge pages, where the system leaves that to them: looking addresses
    up takes a virtual machine's CPU a tenth of a step. The user's own GLIBC_TUNABLES are kept."""
    return {} if "GLIBC_TUNABLES" in os.environ else {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def _runtime(threads: int, python: str, loopback: bool) -> dict[str, Any]:
    """Ray options for an actor that computes: its threads, with ``loopback`` the interface of its process groups, and
    if ``python`` names one, its interpreter."""
    # spinning OpenMP threads of two actors on shared cores slow each other down twentyfold
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"} | _huge_pages()
    if loopback:  # gloo would take the interface of the machine's name, NCCL any
        environment |= {name: "lo" for name in _INTERFACES if not os.environ.get(name)}
    runtime: dict[str, Any] = {"env_vars": environment}
    if python:
        runtime["py_executable"] = interpreter(python)
    return {"runtime_env": runtime}
