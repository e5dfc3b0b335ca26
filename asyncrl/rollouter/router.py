"""Which replica serves which request, and one life for a request whatever happens to its replica.

A group stays on one replica (its shared prompt is prefilled once there), chosen by the fewest outstanding tokens.
Requests go out and events come in by batches. A request that a sync cut off, or whose replica died or left routing,
continues as a new request with the tokens it has; whoever awaits it notices nothing. Without a replica to serve it, it
waits for one.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from asyncrl.rollouter.agent_loops.base import GenerationFailed, SampleRestarts
from asyncrl.rollouter.engine import EventBatch, Request
from asyncrl.rollouter.partial import Drawn
from asyncrl.sample import FinishReason
from asyncrl.telemetry.recorder import now_s


class ReplicaClient(Protocol):
    """What the router needs of a replica, see `asyncrl.rollouter.fence.Owned`."""

    async def attach(self) -> None:
        """Called once, first: the replica forgets whom it served before."""

    async def submit(self, requests: Sequence[Request]) -> None: ...
    async def events(self) -> EventBatch: ...
    async def abort(self, ids: Sequence[str]) -> None: ...
    async def set_width(self, width: int | None) -> None:
        """At most so many requests of training generate at once (None: any number); attached, there is no limit."""


@dataclasses.dataclass(eq=False)
class _Replica:
    """A replica, and what it is to be told next. Lost, it stays here until it is replaced."""

    name: str
    client: ReplicaClient
    requests: list[Request] = dataclasses.field(default_factory=list)
    aborts: list[str] = dataclasses.field(default_factory=list)
    work: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    serving: int = 0  # requests
    load: int = 0  # outstanding tokens
    heard_s: float = 0.0
    width: int | None = None  # that it was told
    lost: bool = False
    task: asyncio.Task[None] | None = None


@dataclasses.dataclass(eq=False)
class _Active:
    """A request under way: what it has, and the part that is with a replica now."""

    request: Request
    drawn: Drawn
    one_version: bool
    future: asyncio.Future[FinishReason]
    replica: _Replica | None = None  # None: it waits for one
    attempt: int = 0

    @property
    def id(self) -> str:
        return f"{self.request.id}#{self.attempt}"

    @property
    def outstanding(self) -> int:
        return self.request.max_new_tokens - self.drawn.count

    def part(self) -> Request:
        """What is left of the request, to be served after the tokens that it has."""
        return dataclasses.replace(
            self.request,
            id=self.id,
            tokens=np.concatenate([self.request.tokens, *self.drawn.tokens]),
            position=self.request.position + self.drawn.count,
            max_new_tokens=self.outstanding,
        )


class Router:
    """Use: ``run()`` as a task for as long as requests are served; ``await generate(request, drawn)`` from anywhere.

    ``is_death`` tells the death of a replica's process, which the router survives, from what an engine raises."""

    def __init__(self, replicas: Mapping[str, ReplicaClient], is_death: Callable[[BaseException], bool]) -> None:
        if not replicas:
            raise ValueError("a router needs at least one replica")
        self._replicas = {name: _Replica(name, client) for name, client in replicas.items()}
        self._is_death = is_death
        self._routable = set(replicas)
        self._active: dict[str, _Active] = {}  # with a replica, by the id of the part
        self._waiting: dict[_Active, None] = {}  # for a replica, in order
        self._width: int | None = None
        self._home: dict[str, str] = {}  # group → replica
        self._members: dict[str, int] = {}  # group → requests under way
        self.lost: dict[str, str] = {}  # replicas that died and were not replaced yet: why
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Carry requests and events until cancelled; raises what an engine raised."""
        async with asyncio.TaskGroup() as self._tasks:
            for replica in self._replicas.values():
                self._start(replica)
            await asyncio.Event().wait()  # replicas come and go

    async def generate(self, request: Request, drawn: Drawn, one_version: bool = False) -> FinishReason:
        """Serve one request to its end; its tokens come into ``drawn``, after those that are there already.

        Raises GenerationFailed if the engine answers it with an error, and SampleRestarts if, with ``one_version``,
        it could only go on under another version than that of ``drawn``."""
        if drawn.count and drawn.count >= request.max_new_tokens:
            return FinishReason.LENGTH
        active = _Active(request, drawn, one_version, asyncio.get_running_loop().create_future())
        self._members[request.group] = self._members.get(request.group, 0) + 1
        try:
            self._place(active)
            return await active.future
        finally:
            self._remove(active, abort=True)
            self._members[request.group] -= 1
            if not self._members[request.group]:
                del self._members[request.group]
                self._home.pop(request.group, None)

    def set_width(self, width: int | None) -> None:
        """Let each replica generate for at most so many requests of training at once (None: any number); more wait
        there."""
        self._width = width
        for replica in self._replicas.values():
            replica.work.set()

    async def set_routable(self, names: Sequence[str]) -> None:
        """Serve from these replicas only, less those that are lost; requests of others continue here."""
        self._known(names)
        self._routable = {name for name in names if not self._replicas[name].lost}
        for name in self._routable:
            self._replicas[name].heard_s = now_s()  # a sync may have kept it silent
        self._resettle()

    def lose(self, name: str, why: str) -> None:
        """This replica is dead, or as good as that: its requests continue elsewhere."""
        self._known([name])
        replica = self._replicas[name]
        if replica.lost:
            return
        replica.lost = True
        self._routable.discard(name)
        if replica.task is not None and replica.task is not asyncio.current_task():
            replica.task.cancel()
        self.lost[name] = why
        self._resettle()

    def replace(self, name: str, client: ReplicaClient) -> None:
        """``client`` takes the place of this replica. It serves nothing before `set_routable` names it."""
        self.lose(name, "replaced")
        del self.lost[name]
        self._replicas[name] = _Replica(name, client)
        self._start(self._replicas[name])

    def silence_s(self) -> dict[str, float]:
        """Of each routable replica with requests under way: seconds since it was heard of, or got work when idle."""
        at = now_s()
        busy = (self._replicas[name] for name in sorted(self._routable))
        return {r.name: at - r.heard_s for r in busy if r.serving}

    @property
    def outstanding_tokens(self) -> dict[str, int]:
        return {replica.name: replica.load for replica in self._replicas.values()}

    # -- where requests are ----------------------------------------------------------------------------------------

    def _place(self, active: _Active) -> None:
        """Give the request to the replica that has its group, else to the one with the least to do."""
        home = self._home.get(active.request.group)
        if home not in self._routable:
            if not self._routable:
                self._waiting[active] = None
                return
            home = min(sorted(self._routable), key=lambda name: self._replicas[name].load)
        replica = self._replicas[home]
        self._home[active.request.group] = replica.name
        active.replica = replica
        if not replica.serving:
            replica.heard_s = now_s()
        replica.serving += 1
        replica.load += active.outstanding
        self._active[active.id] = active
        replica.requests.append(active.part())
        replica.work.set()

    def _remove(self, active: _Active, abort: bool) -> None:
        """It is with no replica any more; ``abort``: unless its part ended there, it is to end."""
        replica, active.replica = active.replica, None
        if replica is None:
            self._waiting.pop(active, None)
            return
        del self._active[active.id]
        replica.serving -= 1
        replica.load -= active.outstanding
        if abort:
            replica.aborts.append(active.id)
            replica.work.set()

    def _continue(self, active: _Active, abort: bool) -> None:
        self._remove(active, abort)
        active.attempt += 1  # late events of the old part find nobody
        self._place(active)

    def _resettle(self) -> None:
        """After a change of who is routable: what is elsewhere, or waits, goes on there."""
        waiting, self._waiting = self._waiting, {}
        for active in [a for a in self._active.values() if a.replica and a.replica.name not in self._routable]:
            self._continue(active, abort=True)
        for active in waiting:
            self._place(active)

    def _known(self, names: Sequence[str]) -> None:
        if unknown := set(names) - set(self._replicas):
            raise ValueError(f"no replica named {', '.join(sorted(unknown))}; there are {', '.join(self._replicas)}")

    # -- one replica -----------------------------------------------------------------------------------------------

    def _start(self, replica: _Replica) -> None:
        if self._tasks is not None:  # else `run` starts it
            replica.task = self._tasks.create_task(self._serve(replica))

    async def _serve(self, replica: _Replica) -> None:
        """Until the replica is lost; raises what its engine raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                await replica.client.attach()
                tasks.create_task(self._send(replica))
                tasks.create_task(self._receive(replica))
        except ExceptionGroup as errors:
            deaths, others = errors.split(self._is_death)
            if deaths is None or others is not None:
                raise
            self.lose(replica.name, str(deaths.exceptions[0]))

    async def _send(self, replica: _Replica) -> None:
        while True:
            await replica.work.wait()
            replica.work.clear()
            requests, replica.requests = replica.requests, []
            aborts, replica.aborts = replica.aborts, []
            if self._width != replica.width:
                replica.width = self._width
                await replica.client.set_width(replica.width)
            if requests:
                await replica.client.submit(requests)
            if aborts:  # after the requests: some of them may have been given up before they left
                await replica.client.abort(aborts)

    async def _receive(self, replica: _Replica) -> None:
        while True:
            batch = await replica.client.events()
            replica.heard_s = now_s()
            for e, id in enumerate(batch.ids):
                if (active := self._active.get(id)) is not None:
                    self._take(active, batch, e)

    def _take(self, active: _Active, batch: EventBatch, e: int) -> None:
        if active.future.done():  # given up, and about to be removed
            return
        assert active.replica is not None
        lo, hi = int(batch.offsets[e]), int(batch.offsets[e + 1])
        drawn, version = active.drawn, batch.versions[e]
        if hi > lo:
            if active.one_version and drawn.version not in (None, version):
                active.future.set_exception(SampleRestarts(f"begun under version {drawn.version}, now it is {version}"))
                return
            drawn.add(batch.tokens[lo:hi], batch.logprobs[lo:hi], version, batch.mixed_kv[e])
            active.replica.load -= hi - lo
        finish = batch.finish[e]
        if finish is None:
            return
        if finish is FinishReason.ABORT and active.outstanding > 0:
            self._continue(active, abort=False)
            return
        self._remove(active, abort=False)
        if finish is FinishReason.ERROR:
            active.future.set_exception(GenerationFailed(batch.errors.get(batch.ids[e], "the engine gave no reason")))
        else:
            active.future.set_result(FinishReason.LENGTH if finish is FinishReason.ABORT else finish)
