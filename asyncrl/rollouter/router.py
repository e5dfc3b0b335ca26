"""Routes requests to replicas, and migrates them when a sync, a death or an eviction interrupts them.

A group stays on one replica, where its shared prompt is prefilled once: the one with the fewest outstanding tokens.
Requests and events travel in batches. An interrupted request continues as a new one that starts from the tokens
generated so far; its caller notices nothing. With no replica routable, requests wait. A request whose last token is a
stop token has finished even if the engine reports it as aborted: an abort may come between sampling that token and
checking it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.measured import ENGINE, REPORTS, note
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import GenerationFailed, Poison
from asyncrl.rollouter.engines.base import EventBatch, Request, Scheduling
from asyncrl.rollouter.partial import GeneratedTokens
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

log = logging.getLogger(__name__)

_SUSPECT_DEATHS = 2  # of replicas that served a group, after which it is served alone on its replica
_PROGRESS_S = 40e-6  # to take the tokens of a request that continues
_PROGRESS_SHARE = 0.05  # of this process, for that
_HAND_OVER_S = 10.0  # for a retired replica to report the last tokens of its requests
_REPLACED_S = 10.0  # in which the driver notices by itself that a replica has died
_OBSERVED = 16  # replicas, enough for the run's profile
_OBSERVED_S = 1.0  # of a busy engine; tokens of prompts are known only after they were computed, in a later report


class CannotContinue(RuntimeError):
    """A call must start again: its tokens so far cannot be continued."""


class VersionChanged(CannotContinue):
    """A call that must be of one version could only continue under another one."""


class ReplicaClient(Protocol):
    """The router's view of a replica, see `asyncrl.rollouter.engine_lease.LeasedEngine`."""

    async def attach(self) -> None:
        """The first call, made once: the replica drops the requests of its previous client."""

    async def submit(self, requests: Sequence[Request]) -> None: ...
    async def events(self) -> EventBatch: ...
    async def abort(self, ids: Sequence[str]) -> None: ...
    async def set_scheduling(self, scheduling: Scheduling) -> None:
        """How to serve waiting requests; the default `Scheduling` applies after `attach`."""


@dataclasses.dataclass(eq=False)
class _Observed:
    """What a busy engine has done since ``since_s``, for the run's profile."""

    since_s: float
    steps: Counter[str] = dataclasses.field(default_factory=Counter)  # decode steps by request
    context: float = 0.0  # tokens, summed over steps and requests
    computed: int = 0  # tokens of prompts
    disturbed: bool = False  # by a sync, or aborts


_NOTHING = (0.0,) * 5


class _Lost(NamedTuple):
    """Why a replica died, and when it was noticed."""

    why: str
    at_s: float


@dataclasses.dataclass(eq=False)
class _Replica:
    """A replica and its unsent calls. A lost one stays listed until it is replaced."""

    name: str
    client: ReplicaClient
    requests: list[Request] = dataclasses.field(default_factory=list)
    aborts: list[str] = dataclasses.field(default_factory=list)
    unsent: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    assigned: int = 0  # requests
    free: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # has none, since it is retired
    outstanding_tokens: int = 0
    last_event_s: float = 0.0
    scheduling: Scheduling = Scheduling()  # as last sent
    lost: _Lost | None = None
    task: asyncio.Task[None] | None = None
    observed: _Observed = dataclasses.field(default_factory=lambda: _Observed(now_s()))
    sums: Sequence[float] = _NOTHING  # of earlier ones, see `ENGINE`
    version: PolicyVersion | None = None  # of its last tokens
    #: of groups whose prompt it has computed under that version: its samples' tokens so far
    computed: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _ActiveRequest:
    """A request in flight, its output so far, and the replica that serves the rest of it."""

    request: Request
    output: GeneratedTokens
    one_version: bool
    finished: asyncio.Future[FinishReason]
    replica: _Replica | None = None  # None: waits for a routable one
    attempt: int = 0
    begun: _Observed | None = None  # when its replica sampled its first token
    id: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.request.id}#{self.attempt}"

    def again(self) -> None:
        """Change its id, so that late events of this attempt are ignored."""
        self.attempt += 1
        self.id = f"{self.request.id}#{self.attempt}"

    @property
    def outstanding(self) -> int:
        return self.request.max_new_tokens - self.output.count

    def cannot_continue(self) -> CannotContinue | None:
        """Why the rest cannot be sent as a request, if so."""
        if not self.output.count or self.request.sampling.grammar is None:
            return None
        return CannotContinue(f"{self.request.id} was interrupted after {self.output.count} tokens of its grammar")

    def remainder(self) -> Request:
        """The rest of the request, as a request that starts from its tokens so far."""
        request, output = self.request, self.output
        if not output.count:
            return request._replace(id=self.id)
        return request._replace(
            id=self.id,
            tokens=np.concatenate([request.tokens, *output.tokens]),
            position=request.position + output.count,
            max_new_tokens=self.outstanding,
            resumed=output.count,
        )


class Router:
    """``run()`` is a task that lives as long as requests are served; call ``await generate(request, output)`` anywhere.

    ``is_death`` distinguishes the death of a replica's process from errors of its engine. The router survives both:
    the replica serves nothing until it is replaced.

    A request may be what kills its replica. A group that was on two replicas when they died is served next without any
    other group on its replica. If that one dies, too, the group fails as poison: no other can have been the cause."""

    def __init__(
        self,
        replicas: Mapping[str, ReplicaClient],
        is_death: Callable[[BaseException], bool],
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._replicas = {name: _Replica(name, client) for name, client in replicas.items()}
        self._is_death = is_death
        self._routable = set(replicas)
        #: heap of (tokens, name): of each routable replica an entry with no more than its outstanding tokens
        self._loads: list[tuple[int, str]] = []
        self._weigh()
        self._assigned: dict[str, _ActiveRequest] = {}  # to a replica, by the id sent there
        self._waiting: dict[_ActiveRequest, None] = {}  # for a routable replica, in order
        self._scheduling = Scheduling()
        self._group_replica: dict[str, str] = {}
        self._group_requests: dict[str, int] = {}  # number in flight
        self._group_deaths: Counter[str] = Counter()  # of replicas that served the group
        self._suspect: str | None = None  # the group that is served alone on its replica; other suspects wait
        self._retired: set[str] = set()
        self._broken: dict[str, str] = {}  # replica → error of its engine, while its process lives
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Send requests and receive events until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for replica in self._replicas.values():
                self._start(replica)
            await asyncio.Event().wait()  # replicas may join at any time

    async def generate(self, request: Request, output: GeneratedTokens, one_version: bool = False) -> FinishReason:
        """Serve one request to its end, appending its tokens to ``output``, where it may already have some.

        Raises GenerationFailed if the engine reports an error; VersionChanged if, with ``one_version``, it could only
        continue under another version than that of ``output``; and CannotContinue if it is interrupted after its first
        token and has a grammar: engines follow one only from an answer's start."""
        if output.last_token in request.sampling.stop_token_ids:  # a snapshot was taken before the end was noticed
            return FinishReason.STOP
        if output.count and output.count >= request.max_new_tokens:
            return FinishReason.LENGTH
        active = _ActiveRequest(request, output, one_version, asyncio.get_running_loop().create_future())
        if (problem := active.cannot_continue()) is not None:
            raise problem
        self._group_requests[request.group] = self._group_requests.get(request.group, 0) + 1
        try:
            self._assign(active)
            return await active.finished
        finally:
            self._detach(active, abort=True)
            self._group_requests[request.group] -= 1
            if not self._group_requests[request.group]:
                self._rest(request.group)

    def forget(self, group: str) -> None:
        """The group has ended. Until then its requests go to one replica, which may have the KV of earlier ones."""
        if (replica := self._replicas.get(self._group_replica.pop(group, ""))) is not None:
            replica.computed.pop(group, None)

    def set_max_running_requests(self, limit: int | None) -> None:
        """Cap the training requests that each replica generates for at once (None: no cap); the others wait there."""
        self._schedule(dataclasses.replace(self._scheduling, max_running_requests=limit))

    def set_validation_first(self, first: bool) -> None:
        """Serve waiting validation requests before training requests, or after them as usual."""
        self._schedule(dataclasses.replace(self._scheduling, validation_first=first))

    async def set_routable(self, names: Sequence[str]) -> None:
        """Route to these replicas only, except lost and retired ones; requests on other replicas migrate to them."""
        self._check_known(names)
        known = [name for name in names if name not in self._retired]
        self._routable = {name for name in known if self._replicas[name].lost is None}
        self._weigh()
        for name in self._routable:
            self._replicas[name].last_event_s = now_s()  # a sync may have kept it silent
        self._reroute()

    def mark_lost(self, name: str, why: str) -> None:
        """Treat this replica as dead: its requests migrate."""
        self._check_known([name])
        if (replica := self._replicas.get(name)) is None or replica.lost is not None:
            return
        replica.lost = _Lost(why, now_s())
        self._routable.discard(name)
        groups = {active.request.group for active in self._assigned_to(replica)}
        self._group_deaths.update(
            group for group in groups if self._group_deaths[group] < _SUSPECT_DEATHS or groups == {group}
        )
        if replica.task is not None and replica.task is not asyncio.current_task():
            replica.task.cancel()
        self._reroute()

    def replace(self, name: str, client: ReplicaClient) -> None:
        """Add a replica, or replace the one of this name. It serves nothing until `set_routable` names it."""
        if name in self._replicas:
            self.mark_lost(name, "replaced")
            self._broken.pop(name, None)
        self._retired.discard(name)
        self._replicas[name] = _Replica(name, client)
        self._start(self._replicas[name])

    async def retire(self, name: str) -> None:
        """Remove a replica, whose requests go on elsewhere with all tokens that it reports within `_HAND_OVER_S`."""
        if (replica := self._replicas.get(name)) is None or name in self._retired:
            return
        self._retired.add(name)
        self._routable.discard(name)
        self._weigh()
        unsent = {request.id for request in replica.requests}
        for active in self._assigned_to(replica):
            if replica.lost is not None or active.id in unsent:
                self._migrate(active, abort=True)
            else:
                replica.aborts.append(active.id)  # it ends with an event, which migrates it
        replica.unsent.set()
        if replica.assigned:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(replica.free.wait(), _HAND_OVER_S)
        for active in self._assigned_to(replica):
            self._migrate(active, abort=False)
        if replica.task is not None:
            replica.task.cancel()
        if self._replicas.get(name) is replica:  # else it was replaced meanwhile
            for table in (self._replicas, self._broken):
                table.pop(name, None)

    def unfit(self, silent_s: float | None) -> dict[str, str]:
        """Replicas that must be restarted though their process lives, and why: the engine raised, or with work it sent
        no event for ``silent_s`` (None: not checked), or it was lost here and nobody has replaced it."""
        found = {name: f"answers with errors ({error})" for name, error in self._broken.items()}
        for replica in self._replicas.values():
            if replica.lost is not None and now_s() - replica.lost.at_s > _REPLACED_S:
                found.setdefault(replica.name, f"cannot be reached by its rollouter ({replica.lost.why})")
        if silent_s is not None:
            for replica in (self._replicas[name] for name in sorted(self._routable)):
                silence_s = now_s() - replica.last_event_s
                if replica.assigned and silence_s > silent_s:
                    found[replica.name] = f"has work but produced no token for {silence_s:.0f} s"
        return found

    @property
    def lost(self) -> dict[str, str]:
        """Why each replica died that has not been replaced."""
        return {replica.name: replica.lost.why for replica in self._replicas.values() if replica.lost is not None}

    @property
    def outstanding_tokens(self) -> dict[str, int]:
        return {replica.name: replica.outstanding_tokens for replica in self._replicas.values()}

    def _schedule(self, scheduling: Scheduling) -> None:
        self._scheduling = scheduling
        for replica in self._replicas.values():
            replica.unsent.set()

    # -- assignment of requests ------------------------------------------------------------------------------------

    def _assign(self, active: _ActiveRequest) -> None:
        """Assign the request to its group's replica, else to the least loaded one."""
        group = active.request.group
        deaths = self._group_deaths[group]
        if deaths > _SUSPECT_DEATHS:
            if not active.finished.done():
                active.finished.set_exception(Poison(f"{deaths} replicas died while they served its group"))
            return
        routable = self._routable
        if self._suspect not in (None, group):
            is_suspect = deaths == _SUSPECT_DEATHS
            routable = set() if is_suspect else routable - {self._group_replica.get(self._suspect or "", "")}
        if not routable:
            self._waiting[active] = None
            return
        name = self._group_replica.get(group)
        if name not in routable:
            name = self._least_loaded(routable)
        replica = self._replicas[name]
        self._group_replica[group] = replica.name
        active.replica = replica
        if not replica.assigned:
            replica.last_event_s = now_s()
            replica.observed = _Observed(replica.last_event_s)
        replica.assigned += 1
        replica.outstanding_tokens += active.outstanding
        self._assigned[active.id] = active
        replica.requests.append(active.remainder())
        replica.unsent.set()
        if deaths == _SUSPECT_DEATHS:
            self._suspect = group
            for other in self._assigned_to(replica):
                if other.request.group != group:
                    self._migrate(other, abort=True)

    def _least_loaded(self, routable: set[str]) -> str:
        """The one with the fewest outstanding tokens, of equals the first by name."""
        if routable is not self._routable:  # a suspect is served
            return min(routable, key=lambda name: (self._replicas[name].outstanding_tokens, name))
        while True:
            tokens, name = self._loads[0]
            if name not in routable:
                heapq.heappop(self._loads)
            elif tokens == (now := self._replicas[name].outstanding_tokens):
                return name
            else:
                heapq.heapreplace(self._loads, (now, name))

    def _load_fell(self, replica: _Replica) -> None:
        heapq.heappush(self._loads, (replica.outstanding_tokens, replica.name))
        if len(self._loads) > 4 * len(self._routable) + 64:
            self._weigh()

    def _weigh(self) -> None:
        self._loads = [(self._replicas[name].outstanding_tokens, name) for name in self._routable]
        heapq.heapify(self._loads)

    def _detach(self, active: _ActiveRequest, abort: bool) -> None:
        """Take the request from its replica; ``abort``: unless it has finished there, abort it."""
        replica, active.replica, active.begun = active.replica, None, None
        if replica is None:
            self._waiting.pop(active, None)
            return
        del self._assigned[active.id]
        replica.assigned -= 1
        if not replica.assigned and replica.name in self._retired:
            replica.free.set()
        replica.outstanding_tokens -= active.outstanding
        self._load_fell(replica)
        if abort:
            replica.aborts.append(active.id)
            replica.unsent.set()

    def _rest(self, group: str) -> None:
        """The group has no request in flight."""
        del self._group_requests[group]
        self._group_deaths.pop(group, None)
        if self._suspect == group:
            self._suspect = None
            self._reroute()  # the next one may be waiting

    def _migrate(self, active: _ActiveRequest, abort: bool) -> None:
        self._detach(active, abort)
        active.again()
        if (problem := active.cannot_continue()) is None:
            self._assign(active)
        elif not active.finished.done():
            active.finished.set_exception(problem)

    def _reroute(self) -> None:
        """After a change of the routable replicas: migrate requests from the others, and assign waiting ones."""
        waiting, self._waiting = self._waiting, {}
        for replica in [r for r in self._replicas.values() if r.name not in self._routable]:
            reports_first = replica.name in self._retired and replica.lost is None
            if replica.assigned and not reports_first:
                for active in self._assigned_to(replica):
                    self._migrate(active, abort=True)
        for active in waiting:
            self._assign(active)

    def _assigned_to(self, replica: _Replica) -> list[_ActiveRequest]:
        return [active for active in self._assigned.values() if active.replica is replica]

    def _check_known(self, names: Sequence[str]) -> None:
        if unknown := set(names) - set(self._replicas) - self._retired:
            raise ValueError(f"no replica named {', '.join(sorted(unknown))}; known: {', '.join(self._replicas)}")

    # -- one replica -----------------------------------------------------------------------------------------------

    def _start(self, replica: _Replica) -> None:
        if self._tasks is not None:  # before `run`, which starts them all
            replica.task = self._tasks.create_task(self._serve(replica))

    async def _serve(self, replica: _Replica) -> None:
        """Exchange requests and events until the replica is lost or its engine raises."""
        try:
            async with asyncio.TaskGroup() as tasks:
                await replica.client.attach()
                tasks.create_task(self._send(replica))
                tasks.create_task(self._receive(replica))
        except ExceptionGroup as errors:
            if self._replicas.get(replica.name) is not replica:  # its successor is not lost with it
                return
            deaths, _ = errors.split(self._is_death)
            error = (deaths or errors).exceptions[0]
            if deaths is None:
                log.error("%s answers with errors", replica.name, exc_info=error)
                self._broken[replica.name] = f"{type(error).__name__}: {error}"
            self.mark_lost(replica.name, str(error))

    async def _send(self, replica: _Replica) -> None:
        while True:
            await replica.unsent.wait()
            replica.unsent.clear()
            aborts, replica.aborts = replica.aborts, []
            # one that was aborted before it was sent must not kill a replica that serves a suspect by now
            cancelled = set(aborts)
            requests, replica.requests = [r for r in replica.requests if r.id not in cancelled], []
            if self._scheduling != replica.scheduling:
                replica.scheduling = self._scheduling
                await replica.client.set_scheduling(replica.scheduling)
            if requests:
                await replica.client.submit(requests)
            if aborts:
                await replica.client.abort(aborts)

    async def _receive(self, replica: _Replica) -> None:
        recorder = self._recorder if replica.name in itertools.islice(self._replicas, _OBSERVED) else None
        while True:
            batch = await replica.client.events()
            since_s, replica.last_event_s = replica.last_event_s, now_s()
            if recorder is not None and batch.ids:
                self._observe(recorder, replica, batch, replica.last_event_s - since_s)
            for e, id in enumerate(batch.ids):
                if (active := self._assigned.get(id)) is not None:
                    self._apply(active, batch, e)
            self._load_fell(replica)
            self._pace_progress()

    def _pace_progress(self) -> None:
        """Let replicas report the tokens of requests that continue less often the more there are."""
        needed_s = len(self._assigned) * _PROGRESS_S / _PROGRESS_SHARE
        now, least = self._scheduling.progress_every_s, Scheduling().progress_every_s
        if needed_s > now or max(4 * needed_s, least) < now:
            self._schedule(dataclasses.replace(self._scheduling, progress_every_s=max(2 * needed_s, least)))

    def _observe(self, recorder: Recorder, replica: _Replica, batch: EventBatch, seconds: float) -> None:
        """Add a batch that came ``seconds`` after the one before to what the engine has done. Count that if all of its
        requests have reported."""
        observed, versions = replica.observed, set(batch.versions)
        if versions == {replica.version} and FinishReason.ABORT not in batch.finish:
            note(recorder, REPORTS, seconds)
        else:
            observed.disturbed = True
        if replica.version not in versions:
            replica.computed.clear()
        replica.version = batch.versions[-1]
        seen: Counter[str] = Counter()
        for id, count in zip(batch.ids, np.diff(batch.offsets).tolist(), strict=True):
            if not count or (active := self._assigned.get(id)) is None:
                continue
            request, sample = active.request, active.request.id.rsplit("/", 1)[0]
            before = len(request.tokens) + active.output.count + seen[id]
            seen[id] += count
            observed.context += count * (before + count / 2)
            samples = replica.computed.get(request.group)
            if active.begun is None:
                active.begun = observed
                known = 0 if samples is None else max(request.shared_prefix, samples.get(sample, 0))
                observed.computed += max(0, before - known)
            replica.computed.setdefault(request.group, {})[sample] = before + count
        observed.steps.update(seen)
        if not batch.progress:
            return
        replica.observed = _Observed(replica.last_event_s)
        # a decode step gives each running request a token, so those that ran all the time tell how many there were
        continuing = zip(batch.ids, batch.finish, strict=True)
        throughout = [id for id, finish in continuing if finish is None and self._begun_before(id, observed)]
        if undisturbed := bool(throughout) and not observed.disturbed:
            busy_s, rows = replica.last_event_s - observed.since_s, observed.steps.total()
            steps = max(observed.steps[id] for id in throughout)
            found = busy_s, steps, rows, observed.context, observed.computed
            replica.sums = [a + b for a, b in zip(replica.sums, found, strict=True)]
        if replica.sums[0] >= (_OBSERVED_S if undisturbed else 1e-9):
            ENGINE.observe(recorder, *replica.sums)
            replica.sums = _NOTHING

    def _begun_before(self, id: str, observed: _Observed) -> bool:
        active = self._assigned.get(id)
        return active is not None and active.begun not in (None, observed)

    def _apply(self, active: _ActiveRequest, batch: EventBatch, e: int) -> None:
        if active.finished.done():  # cancelled, and about to be detached
            return
        assert active.replica is not None
        lo, hi = int(batch.offsets[e]), int(batch.offsets[e + 1])
        output, version = active.output, batch.versions[e]
        if hi > lo:
            if active.one_version and output.first_version not in (None, version):
                active.finished.set_exception(
                    VersionChanged(f"started under version {output.first_version}, now it is {version}")
                )
                return
            tokens, logprobs = batch.tokens[lo:hi], batch.logprobs[lo:hi]
            output.add(tokens, logprobs, version, batch.mixed_kv[e], active.replica.name)
            active.replica.outstanding_tokens -= hi - lo
        finish = batch.finish[e]
        # a failed request stays failed: the fault may have sampled that token, too
        if finish is not FinishReason.ERROR and output.last_token in active.request.sampling.stop_token_ids:
            self._detach(active, abort=finish is None)
            active.finished.set_result(FinishReason.STOP)
            return
        if finish is None:
            return
        if finish is FinishReason.ABORT and active.outstanding > 0:
            self._migrate(active, abort=False)
            return
        self._detach(active, abort=False)
        if finish is FinishReason.ERROR:
            active.finished.set_exception(GenerationFailed(batch.errors.get(batch.ids[e], "the engine gave no reason")))
        else:
            active.finished.set_result(FinishReason.LENGTH if finish is FinishReason.ABORT else finish)
