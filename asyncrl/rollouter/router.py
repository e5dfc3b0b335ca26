"""Which replica serves which request, and one life for a request whatever happens to its replica.

A group stays on one replica (its shared prompt is prefilled once there), chosen by the fewest outstanding tokens.
Requests go out and events come in by batches. A request that a sync cut off, or whose replica left routing, continues
as a new request with the tokens it has; whoever awaits it notices nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from asyncrl.rollouter.agent_loops.base import Completion, GenerationFailed
from asyncrl.rollouter.engine import EventBatch, Request
from asyncrl.sample import FinishReason, VersionSpan


class ReplicaClient(Protocol):
    """What the router needs of a replica; an `Engine` has it, and so has an actor around one."""

    async def submit(self, requests: Sequence[Request]) -> None: ...
    async def events(self) -> EventBatch: ...
    async def abort(self, ids: Sequence[str]) -> None: ...


@dataclasses.dataclass
class _Active:
    """A request under way: the part that is with a replica now, and what earlier parts gave."""

    request: Request
    future: asyncio.Future[Completion]
    replica: str
    attempt: int = 0
    done: int = 0
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    spans: list[VersionSpan] = dataclasses.field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.request.id}#{self.attempt}"

    @property
    def outstanding(self) -> int:
        return self.request.max_new_tokens - self.done

    def part(self) -> Request:
        """What is left of the request, to be served after the tokens that it has."""
        return dataclasses.replace(
            self.request,
            id=self.id,
            tokens=np.concatenate([self.request.tokens, *self.tokens]),
            position=self.request.position + self.done,
            max_new_tokens=self.outstanding,
        )

    def completion(self, finish: FinishReason) -> Completion:
        tokens = np.concatenate(self.tokens) if self.tokens else np.empty(0, np.int32)
        logprobs = np.concatenate(self.logprobs) if self.logprobs else np.empty(0, np.float32)
        return Completion(tokens, logprobs, self.spans, finish)


class Router:
    """Use: ``run()`` as a task for as long as requests are served; ``await generate(request)`` from anywhere."""

    def __init__(self, replicas: Mapping[str, ReplicaClient]) -> None:
        if not replicas:
            raise ValueError("a router needs at least one replica")
        self._replicas = dict(replicas)
        self._routable = set(replicas)
        self._active: dict[str, _Active] = {}  # by the id of the part under way
        self._load = dict.fromkeys(replicas, 0)  # outstanding tokens
        self._home: dict[str, str] = {}  # group → replica
        self._members: dict[str, int] = {}  # group → requests under way
        self._outbox: dict[str, list[Request]] = {name: [] for name in replicas}
        self._work = {name: asyncio.Event() for name in replicas}
        self._someone_routable = asyncio.Event()
        self._someone_routable.set()

    async def run(self) -> None:
        """Carry requests and events until cancelled; raises what a replica raised."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._replicas:
                tasks.create_task(self._send(name))
                tasks.create_task(self._receive(name))

    async def generate(self, request: Request) -> Completion:
        """Serve one request to its end. Raises GenerationFailed if the engine answers it with an error."""
        active = _Active(request, asyncio.get_running_loop().create_future(), replica="")
        self._members[request.group] = self._members.get(request.group, 0) + 1
        try:
            await self._place(active)
            return await active.future
        except asyncio.CancelledError:
            if active.replica:
                await self._replicas[active.replica].abort([active.id])
            raise
        finally:
            self._active.pop(active.id, None)
            self._load[active.replica] -= active.outstanding if active.replica else 0
            self._members[request.group] -= 1
            if not self._members[request.group]:
                del self._members[request.group]
                self._home.pop(request.group, None)

    async def set_routable(self, names: Sequence[str]) -> None:
        """Serve from these replicas only; requests of others continue here with the tokens they have."""
        unknown = set(names) - set(self._replicas)
        if unknown:
            raise ValueError(f"no replica named {', '.join(sorted(unknown))}; there are {', '.join(self._replicas)}")
        self._routable = set(names)
        if not self._routable:
            self._someone_routable.clear()
            return
        self._someone_routable.set()
        for active in [a for a in self._active.values() if a.replica not in self._routable]:
            await self._continue(active)

    @property
    def outstanding_tokens(self) -> dict[str, int]:
        return dict(self._load)

    async def _place(self, active: _Active) -> None:
        await self._someone_routable.wait()
        group = active.request.group
        if self._home.get(group) not in self._routable:
            self._home[group] = min(sorted(self._routable), key=lambda name: self._load[name])
        active.replica = self._home[group]
        self._load[active.replica] += active.outstanding
        self._active[active.id] = active
        self._outbox[active.replica].append(active.part())
        self._work[active.replica].set()

    async def _continue(self, active: _Active) -> None:
        del self._active[active.id]
        self._load[active.replica] -= active.outstanding
        active.attempt += 1  # late events of the old part find nobody
        await self._place(active)

    async def _send(self, name: str) -> None:
        while True:
            await self._work[name].wait()
            self._work[name].clear()
            batch, self._outbox[name] = self._outbox[name], []
            if batch:
                await self._replicas[name].submit(batch)

    async def _receive(self, name: str) -> None:
        while True:
            batch = await self._replicas[name].events()
            for e, id in enumerate(batch.ids):
                active = self._active.get(id)
                if active is not None:
                    await self._take(active, batch, e)

    async def _take(self, active: _Active, batch: EventBatch, e: int) -> None:
        lo, hi = int(batch.offsets[e]), int(batch.offsets[e + 1])
        if hi > lo:
            span = VersionSpan(active.done, batch.versions[e], batch.mixed_kv[e])
            if not active.spans or active.spans[-1][1:] != span[1:]:
                active.spans.append(span)
            active.tokens.append(batch.tokens[lo:hi])
            active.logprobs.append(batch.logprobs[lo:hi])
            active.done += hi - lo
            self._load[active.replica] -= hi - lo
        finish = batch.finish[e]
        if finish is None or active.future.done():
            return
        if finish is FinishReason.ERROR:
            active.future.set_exception(GenerationFailed(batch.errors.get(batch.ids[e], "the engine gave no reason")))
        elif finish is FinishReason.ABORT and active.outstanding > 0:
            await self._continue(active)
        else:
            reason = FinishReason.LENGTH if finish is FinishReason.ABORT else finish
            active.future.set_result(active.completion(reason))
