"""An engine that computes nothing: it knows how long another one would take, see `EngineFigures`."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.param_sync.digest import combine_hashes
from asyncrl.param_sync.manifest import ROLES, Role
from asyncrl.param_sync.session_protocol import PauseMode, ReceivePlan
from asyncrl.rollouter.engines.base import ALIVE_EVERY_S, EventBatch, Request, Scheduling
from asyncrl.simulation.profile import Profile, SyncFigures
from asyncrl.simulation.workload import STOP, TOKEN
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

DIGESTS: dict[Role, str] = {role: combine_hashes({}) for role in ROLES}  # those of a sender without tensors
_ROUNDING = 1e-6  # of a decode step, and of seconds


@dataclass(eq=False, slots=True)
class _Row:
    """A running request. It began when the engine had made ``began`` decode steps, and needs ``tokens`` of them."""

    request: Request
    began: int
    tokens: int
    stops: bool
    reported: int = 0  # tokens


class _Event(NamedTuple):
    id: str
    tokens: int
    finish: FinishReason | None


class SimulatedEngine:
    """Implements `asyncrl.rollouter.engines.base.Engine` but for its weights, and the router's client.

    All running requests get a token in each decode step, so a request's progress is the number of steps since it
    began, and only arrivals, ends and reports are events. Requests begin and are reported between two steps."""

    def __init__(self, profile: Profile, slots: int) -> None:
        self._profile, self._figures, self._slots = profile, profile.engine, slots
        self._drains_waiting = profile.about.get("engine") == "native"  # others finish only what runs
        self._scheduling = Scheduling()
        self._waiting: deque[Request] = deque()
        self._running: dict[str, _Row] = {}
        self._ends: list[tuple[float, int, str]] = []  # heap: decode step of the end, number, id
        self._begun = 0
        self._steps, self._at_s = 0.0, 0.0  # made so far, and until when
        self._prefilling_until_s = 0.0
        self._context = 0.0  # tokens of all running requests
        self._cached: dict[str, int] = {}  # running requests of each group, whose prompt is in the KV cache
        self._contexts: dict[tuple[str, int], int] = {}  # tokens of ended turns by sample, whose KV is kept
        self._paused = True
        self._draining: frozenset[str] | None = None  # during a pause that waits: requests that may still begin
        self._version = PolicyVersion(0, 0)
        self._ended: list[_Event] = []
        self._reported_s = self._progress_s = 0.0
        self._active, self._has_ended, self._empty = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.tokens = 0  #: generated
        self.busy_s = 0.0  #: seconds in which it generated or computed prompts

    # -- generation ------------------------------------------------------------------------------------------------

    async def attach(self) -> None: ...

    async def set_scheduling(self, scheduling: Scheduling) -> None:
        self._scheduling = scheduling
        self._continue()

    async def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)
        self._continue()

    async def abort(self, ids: Sequence[str]) -> None:
        self._advance()
        aborted = set(ids)
        for id in ids:
            if id in self._running:
                self._end(id, FinishReason.ABORT)
        # after the running ones, so that they continue in the same order
        self._ended += [_Event(r.id, 0, FinishReason.ABORT) for r in self._waiting if r.id in aborted]
        self._waiting = deque(request for request in self._waiting if request.id not in aborted)
        self._continue()

    async def events(self) -> EventBatch:
        while True:
            await self._active.wait()
            progress_s = self._progress_s + self._scheduling.progress_every_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(progress_s, now_s() + ALIVE_EVERY_S)):
                    await self._has_ended.wait()
            if self._waiting:
                await asyncio.sleep(max(0.0, self._reported_s + self._figures.report_s - now_s()))
            await asyncio.sleep(self._until_step_ends_s())
            self._advance()
            self._reported_s = now_s()
            reported, self._ended = self._ended, []
            self._has_ended.clear()
            progress = self._reported_s + _ROUNDING >= self._progress_s + self._scheduling.progress_every_s
            if progress:
                reported += self._progress()
                self._progress_s = self._reported_s
            if not self._running:
                self._active.clear()
            return self._batch(reported, progress)

    def _progress(self) -> Iterator[_Event]:
        for id, row in self._running.items():
            made = min(row.tokens - 1, int(self._steps - row.began + _ROUNDING))
            if made > row.reported:
                yield _Event(id, made - row.reported, None)
                row.reported = made

    def _batch(self, events: Sequence[_Event], progress: bool) -> EventBatch:
        offsets = np.cumsum([0, *(event.tokens for event in events)])
        tokens = np.full(offsets[-1], TOKEN, np.int32)
        for end, event in zip(offsets[1:].tolist(), events, strict=True):
            if event.finish is FinishReason.STOP:
                tokens[end - 1] = STOP
        return EventBatch(
            [event.id for event in events],
            offsets,
            tokens,
            np.full(len(tokens), -1.0, np.float32),
            [self._version] * len(events),
            [event.finish for event in events],
            [False] * len(events),
            progress=progress,
        )

    def stop(self) -> None:
        """Drop all requests, as the death of a process does, and generate nothing until the next `resume`."""
        self._advance()
        self.tokens += sum(row.reported for row in self._running.values())
        for held in (self._waiting, self._running, self._ends, self._cached, self._contexts, self._ended):
            held.clear()
        self._context, self._scheduling = 0.0, Scheduling()
        self._paused, self._draining = True, None
        self._active.clear()
        self._has_ended.clear()
        self._continue()

    # -- sync sessions, see `asyncrl.param_sync.replica_session.SyncedEngine` ------------------------------------------

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        held, was_paused = len(self._running) + len(self._waiting), self._paused
        try:
            async with asyncio.timeout(deadline_s):
                if mode == "wait" and not was_paused:
                    await self._drain()
                self._advance()
                self._paused = True
                if mode == "abort":
                    await self.abort([*self._running, *(request.id for request in self._waiting)])
                self._continue()
                await asyncio.sleep(self._profile.sync.pause_s)
        except (TimeoutError, asyncio.CancelledError):  # it goes on as before
            self._advance()
            self._paused, self._draining = was_paused, None
            self._continue()
            raise
        return held

    async def _drain(self) -> None:
        """Finish what runs, and what waits where the engine does that. Later requests do not begin."""
        self._draining = frozenset(r.id for r in self._waiting) if self._drains_waiting else frozenset()
        while self._running:
            self._empty.clear()
            await self._empty.wait()
        self._draining = None

    async def resume(self, version: PolicyVersion) -> None:
        await asyncio.sleep(self._profile.sync.resume_s)
        self._at_s = now_s()
        self._version, self._paused = version, False
        self._continue()

    async def release_kv(self) -> int:
        self._contexts.clear()
        await asyncio.sleep(self._profile.sync.unload_s)
        return 0

    async def flush_kv(self) -> None:
        self._contexts.clear()
        await asyncio.sleep(self._profile.sync.unload_s)

    async def restore_kv(self) -> None:
        await asyncio.sleep(self._profile.sync.reload_s)

    async def digest(self, role: Role) -> str:
        return DIGESTS[role]

    # -- the passing of time ---------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Bring everything up to now, fill free slots, and wake up at the next end."""
        self._advance()
        limit = min(self._scheduling.max_running_requests or self._slots, self._slots)
        while not self._paused and self._waiting and len(self._running) < limit:
            if self._draining is not None and self._waiting[0].id not in self._draining:
                break
            self._begin(self._waiting.popleft())
        if self._ended or self._running:
            self._active.set()
        if self._ended:
            self._has_ended.set()
        if not self._running:
            self._empty.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._paused and self._running:
            while self._ends[0][2] not in self._running:
                heapq.heappop(self._ends)
            step = self._ends[0][0]
            at_s = max(self._at_s, self._prefilling_until_s) + self._seconds(step - self._steps)
            self._timer = asyncio.get_running_loop().call_at(at_s, self._due, step)

    def _due(self, step: float) -> None:
        """End the requests that have all their tokens at this decode step."""
        self._timer = None
        self._advance()
        while self._ends and (self._ends[0][2] not in self._running or self._ends[0][0] <= step):
            _, _, id = heapq.heappop(self._ends)
            if (row := self._running.get(id)) is not None:
                self._end(id, FinishReason.STOP if row.stops else FinishReason.LENGTH)
        self._continue()

    def _advance(self) -> None:
        """Make the decode steps that fit into the time since the last call."""
        before_s, self._at_s = self._at_s, now_s()
        if self._paused or not self._running:
            return
        self.busy_s += self._at_s - before_s
        if (seconds := self._at_s - max(before_s, self._prefilling_until_s)) > 0:
            steps = self._made(seconds)
            self._steps += steps
            self._context += steps * len(self._running)

    def _next_step(self) -> int:
        """Number of decode steps once the present one has ended."""
        return math.ceil(self._steps - _ROUNDING)

    def _until_step_ends_s(self) -> float:
        self._advance()
        if self._paused or not self._running:
            return 0.0
        return max(0.0, self._prefilling_until_s - now_s()) + self._seconds(max(0.0, self._next_step() - self._steps))

    def _seconds(self, steps: float) -> float:
        """How long ``steps`` decode steps of the running requests take; each makes their contexts longer."""
        first_s, growth_s = self._step_s()
        return steps * first_s + growth_s * steps * steps / 2

    def _made(self, seconds: float) -> float:
        """Inverse of `_seconds`."""
        first_s, growth_s = self._step_s()
        return 2 * seconds / (first_s + math.sqrt(first_s * first_s + 2 * growth_s * seconds))

    def _step_s(self) -> tuple[float, float]:
        """Seconds of the next decode step, and by how much each later one is longer."""
        rows, figures = len(self._running), self._figures
        first_s = figures.step_s + figures.row_s * rows + figures.context_token_s * self._context
        return first_s, figures.context_token_s * rows

    def _begin(self, request: Request) -> None:
        uid, index = _sample_of(request)
        start = len(request.tokens) - request.resumed - request.shared_prefix
        turn = self._profile.sample(uid, index).starts.get(start)
        if turn is None:
            raise RuntimeError(f"request {request.id}: expected a turn that begins after {start} tokens, found none")
        left = max(1, turn.sampled - request.resumed)
        tokens = min(left, request.max_new_tokens)
        began = self._next_step()
        self._running[request.id] = _Row(request, began, tokens, left <= request.max_new_tokens)
        self._begun += 1
        heapq.heappush(self._ends, (began + tokens, self._begun, request.id))
        self._context += len(request.tokens) - (began - self._steps)  # it grows from now on
        cached = self._cached.get(request.group, 0)
        self._cached[request.group] = cached + 1
        known = max(request.shared_prefix if cached else 0, self._contexts.get((uid, index), 0))
        computed = max(1, len(request.tokens) - known)
        self._prefilling_until_s = max(self._prefilling_until_s, self._at_s) + computed * self._figures.prefill_token_s

    def _end(self, id: str, finish: FinishReason) -> None:
        row = self._running.pop(id)
        made = row.tokens
        if finish is FinishReason.ABORT:
            made = max(0, min(made - 1, int(self._steps - row.began + _ROUNDING)))
        self._context -= len(row.request.tokens) + self._steps - row.began
        self.tokens += made
        group = row.request.group
        self._contexts[_sample_of(row.request)] = len(row.request.tokens) + made
        self._cached[group] -= 1
        if not self._cached[group]:
            del self._cached[group]
        self._ended.append(_Event(id, made - row.reported, finish))


class SimulatedReceiver:
    """Implements `asyncrl.param_sync.weight_receiver.WeightReceiver`."""

    def __init__(self, name: str, figures: SyncFigures) -> None:
        self._name, self._figures = name, figures

    def needs_base(self) -> bool:
        return True

    async def open(self, plan: ReceivePlan) -> Sequence[str]:
        await asyncio.sleep(self._figures.plan_s)
        return (self._name,)

    async def receive(self, deadline_s: float) -> int:
        await asyncio.sleep(self._figures.transfer_s)
        return self._figures.nbytes

    async def load(self) -> None:
        await asyncio.sleep(self._figures.load_s)

    async def verify(self) -> None:
        await asyncio.sleep(self._figures.verify_s)

    async def commit(self, version: PolicyVersion) -> None:
        await asyncio.sleep(self._figures.commit_s)

    async def abort(self) -> None: ...

    def intact(self) -> bool:
        return True

    async def close(self) -> None: ...


def _sample_of(request: Request) -> tuple[str, int]:
    """Group uid and index of the sample of a training request, whose id is ``uid/loop/index/call#attempt``."""
    uid, _, index, _ = request.id.rsplit("/", 3)
    return uid, int(index)
