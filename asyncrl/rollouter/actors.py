"""Engine replicas and the rollouter as Ray actors around their Ray-free cores."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray

from asyncrl.config.checks import Derived
from asyncrl.config.schema import Config
from asyncrl.ray_client import ActorClient, first_leaf
from asyncrl.rollouter.engine import Capabilities, EventBatch, Request
from asyncrl.telemetry.recorder import Batch, Recorder


@ray.remote
class EngineReplicaActor:
    """One engine in a process of its own: generation for the rollouter, and a sync session's replica side."""

    def __init__(self, config: Config, name: str) -> None:
        import torch

        torch.set_num_threads(config.rollout.engine.threads)
        self._config, self._name = config, name
        self._recorder = Recorder(name)
        self._engine: Any = None
        self._endpoint: Any = None

    async def start(self) -> Capabilities:
        from asyncrl.param_sync.endpoint import ReplicaEndpoint
        from asyncrl.param_sync.transports.shared_memory import SharedMemoryReader
        from asyncrl.rollouter.engines.native.engine import NativeEngine
        from asyncrl.rollouter.tokenizer import PromptTokenizer

        tokenizer = PromptTokenizer(self._config.model.path, self._config.data.apply_chat_template)
        self._engine = NativeEngine(
            self._config.model.path, self._config.rollout.engine, recorder=self._recorder, tokenizer=tokenizer.hf
        )
        self._endpoint = ReplicaEndpoint(self._name, self._engine, SharedMemoryReader(self._name))
        return self._engine.capabilities()

    async def sync(self, step: str, *args: Any) -> Any:
        """One step of a sync session, see asyncrl.param_sync.handles.ReplicaHandle."""
        return await getattr(self._endpoint, step)(*args)

    async def submit(self, requests: Sequence[Request]) -> None:
        await self._engine.submit(requests)

    async def events(self) -> EventBatch:
        return await self._engine.events()

    async def abort(self, ids: Sequence[str]) -> None:
        await self._engine.abort(ids)

    async def drain(self) -> Batch:
        return self._recorder.drain()


class SyncedReplica:
    """A replica actor's side of a sync session: every step of it as a method."""

    def __init__(self, replica: ActorClient) -> None:
        self._replica = replica

    def __getattr__(self, step: str) -> Callable[..., Awaitable[Any]]:
        return functools.partial(self._replica.sync, step)


@ray.remote
class RollouterActor:
    """The rollout loop, its router and its reward workers."""

    def __init__(
        self, config: Config, derived: Derived, max_prompt_tokens: int, queue: Any, replicas: Mapping[str, Any]
    ):
        self._config, self._derived, self._max_prompt_tokens = config, derived, max_prompt_tokens
        self._recorder = Recorder("rollouter")
        self._queue = ActorClient(queue, "queue")
        self._replicas = {name: ActorClient(handle, name) for name, handle in replicas.items()}

    async def start(self) -> None:
        from asyncrl.data.order import PromptOrder
        from asyncrl.data.prompts import load_prompts
        from asyncrl.rollouter.agent_loops.base import load_object
        from asyncrl.rollouter.loop import RolloutLoop
        from asyncrl.rollouter.rewards.pool import RewardPool
        from asyncrl.rollouter.router import Router
        from asyncrl.rollouter.tokenizer import PromptTokenizer

        config = self._config
        tokenizer = PromptTokenizer(config.model.path, config.data.apply_chat_template)
        agent_loop = load_object(config.rollout.agent_loop)(
            tokenizer, config.rollout.max_response_tokens, **config.rollout.agent_loop_args
        )
        prompts = load_prompts(config.data.train_files, config.data)
        if config.data.validation_files:
            held_out = load_prompts(config.data.validation_files, config.data)
            self._validation_prompts = held_out[: config.validation.max_prompts or None]
        order = PromptOrder(prompts, config.seed, config.data.shuffle, config.data.epochs)
        self._router = Router(self._replicas)  # type: ignore[arg-type]
        self._rewards = RewardPool(config.reward)
        await self._rewards.start()
        self._loop = RolloutLoop(
            config,
            self._derived,
            tokenizer,
            agent_loop,
            order,
            self._max_prompt_tokens,
            self._router,
            self._rewards,
            self._queue,  # type: ignore[arg-type]
            self._recorder,
        )

    async def run(self) -> None:
        """Roll out until the queue is closed, and serve for as long as the actor lives."""
        serving = asyncio.create_task(self._router.run())
        rolling = asyncio.create_task(self._loop.run())
        try:
            # the router serves on when no more groups start: validation still asks it
            await asyncio.gather(serving, rolling)
        except ExceptionGroup as e:
            raise first_leaf(e) from None

    async def validate(self) -> dict[str, float]:
        return await self._loop.validate(self._validation_prompts)

    async def set_routable(self, names: Sequence[str]) -> None:
        await self._router.set_routable(names)

    async def drain(self) -> Batch:
        return self._recorder.drain()

    async def close(self) -> None:
        await self._rewards.close()
