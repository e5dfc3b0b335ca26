"""What engines have in common that generate in processes of their own: requests that are followed, told of, held back.

Every request is a task that follows the engine's stream of it; what they hear of becomes the columns of `events`.
Requests wait here and not there for what must not be theirs yet: while the engine is paused, as it frees its KV cache
only while it works on none, and for room where it is to generate for fewer than it could.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from asyncrl.config.schema import Config
from asyncrl.param_sync.adapter_slots import AdapterSlots
from asyncrl.param_sync.intake import Intake
from asyncrl.param_sync.manifest import AdapterSpec, Role
from asyncrl.rollouter.engine import EngineDied, EngineError, EngineStats, EventBatch, Request
from asyncrl.rollouter.engines.admission import why_impossible
from asyncrl.rollouter.engines.events import Event, EventLog
from asyncrl.rollouter.engines.occupancy import Occupancy
from asyncrl.sample import FinishReason, PolicyVersion
from asyncrl.telemetry.recorder import Recorder

_EVENTS_EVERY_S = 0.2  # while tokens flow: each call costs both its ends a millisecond or two
_ENDS_EVERY_S = 0.03  # while requests end and none waits here to follow them
_NONE = PolicyVersion(0, 0)  # of events without tokens before any version

#: as engines name finish reasons; any other is an error
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}

#: versions as the engine names them, each with how many tokens one behind the other were sampled under it
Spans = list[tuple[str, int]]


class FollowedRequest:
    """A request in the engine's hands. ``version`` is that under which it began: its KV may be shared with others of
    that version; ``slot`` that of the adapter on which it is to finish, or 0; ``spans`` what we have told of it."""

    def __init__(self, request: Request, version: PolicyVersion, slot: int) -> None:
        self.request, self.version, self.slot = request, version, slot
        self.spans: Spans = []
        self.mixed_kv = False
        self.told = 0
        self.task: asyncio.Task[None] | None = None


class RemoteIntake(Intake, Protocol):
    """One that gives the weights on to the engine's own processes; ``committed`` is the version that they are of, and
    ``adapter`` what requests run with."""

    committed: PolicyVersion | None
    adapter: AdapterSpec | None

    async def digest(self, role: Role) -> str: ...


R = TypeVar("R", bound=FollowedRequest)


class FollowingEngine(ABC, Generic[R]):
    """The shared part of `asyncrl.rollouter.engine.Engine`. Paused until the first `resume`. ``adapters``: where
    requests finish on the adapters they began with."""

    #: as messages name the engine
    title: str

    def __init__(
        self,
        config: Config,
        recorder: Recorder,
        context_tokens: int,
        vocabulary: int,
        kv_bytes: int,
        adapters: AdapterSlots | None,
    ) -> None:
        self._config, self._recorder, self._adapters = config, recorder, adapters
        self._slots = config.rollout.engine.slots
        self._context_tokens, self._vocabulary, self._kv_bytes = context_tokens, vocabulary, kv_bytes
        self._intake: RemoteIntake | None = None
        self._version: PolicyVersion | None = None
        self._running: dict[str, R] = {}
        self._width: int | None = None
        self._held: dict[str, Request] = {}  # while paused, or for want of room; in order
        self.paused = True  # or about to be: requests are held back
        self._kept_kv = False  # requests stay over the pause with their KV
        self._released = False
        self._generated = 0
        self._log = EventLog()
        self._news, self._ends = asyncio.Event(), asyncio.Event()
        self._death: EngineDied | None = None
        self._occupancy = Occupancy(recorder, self._slots)
        self._told_of_cpu = False

    # -- what each engine does in its own way --------------------------------------------------------------------------

    def _why_impossible(self, request: Request) -> str | None:
        return why_impossible(request, self._context_tokens, self._vocabulary, has_tokenizer=True)

    @abstractmethod
    def _taken(self, request: Request, version: PolicyVersion, slot: int) -> R: ...

    @abstractmethod
    async def _follow(self, running: R) -> None:
        """Tell of a request until it ends."""

    @abstractmethod
    async def _name_version(self, version: PolicyVersion) -> None:
        """Tell the engine the version of the weights that it loaded with the checkpoint."""

    @abstractmethod
    async def _generate_on(self) -> None:
        """End a pause in the engine."""

    def _version_of(self, running: R) -> PolicyVersion:
        """Under which the request's next tokens are sampled."""
        assert self._version is not None
        return running.version if running.slot else self._version

    def _stamped(self, running: R, spans: Spans) -> Spans:
        """What the spans that the engine tells of an ended request are to be compared by. Where requests finish on
        their adapters, they say no more than when a token was sampled: the first one is the version that the request
        began with."""
        if not running.slot or not spans:
            return spans
        return [(spans[0][0], sum(count for _, count in spans))]

    # -- the seam ------------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> None:
        self._alive()
        for request in requests:
            why = self._why_impossible(request)
            if why is not None:
                self._fail(request, why)
            else:
                self._held[request.id] = request
        self._release_held()

    async def events(self) -> EventBatch:
        """Wakes about five times a second while tokens flow, and sooner when requests have ended and none is left that
        waits for a slot. One caller at a time."""
        await self._news.wait()
        self._alive()
        if len(self._running) + len(self._held) > (self._width or self._slots):
            await asyncio.sleep(_EVENTS_EVERY_S)
        else:
            if not self._log.has_finished:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ends.wait(), _EVENTS_EVERY_S)
            if len(self._running):
                await asyncio.sleep(_ENDS_EVERY_S)  # others end in the same step
        self._alive()
        self._news.clear()
        self._ends.clear()
        return self._log.take()

    async def set_width(self, width: int | None) -> None:
        self._alive()
        self._width = width
        self._release_held()

    async def resume(self, version: PolicyVersion) -> None:
        """Raises EngineError when the weights are not those of ``version``, or the KV cache is not there."""
        self._alive()
        committed = self._intake.committed if self._intake is not None else None
        if self._intake is not None and not self._intake.intact():
            raise EngineError(f"resume({version}): a sync was broken off amid its transfer; send all again first")
        if committed not in (None, version):
            raise EngineError(f"resume({version}): the weights committed last are those of version {committed}")
        if self._released:
            raise EngineError(f"resume({version}): the KV cache is released, restore_kv first")
        if committed is None:  # as the checkpoint has them
            await self._name_version(version)
        before = {id: self._version_of(running) for id, running in self._running.items()}
        self._version = version
        for id, running in self._running.items():
            running.mixed_kv |= self._kept_kv and self._version_of(running) != before[id]
        self._kept_kv = False
        await self._generate_on()
        self.paused = False
        self._release_held()
        self._observe()

    async def digest(self, role: Role) -> str:
        """Of the tensors that came in the session: how the engine keeps them cannot be compared."""
        if self._intake is None:
            raise EngineError("digest: no sync session has brought weights yet")
        return await self._intake.digest(role)

    async def stats(self) -> EngineStats:
        running = [r.request for r in self._running.values()]
        everyone = [*running, *self._held.values()]
        told = sum(r.told for r in self._running.values())
        return EngineStats(
            running=min(len(running), self._slots),
            waiting=max(0, len(running) - self._slots) + len(self._held),
            slots=self._slots,
            outstanding_tokens=sum(r.max_new_tokens for r in everyone) - told,
            kv_bytes=0 if self._released else self._kv_bytes,
            generated_tokens=self._generated,
            version=self._version,
        )

    # -- requests ------------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        assert self._version is not None
        adapted = self._intake is not None and self._intake.adapter is not None
        slot = self._adapters.begin(request.id) if self._adapters is not None and adapted else 0
        running = self._running[request.id] = self._taken(request, self._version, slot)
        running.task = asyncio.create_task(self._follow(running))
        self._observe()

    def _known(self, ids: Iterable[str]) -> list[R]:
        return [r for id in ids if (r := self._running.get(id)) is not None]

    def _abort_held(self, ids: Iterable[str]) -> None:
        for id in ids:
            if self._held.pop(id, None) is not None:
                self._tell(Event(id, [], [], self._version or _NONE, FinishReason.ABORT))

    def _release_held(self) -> None:
        """Begin those that wait for nothing any more."""
        if self.paused or self._death is not None:
            return
        room = math.inf if self._width is None else self._width - sum(r.request.trains for r in self._running.values())
        for request in list(self._held.values()):
            if not request.trains or room > 0:
                room -= request.trains
                self._begin(self._held.pop(request.id))

    def _heard(
        self,
        running: R,
        tokens: list[int],
        logprobs: list[float],
        finish: FinishReason | None,
        spans: Spans,
        error: str = "",
    ) -> None:
        """Tell of new tokens, of an end, or of both. ``spans``: what the engine says at the end of all the request's
        tokens. It knows under which version each was sampled; we must have told the same."""
        running.told += len(tokens)
        self._generated += len(tokens)
        self._recorder.count("rollout/tokens", len(tokens))
        version = self._version_of(running)
        if tokens:
            running.spans = _extended(running.spans, str(version), len(tokens))
        if finish is not None:
            self._end(running)
            theirs = self._stamped(running, [span for span in spans if span[1]])
            if theirs and theirs != running.spans:
                who = running.request.id
                self._die(EngineDied(f"{who}: told versions {running.spans}, {self.title} says {theirs}"))
        if tokens or finish is not None:
            self._tell(Event(running.request.id, tokens, logprobs, version, finish, running.mixed_kv, error))

    def _end(self, running: R) -> None:
        id = running.request.id
        if self._running.get(id) is running:  # not another that was given its id since
            del self._running[id]
            if running.slot and self._adapters is not None:
                self._adapters.end(id)
        self._release_held()
        self._observe()

    def _fail(self, request: Request, why: str) -> None:
        self._tell(Event(request.id, [], [], self._version or _NONE, FinishReason.ERROR, error=why))

    def _tell(self, event: Event) -> None:
        self._log.tell(event)
        self._news.set()
        if event.finish is not None:
            self._ends.set()

    def _observe(self) -> None:
        active = len(self._running)
        self._occupancy.observe(min(active, self._slots), active)

    # -- states --------------------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self._death is not None:
            raise self._death

    def _die(self, death: EngineDied) -> None:
        self._death = self._death or death
        self._occupancy.observe(0, 0)
        self._news.set()
        self._ends.set()

    def _close_requests(self) -> None:
        """Every call that waits, and every later one, raises EngineError."""
        self._die(EngineDied("the engine is closed"))
        for running in list(self._running.values()):
            if running.task is not None:
                running.task.cancel()

    def _need_pause(self, what: str) -> None:
        self._alive()
        if not self.paused:
            raise EngineError(f"{what} while the engine is running: pause it first")

    def _not_reached(self, mode: str, deadline_s: float, was_paused: bool) -> TimeoutError:
        """The engine goes on as it did before a pause that was not reached; the error to say so with."""
        self.paused = was_paused
        self._release_held()
        return TimeoutError(
            f"{self.title}: pause({mode!r}) was not reached within {deadline_s:g} s, {len(self._running)} requests "
            f"run; it goes on under version {self._version}"
        )


def _extended(spans: Spans, version: str, count: int) -> Spans:
    if spans and spans[-1][0] == version:
        return [*spans[:-1], (version, spans[-1][1] + count)]
    return [*spans, (version, count)]
