"""Engine replicas and the rollouter as Ray actors around their Ray-free cores."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import ray

from asyncrl.config.checks import Derived
from asyncrl.config.schema import Config
from asyncrl.priority import never_interrupt
from asyncrl.ray_client import ActorClient, ActorDied, Watched, first_leaf
from asyncrl.rollouter.engine import Capabilities, EngineDied, EventBatch, Request
from asyncrl.rollouter.fence import Owned
from asyncrl.rollouter.pacing import Pace, keep_pace
from asyncrl.sample_queue.messages import Recovery
from asyncrl.telemetry.log import LogTo
from asyncrl.telemetry.recorder import Batch, Recorder

log = logging.getLogger(__name__)


@ray.remote
class EngineReplicaActor(Watched):
    """One engine in a process of its own: generation for the one rollouter that owns it, and a sync session's replica
    side."""

    def __init__(self, config: Config, name: str, logs: LogTo | None = None) -> None:
        super().__init__(name, logs)
        never_interrupt()
        import torch

        torch.set_num_threads(config.rollout.engine.threads)
        self._config = config
        self._recorder = Recorder(name)
        self._fence: Any = None
        self._endpoint: Any = None

    async def start(self) -> Capabilities:
        from asyncrl.param_sync.endpoint import ReplicaEndpoint
        from asyncrl.rollouter.engines.make import make_engine
        from asyncrl.rollouter.fence import Fence

        engine = await make_engine(self._config, self._recorder)
        self._fence = Fence(engine)
        self._endpoint = ReplicaEndpoint(self.name, engine, engine.intake(self.name, self._config.param_sync.transport))
        log.info("generates with the %s engine", self._config.rollout.engine.name)
        return engine.capabilities()

    async def sync(self, step: str, *args: Any) -> Any:
        """One step of a sync session, see asyncrl.param_sync.handles.ReplicaHandle."""
        with self._dying_with_its_engine():
            return await getattr(self._endpoint, step)(*args)

    async def attach(self, owner: str) -> None:
        """From now on only ``owner`` may submit, abort and hear of events, see asyncrl.rollouter.fence."""
        await self._fence.attach(owner)

    async def submit(self, owner: str, requests: Sequence[Request]) -> None:
        with self._dying_with_its_engine():
            await self._fence.submit(owner, requests)

    async def events(self, owner: str) -> EventBatch:
        with self._dying_with_its_engine():
            return await self._fence.events(owner)

    async def abort(self, owner: str, ids: Sequence[str]) -> None:
        with self._dying_with_its_engine():
            await self._fence.abort(owner, ids)

    async def set_width(self, owner: str, width: int | None) -> None:
        with self._dying_with_its_engine():
            await self._fence.set_width(owner, width)

    async def drain(self) -> Batch:
        return self._recorder.drain()

    @contextlib.contextmanager
    def _dying_with_its_engine(self) -> Iterator[None]:
        """An engine with processes of its own may lose one: then this actor ends, as if it had been killed, and is
        started again like any other."""
        try:
            yield
        except EngineDied as death:
            log.error("%s", death)
            os._exit(1)


class SyncedReplica:
    """A replica actor's side of a sync session: every step of it as a method."""

    def __init__(self, replica: ActorClient) -> None:
        self._replica = replica

    def __getattr__(self, step: str) -> Callable[..., Awaitable[Any]]:
        return functools.partial(self._replica.sync, step)


@ray.remote
class RollouterActor(Watched):
    """The rollout loop, its router and its reward workers."""

    def __init__(
        self,
        config: Config,
        derived: Derived,
        max_prompt_tokens: int,
        queue: Any,
        replicas: Mapping[str, Any],
        logs: LogTo | None = None,
    ):
        super().__init__("rollouter", logs)
        never_interrupt()
        self._config, self._derived, self._max_prompt_tokens = config, derived, max_prompt_tokens
        self._recorder = Recorder(self.name)
        self._queue = ActorClient(queue, "queue")
        self._owner = f"rollouter {uuid.uuid4().hex}"
        self._replicas = {name: self._owned(name, handle) for name, handle in replicas.items()}
        self._loop: Any = None
        self._rolling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        from asyncrl.data.order import PromptOrder
        from asyncrl.data.prompts import load_prompts
        from asyncrl.rollouter.agent_loops.base import load_object
        from asyncrl.rollouter.loop import RolloutLoop
        from asyncrl.rollouter.rewards.pool import RewardPool
        from asyncrl.rollouter.router import Router
        from asyncrl.rollouter.samples import SampleMaker
        from asyncrl.rollouter.tokenizer import PromptTokenizer
        from asyncrl.rollouter.validation import Validation

        config = self._config
        tokenizer = PromptTokenizer(config.model.path, config.data.apply_chat_template)
        agent_loop = load_object(config.rollout.agent_loop)(
            tokenizer, config.rollout.max_response_tokens, **config.rollout.agent_loop_args
        )
        prompts = load_prompts(config.data.train_files, config.data)
        if config.data.validation_files:
            held_out = load_prompts(config.data.validation_files, config.data)
            self._validation_prompts = held_out[: config.validation.max_prompts or None]
        self._router = Router(self._replicas, is_death=lambda error: isinstance(error, ActorDied))
        self._rewards = RewardPool(config.reward)
        await self._rewards.start()
        maker = SampleMaker(
            config, tokenizer, agent_loop, self._max_prompt_tokens, self._router, self._rewards, self._recorder
        )
        self._validation = Validation(config, maker, self._recorder)

        def new_loop(recovery: Recovery) -> RolloutLoop:
            order = PromptOrder(prompts, config.seed, config.data.shuffle, config.data.epochs)
            return RolloutLoop(config, self._derived, order, maker, self._queue, self._recorder)  # type: ignore[arg-type]

        self._new_loop = new_loop
        log.info("has %d prompts", len(prompts))

    async def run(self) -> None:
        """Roll out until the queue is closed, and serve for as long as the actor lives."""
        serving = asyncio.create_task(self._router.run())
        try:
            while True:
                self._rolling = asyncio.create_task(self._roll())
                # the router serves on when no more groups start: validation still asks it
                await asyncio.wait({serving, self._rolling}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()
                if not self._rolling.cancelled():
                    self._rolling.result()
        except ExceptionGroup as e:
            raise first_leaf(e) from None

    async def _roll(self) -> None:
        """From where the queue is; does not return."""
        recovery = await self._queue.recover()
        self._loop = self._new_loop(recovery)
        async with asyncio.TaskGroup() as tasks:
            if self._config.rollout.pacing:
                slots = self._config.rollout.engine.slots

                def set_width(width: int | None) -> None:
                    self._router.set_width(width)
                    self._recorder.gauge("rollout/width", width or slots)

                set_width(None)
                pace = Pace(slots)
                held_up_s = lambda loop=self._loop: loop.held_up_s
                tasks.create_task(keep_pace(pace, self._queue, held_up_s, set_width))
            tasks.create_task(self._loop.run(recovery))
            await asyncio.Event().wait()

    async def reset(self) -> None:
        """The trainer went back to a checkpoint: what is in flight is put by, and starts again in its place."""
        if self._loop is not None and self._rolling is not None:
            await self._loop.park()
            self._rolling.cancel()
            await asyncio.wait({self._rolling})

    async def validate(self) -> dict[str, float]:
        return await self._validation.run(self._validation_prompts)

    async def set_routable(self, names: Sequence[str]) -> None:
        await self._router.set_routable(names)

    async def replace_replica(self, name: str, handle: Any) -> None:
        """A restarted actor takes the place of a lost one; it is given work once `set_routable` names it."""
        self._router.replace(name, self._owned(name, handle))

    async def silence_s(self) -> dict[str, float]:
        """See `asyncrl.rollouter.router.Router.silence_s`."""
        return self._router.silence_s()

    async def drain(self) -> Batch:
        return self._recorder.drain()

    async def close(self) -> None:
        await self._rewards.close()

    def _owned(self, name: str, handle: Any) -> Owned:
        return Owned(ActorClient(handle, name), self._owner)  # type: ignore[arg-type]
