"""Ray actors of the rollout pool: engine replicas, their relays, the agents' endpoint and the rollouter, thin shells
around Ray-free cores."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from asyncrl.config.schema import Config
from asyncrl.cpu.priority import never_interrupt
from asyncrl.observability.telemetry.log import LogConfig
from asyncrl.observability.telemetry.recorder import Batch, Recorder
from asyncrl.param_sync.session_protocol import answer, repeatable
from asyncrl.processes.actor_client import (
    ActorClient,
    ActorDied,
    DataLost,
    Preempted,
    RestartableClient,
    SupervisedActor,
    first_leaf,
)
from asyncrl.processes.device_errors import is_device_error
from asyncrl.processes.garbage import collect_rarely
from asyncrl.processes.relay import SILENT_S, Answer, Call, Relay, Relayed
from asyncrl.processes.sigterm import sigterm
from asyncrl.rollouter.engine_lease import LeasedEngine
from asyncrl.rollouter.engines.base import EngineDied, EventBatch, Request, Scheduling
from asyncrl.rollouter.held_queue import HeldQueue
from asyncrl.rollouter.pacing import GenerationPacer
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.rollouter.validated import Validated
from asyncrl.sample_queue.messages import Holder

log = logging.getLogger(__name__)

SYNC_GATHER_S = 0.2  # for answers to calls of a sync session; a phase takes longer where there are many
GATHER_S = 0.05  # for those to calls of a rollouter; a freed slot has its next request already
_UNWINDING_S = 60.0  # for samples to end after their cancellation
_LOOPS = 10**6  # tokens for the loops of one rollouter, more than it ever runs


def relay_silent_s(config: Config) -> float:
    """Seconds after which a relay counts as dead: replicas behind two must not count as dead before."""
    return min(SILENT_S, config.supervision.answer_s / 4, config.supervision.progress_s / 4)


class Route(NamedTuple):
    """A replica by the relay of its machine: name and handle of the relay, and the replica's number there."""

    relay: str
    handle: Any
    target: int


class ReplicaHandle(NamedTuple):
    """A replica's handle, and its route if it has one."""

    handle: Any
    route: Route | None


@ray.remote
class EngineReplicaActor(SupervisedActor):
    """One engine in its own process: generates for the rollouter that holds its lease, and receives weights."""

    def __init__(self, config: Config, name: str, logs: LogConfig | None = None) -> None:
        super().__init__(name, logs)
        never_interrupt()
        import torch

        torch.set_num_threads(config.rollout.engine.threads)
        self._config = config
        self._recorder = Recorder(name)
        self._lease: Any = None
        self._session: Any = None
        self._sigterm = sigterm()

    async def start(self) -> None:
        from asyncrl.param_sync.replica_session import EngineSession
        from asyncrl.rollouter.engine_lease import EngineLease
        from asyncrl.rollouter.engines.base import ENGINES, Engine

        name = self._config.rollout.engine.name
        engine = await ENGINES.find(name).start(self._config, self._recorder)
        ENGINES.checked(engine, Engine, name)
        self._lease = EngineLease(engine)
        receiver = engine.weight_receiver(self.name, self._config.param_sync.transport)
        self._session = repeatable(EngineSession(self.name, engine, receiver))
        log.info("generates with the %s engine", name)

    async def alive(self) -> None:
        """Raises `Preempted` after SIGTERM."""
        await self._sigterm.wait()
        raise Preempted(self.name)

    async def sync(self, call: str, *args: Any) -> Any:
        """A call of the replica's sync session, see `asyncrl.param_sync.session_protocol.ReplicaSession`."""
        with self._exiting_if_engine_dies():
            return await answer(self._session, call, *args)

    # -- generation, for the holder of the lease: asyncrl.rollouter.engine_lease.FencedEngine ----------------------

    async def attach(self, token: int, first: int) -> None:
        with self._exiting_if_engine_dies():
            await self._lease.attach(token, first)

    async def submit(self, token: int, number: int, requests: Sequence[Request]) -> None:
        with self._exiting_if_engine_dies():
            await self._lease.submit(token, number, requests)

    async def events(self, token: int, number: int) -> EventBatch:
        with self._exiting_if_engine_dies():
            return await self._lease.events(token, number)

    async def abort(self, token: int, number: int, ids: Sequence[str]) -> None:
        with self._exiting_if_engine_dies():
            await self._lease.abort(token, number, ids)

    async def set_scheduling(self, token: int, number: int, scheduling: Scheduling) -> None:
        with self._exiting_if_engine_dies():
            await self._lease.set_scheduling(token, number, scheduling)

    async def drain(self) -> Batch:
        return self._recorder.drain()

    @contextlib.contextmanager
    def _exiting_if_engine_dies(self) -> Iterator[None]:
        """Exit when the engine has lost one of its processes or its device, so that the supervisor restarts the whole
        replica."""
        try:
            yield
        except EngineDied as death:
            log.error("%s", death)
            os._exit(1)
        except Exception as e:
            if is_device_error(e):
                log.exception("lost its device")
                os._exit(1)
            raise


@ray.remote
class RelayActor(SupervisedActor):
    """Makes the calls of driver and rollouters to the replicas of its machine, and through other relays to those of
    others."""

    def __init__(self, name: str, silent_s: float, logs: LogConfig | None = None) -> None:
        super().__init__(name, logs)
        self._relay, self._silent_s = Relay(), silent_s
        self._others: dict[str, Relayed] = {}  # by the relay's name

    async def register(self, name: str, replica: Any, via: Route | None = None) -> int:
        """Number of a replica, whose handle is ``replica``, in calls. ``via``: of its own machine's relay."""
        direct = ActorClient(replica, name)
        if via is None:
            return self._relay.register(direct)
        if via.relay not in self._others:
            other = ActorClient(via.handle, via.relay)
            self._others[via.relay] = Relayed(other, self.name, SYNC_GATHER_S, self._silent_s)
        return self._relay.register(self._others[via.relay].client(via.target, direct))

    async def exchange(self, caller: str, calls: Sequence[Call], gather_s: float, within_s: float) -> Sequence[Answer]:
        return await self._relay.exchange(caller, calls, gather_s, within_s)


@ray.remote
class EndpointActor(SupervisedActor):
    """The HTTP endpoint with its agents. The rollouter calls it as `asyncrl.rollouter.endpoint.link.EndpointClient`."""

    def __init__(self, config: Config, name: str, tokenizer: PromptTokenizer, logs: LogConfig | None = None) -> None:
        super().__init__(name, logs)
        never_interrupt()
        self._config, self._tokenizer = config, tokenizer
        self._recorder = Recorder(self.name)

    async def start(self) -> None:
        from asyncrl.rollouter.endpoint.host import EndpointHost

        self._host = EndpointHost(self._config, self._tokenizer, self._recorder)
        await self._host.start()

    async def alive(self) -> None:
        """Never returns. Raises the error of a sandbox host that dies again and again."""
        keeping = self._host.keeping_sandboxes
        await (super().alive() if keeping is None else asyncio.shield(keeping))

    async def attach(self, token: int) -> None:
        await self._host.attach(token)

    async def send(self, token: int, commands: Sequence[Any]) -> None:
        await self._host.send(token, commands)

    async def events(self, token: int) -> Sequence[Any]:
        return await self._host.events(token)

    async def drain(self) -> Batch:
        return self._recorder.drain()

    async def close(self) -> None:
        await self._host.close()


@ray.remote
class RollouterActor(SupervisedActor):
    """The rollout loop with its router and reward workers: ``start()``, then ``run()``.

    ``queue``, ``endpoint`` (None: not started yet, or not used) and ``replicas`` are the current actors;
    `replace_queue`, `replace_endpoint` and `replace_replica` name their successors. ``holder``: its token grows with
    each rollouter of a run; engines, endpoint and queue serve the newest of a shard."""

    def __init__(
        self,
        config: Config,
        name: str,
        tokenizer: PromptTokenizer,
        max_prompt_tokens: int,
        queue: Any,
        replicas: Mapping[str, ReplicaHandle],
        holder: Holder,
        endpoint: Any = None,
        logs: LogConfig | None = None,
    ):
        super().__init__(name, logs)
        never_interrupt()
        self._config, self._tokenizer, self._max_prompt_tokens = config, tokenizer, max_prompt_tokens
        self._recorder = Recorder(self.name)
        self._queue = RestartableClient(queue, "queue")
        self._holder = holder
        self._endpoint, self._endpoint_name = endpoint, name.replace("rollouter", "endpoint")
        self._link: Any = None
        self._relays: dict[str, Relayed] = {}
        self._replicas = {name: self._leased(name, replica) for name, replica in replicas.items()}
        self._loop: Any = None
        self._loops = itertools.count()
        self._rolling_out: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the prompts, start the reward workers, and serve requests from now on."""
        from asyncrl.data.load import load_run_prompts
        from asyncrl.data.order import PromptOrder
        from asyncrl.rollouter.answering import Answering
        from asyncrl.rollouter.endpoint.link import EndpointLink
        from asyncrl.rollouter.loop import RolloutLoop
        from asyncrl.rollouter.validation import Validation

        config = self._config
        if config.rollout.agent.enabled:
            endpoint = ActorClient(self._endpoint, self._endpoint_name) if self._endpoint is not None else None
            self._link = EndpointLink(endpoint, self._holder.token, ActorDied, DataLost)  # type: ignore[arg-type]
        prompts, held_out = await asyncio.to_thread(load_run_prompts, config.data)  # a source may take minutes
        asked = held_out[: config.validation.max_prompts or None]
        self._validation_prompts = asked[self._holder.shard :: config.rollout.shards]
        is_death = lambda error: isinstance(error, ActorDied)
        self._answering = answering = Answering(
            config, self._tokenizer, self._max_prompt_tokens, self._replicas, is_death, self._link, self._recorder
        )
        await answering.start()
        self._router = answering.router
        self._validation = Validation(config, self._slots, answering.maker, self._recorder)

        def new_loop(queue: HeldQueue) -> RolloutLoop:
            data = config.data
            order = PromptOrder(prompts, config.seed, data.shuffle, data.epochs, data.mixture, data.curriculum)
            return RolloutLoop(config, self._slots, order, answering.maker, queue, self._recorder, self._new_pacer())

        self._new_loop = new_loop
        self._serving = asyncio.create_task(_unwrapped(answering.run()))
        log.info("has %d prompts", len(prompts))
        collect_rarely()

    async def run(self) -> None:
        """Roll out and serve validation until cancelled, through every `reset`. Raises the errors of the loop and of
        the router."""
        assert self._serving is not None, "start() comes first"
        while True:
            self._rolling_out = asyncio.create_task(_unwrapped(self._roll_out()))
            await asyncio.wait({self._serving, self._rolling_out}, return_when=asyncio.FIRST_COMPLETED)
            if self._serving.done():
                self._serving.result()
            if not self._rolling_out.cancelled():  # else `reset` did it
                self._rolling_out.result()

    async def alive(self) -> None:
        """Never returns. Raises the errors of the router."""
        await (super().alive() if self._serving is None else asyncio.shield(self._serving))

    async def reset(self) -> None:
        """Restart the loop after a rollback of the trainer: snapshots in-flight groups and re-admits them. Ends this
        process if a sample does not end, so that its successor goes on."""
        if self._loop is not None and self._rolling_out is not None:
            loop, self._loop = self._loop, None  # park it only once; `_roll_out` sets the next one after recovery
            await loop.park()
            rolling_out = self._rolling_out  # `run` replaces it as soon as it has ended
            rolling_out.cancel()
            await asyncio.wait({rolling_out}, timeout=_UNWINDING_S)
            if not rolling_out.done():
                log.error("an agent loop still runs %g s after it was cancelled; this process ends", _UNWINDING_S)
                os._exit(1)

    async def validate(self) -> Validated:
        """This shard's part of the validation prompts."""
        return await self._validation.part(self._validation_prompts)

    async def set_validation_first(self, first: bool) -> None:
        """See `asyncrl.rollouter.router.Router.set_validation_first`."""
        self._router.set_validation_first(first)

    async def set_routable(self, names: Sequence[str]) -> None:
        await self._router.set_routable(names)

    async def replace_queue(self, handle: Any) -> None:
        """Use a restarted queue; unanswered calls are repeated on it."""
        self._queue.replace(handle)

    async def replace_endpoint(self, handle: Any) -> None:
        """Use a new or restarted endpoint; samples of the old one begin again."""
        self._link.replace(ActorClient(handle, self._endpoint_name))

    async def replace_replica(self, name: str, replica: ReplicaHandle) -> None:
        """Use a new or restarted replica; it gets work once `set_routable` names it."""
        self._router.replace(name, self._leased(name, replica))
        self._resize()

    async def retire_replica(self, name: str) -> None:
        """See `asyncrl.rollouter.router.Router.retire`."""
        await self._router.retire(name)
        self._resize()

    async def unfit(self, silent_s: float | None) -> dict[str, str]:
        """See `asyncrl.rollouter.router.Router.unfit`."""
        return self._router.unfit(silent_s)

    async def drain(self) -> Batch:
        return self._recorder.drain()

    async def close(self) -> None:
        await self._answering.close()

    async def _roll_out(self) -> None:
        """Run one rollout loop, from the queue's current state until `reset`: a rollback may reopen a closed queue."""
        # another token for each loop: calls that a cancelled one has left at the queue must start nothing there
        token = self._holder.token * _LOOPS + next(self._loops)
        queue = HeldQueue(self._queue, self._holder._replace(token=token))
        recovery = await queue.recover(history=bool(self._config.data.curriculum.by))
        self._loop = self._new_loop(queue)
        await self._loop.run(recovery)
        await asyncio.Event().wait()

    def _new_pacer(self) -> GenerationPacer | None:
        slots = self._config.rollout.engine.slots

        def set_limit(limit: int | None) -> None:
            self._router.set_max_running_requests(limit)
            self._recorder.gauge("rollout/width", limit or slots)

        return GenerationPacer(slots, set_limit) if self._config.rollout.pacing else None

    @property
    def _slots(self) -> int:
        return len(self._router.outstanding_tokens) * self._config.rollout.engine.slots

    def _resize(self) -> None:
        self._validation.limiter.resize(self._slots)
        if self._loop is not None:
            self._loop.limiter.resize(self._slots)

    def _leased(self, name: str, replica: ReplicaHandle) -> LeasedEngine:
        direct: Any = ActorClient(replica.handle, name)
        if (route := replica.route) is None:
            return LeasedEngine(direct, self._holder.token)
        if route.relay not in self._relays:
            relay, caller = ActorClient(route.handle, route.relay), f"rollouter {self._holder.token}"
            self._relays[route.relay] = Relayed(relay, caller, GATHER_S, relay_silent_s(self._config))
        return LeasedEngine(direct, self._holder.token, self._relays[route.relay].client(route.target, direct))


async def _unwrapped(work: Awaitable[None]) -> None:
    """Await ``work``; raises the first error of an exception group, because Ray cannot pass the group on unchanged."""
    try:
        await work
    except ExceptionGroup as e:
        raise first_leaf(e) from None
