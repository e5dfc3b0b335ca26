"""Base class of engines that generate in their own processes and stream tokens back.

One task per request reads the engine's stream; its tokens become the columns of `StreamingEngine.events`. Requests are
held back here, not in the engine, while it is paused or `Scheduling` leaves no room for them: the engine frees its KV
cache only when it holds no requests.

All engines share one rule for the end of a request: its first stop token, or the token that completes a stop string,
even if the string began before the request was interrupted and continued. If the engine generates beyond that point,
the request is aborted there. A request that the engine aborts right at its stop token has finished with STOP.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.lora.slots import AdapterSlots
from asyncrl.param_sync.manifest import Role
from asyncrl.rollouter.engines.admission import why_impossible
from asyncrl.rollouter.engines.base import (
    ALIVE_EVERY_S,
    EngineDied,
    EngineError,
    EventBatch,
    PauseMode,
    Request,
    Scheduling,
)
from asyncrl.rollouter.engines.events import NO_VERSION, Event, EventLog
from asyncrl.rollouter.engines.occupancy import Occupancy
from asyncrl.rollouter.engines.remote_receiver import RemoteReceiver
from asyncrl.rollouter.engines.stops import RequestEnd, StopStrings
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

log = logging.getLogger(__name__)

_ENDS_EVERY_S = 0.2  # while requests are held back for their slots: a call costs both ends a millisecond or two
_WANTED_EVERY_S = 0.03  # while none is

#: finish reasons by the engines' names for them; any other is an error
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}

#: consecutive tokens by version: (version, number of tokens)
Spans = list[tuple[str, int]]


class StreamedRequest:
    """A request that was submitted to the engine. ``version``: the one under which it started, whose KV it may share.
    ``slot``: the slot of the adapter that it finishes on, or 0. ``spans``: versions of the tokens received so far."""

    def __init__(self, request: Request, version: PolicyVersion, slot: int) -> None:
        self.request, self.version, self.slot = request, version, slot
        self.spans: Spans = []
        self.mixed_kv = False
        self.received = 0  # tokens
        self.end: RequestEnd
        self.last: Event | None = None  # held back until the engine has ended the request
        self.task: asyncio.Task[None] | None = None


R = TypeVar("R", bound=StreamedRequest)


class StreamingEngine(ABC, Generic[R]):
    """Implements `asyncrl.rollouter.engines.base.Engine`, except `weight_receiver` and `close`, over the abstract
    methods below. Paused until the first `resume`. ``adapters``: set if requests finish on the adapter they started
    with."""

    title: str  # the engine's name in messages
    request_type: type[R]

    def __init__(
        self,
        config: Config,
        device: str,
        recorder: Recorder,
        context_tokens: int,
        vocabulary: int,
        adapters: AdapterSlots | None,
    ) -> None:
        self._config, self._device, self._recorder, self._adapters = config, device, recorder, adapters
        self._slots = config.rollout.engine.slots
        self._context_tokens, self._vocabulary = context_tokens, vocabulary
        self._receiver: RemoteReceiver | None = None
        self._version: PolicyVersion | None = None
        self._running: dict[str, R] = {}
        self._scheduling = Scheduling()
        self._held: dict[str, Request] = {}  # not submitted yet (paused, or no room), in order of arrival
        self.paused = True  # or pausing; requests are held back
        self._kept_kv = False  # this pause keeps requests with their KV
        self._released = False  # the KV cache
        self._log = EventLog()
        self._progress_s = 0.0  # when it was reported last
        self._has_events, self._has_finished = asyncio.Event(), asyncio.Event()
        self._death: EngineDied | None = None
        self._occupancy = Occupancy(recorder, self._slots)
        self._warned_of_cpu = False
        if config.rollout.stop_strings or config.rollout.agent.enabled:
            _ = self._stop_strings  # load its tokenizer now: it takes a moment

    # -- to be implemented by an engine --------------------------------------------------------------------------------

    @abstractmethod
    async def _stream(self, running: R) -> None:
        """Submit the request, pass all of its tokens to `_received`, and abort it when that returns True. EngineDied
        ends the engine, any other exception only this request."""

    @abstractmethod
    async def _abort(self, running: Sequence[R]) -> None:
        """Abort these requests; their streams end."""

    @abstractmethod
    async def _stop(self, mode: PauseMode, running: Sequence[R]) -> None:
        """Stop generating, see `Engine.pause`; ``running``: the requests submitted before. May be cancelled."""

    @abstractmethod
    async def _continue(self) -> None:
        """Generate again after `_stop`, even a cancelled one."""

    @abstractmethod
    async def _set_version(self, version: PolicyVersion) -> None:
        """Tag the checkpoint's own weights with their version."""

    @abstractmethod
    async def _release_kv(self) -> None: ...

    @abstractmethod
    async def _restore_kv(self) -> None: ...

    @abstractmethod
    async def _flush_kv(self) -> None: ...

    @abstractmethod
    async def _free_bytes(self) -> int:
        """Free memory of the replica's GPUs; not called on the CPU."""

    def _why_impossible(self, request: Request) -> str | None:
        return why_impossible(request, self._context_tokens, self._vocabulary, has_tokenizer=True)

    # -- Engine --------------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> None:
        self._check_alive()
        for request in requests:
            why = self._why_impossible(request)
            if why is not None:
                self._fail(request, why)
            else:
                self._held[request.id] = request
        self._submit_held()

    async def abort(self, ids: Sequence[str]) -> None:
        self._check_alive()
        self._abort_held(ids)
        await self._abort([running for id in ids if (running := self._running.get(id)) is not None])

    async def events(self) -> EventBatch:
        """Returns ends about five times a second, sooner if no request is held back. One caller at a time."""
        await self._has_events.wait()
        self._check_alive()
        if not self._log.has_finished:
            with contextlib.suppress(TimeoutError):
                left_s = self._progress_s + self._scheduling.progress_every_s - now_s()
                await asyncio.wait_for(self._has_finished.wait(), min(max(0.0, left_s), ALIVE_EVERY_S))
        if len(self._running) + len(self._held) > (self._scheduling.max_running_requests or self._slots):
            await asyncio.sleep(_ENDS_EVERY_S)
        elif len(self._running):
            await asyncio.sleep(_WANTED_EVERY_S)  # others finish in the same step
        self._check_alive()
        progress = not self._running or now_s() - self._progress_s >= self._scheduling.progress_every_s
        if progress:
            self._progress_s = now_s()
        events = self._log.take(progress)
        self._has_finished.clear()
        if not len(self._log):
            self._has_events.clear()
        return events

    async def set_scheduling(self, scheduling: Scheduling) -> None:
        self._check_alive()
        self._scheduling = scheduling
        self._submit_held()

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        """``wait`` finishes the requests submitted before; later ones are held back. At the deadline, or if cancelled,
        the engine continues as before."""
        self._check_alive()
        was_paused, self.paused = self.paused, True
        running, waiting = list(self._running.values()), list(self._held)
        try:
            async with asyncio.timeout(deadline_s):
                if mode == "keep" and (ending := self._leaving_their_adapter()):
                    await self._abort(ending)
                    await all_ended(ending)
                await self._stop(mode, running)
        except (TimeoutError, asyncio.CancelledError) as e:
            if not was_paused:
                await self._continue()
            self.paused = was_paused
            self._submit_held()
            if isinstance(e, asyncio.CancelledError):
                raise
            raise TimeoutError(
                f"{self.title}: pause({mode!r}) did not complete within {deadline_s:g} s, {len(self._running)} "
                f"requests run; generation continues under {self._version}"
            ) from None
        self._check_alive()
        if mode == "abort":  # after the running ones, so that they continue in the same order
            self._abort_held(waiting)
        self._kept_kv = mode == "keep"
        self._occupancy.observe(0, 0)
        return len(running)

    async def resume(self, version: PolicyVersion) -> None:
        """Raises EngineError if the weights are not those of ``version`` or the KV cache is released."""
        self._check_alive()
        committed = self._receiver.committed if self._receiver is not None else None
        if self._receiver is not None and not self._receiver.intact():
            raise EngineError(f"resume({version}): a sync was interrupted during its transfer; send everything again")
        if committed not in (None, version):
            raise EngineError(f"resume({version}): the last committed weights are of version {committed}")
        if self._released:
            raise EngineError(f"resume({version}): the KV cache is released; call restore_kv first")
        if committed is None:
            await self._set_version(version)
        before = {id: self._version_of(running) for id, running in self._running.items()}
        self._version = version
        for id, running in self._running.items():
            running.mixed_kv |= self._kept_kv and self._version_of(running) != before[id]
        self._kept_kv = False
        await self._continue()
        self.paused = False
        self._submit_held()
        self._observe()

    async def release_kv(self) -> int:
        """Returns 0 on the CPU, where engines only empty the cache and keep its memory."""
        self._check_paused("release_kv")
        if self._device == "cpu":
            if not self._warned_of_cpu:
                log.warning("%s cannot free its KV cache on the CPU: param_sync.kv=unload only empties it", self.title)
            self._warned_of_cpu = True
        before = await self._free()
        await self._release_kv()
        self._released = True
        return await self._free() - before

    async def restore_kv(self) -> None:
        if self._released:
            await self._restore_kv()
            self._released = False

    async def flush_kv(self) -> None:
        self._check_paused("flush_kv")
        await self._flush_kv()
        self._kept_kv = False

    async def digest(self, role: Role) -> str:
        """Digest of the tensors received in the last session. The engine's own layout of them would give no comparable
        digest."""
        if self._receiver is None:
            raise EngineError("digest: no sync session has sent weights yet")
        return await self._receiver.digest(role)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _submit_held(self) -> None:
        """Submit the held requests for which there is room."""
        if self.paused or self._death is not None:
            return
        most, first = self._scheduling.max_running_requests, self._scheduling.validation_first
        room = math.inf if most is None else most - sum(r.request.trains for r in self._running.values())
        for request in sorted(self._held.values(), key=lambda r: first and r.trains):
            # the engine prefers training, so with validation_first it gets no more training than it has free slots
            if not request.trains or (room > 0 and not (first and len(self._running) >= self._slots)):
                room -= request.trains
                self._start(self._held.pop(request.id))

    def _start(self, request: Request) -> None:
        assert self._version is not None
        adapted = self._receiver is not None and self._receiver.adapter is not None
        slot = self._adapters.begin(request.id) if self._adapters is not None and adapted else 0
        running = self._running[request.id] = self.request_type(request, self._version, slot)
        running.end = RequestEnd(request, lambda: self._stop_strings)
        running.task = asyncio.create_task(self._run(running))
        self._observe()

    async def _run(self, running: R) -> None:
        try:
            await self._stream(running)
        except EngineDied as death:
            self._die(death)
        except Exception as e:
            if self._running.get(running.request.id) is not running:  # its end was emitted
                log.warning("%s: %s failed after the request's end: %s", running.request.id, self.title, e)
                return
            if running.last is not None:  # the request is over, only aborting it in the engine failed
                self._emit_counted(running.last)
            else:
                self._fail(running.request, f"{self.title}: {e}")
            self._end(running)

    def _received(
        self,
        running: R,
        tokens: list[int],
        logprobs: list[float],
        finish: FinishReason | None,
        spans: Spans,
        error: str = "",
    ) -> bool:
        """Record new tokens, the end of the request, or both. ``spans``: at the end, the versions of all its tokens as
        the engine reports them, which must equal ours. Returns True if the request is over but the engine still
        generates: it must be aborted there, and its last event is held back until then."""
        running.received += len(tokens)
        version = self._version_of(running)
        if tokens:
            running.spans = _extended(running.spans, str(version), len(tokens))
        event = Event(running.request.id, tokens, logprobs, version, finish, running.mixed_kv, error)
        looks = running.last is None and finish is not FinishReason.ERROR
        if looks and (own := running.end.within(tokens)) is not None:
            running.last = event._replace(tokens=tokens[:own], logprobs=logprobs[:own], finish=FinishReason.STOP)
        if finish is not None:
            theirs = _comparable([span for span in spans if span[1]], running)
            if theirs and theirs != running.spans:
                who = running.request.id
                self._die(EngineDied(f"{who}: recorded versions {running.spans}, {self.title} reports {theirs}"))
            event = running.last or event
        elif running.last is not None:
            return True
        self._emit_counted(event)
        if finish is not None:
            self._end(running)
        return False

    def _leaving_their_adapter(self) -> list[R]:
        """Requests that may not keep an older adapter any longer and continue under the newest: validation, since the
        staleness bound, of which the number of slots follows, limits only how long training runs."""
        if self._adapters is None:
            return []
        return [r for r in self._running.values() if not r.request.trains and r.slot != self._adapters.newest]

    def _version_of(self, running: R) -> PolicyVersion:
        """Version under which the request's next tokens are sampled."""
        assert self._version is not None
        return running.version if running.slot else self._version

    def _end(self, running: R) -> None:
        id = running.request.id
        if self._running.get(id) is running:  # and not a later request with the same id
            del self._running[id]
            if running.slot and self._adapters is not None:
                self._adapters.end(id)
        self._submit_held()
        self._observe()

    def _abort_held(self, ids: Iterable[str]) -> None:
        for id in ids:
            if self._held.pop(id, None) is not None:
                self._emit(Event(id, [], [], self._version or NO_VERSION, FinishReason.ABORT))

    def _fail(self, request: Request, why: str) -> None:
        self._emit(Event(request.id, [], [], self._version or NO_VERSION, FinishReason.ERROR, error=why))

    def _emit_counted(self, event: Event) -> None:
        self._recorder.count("rollout/tokens", len(event.tokens))
        if event.tokens or event.finish is not None:
            self._emit(event)

    def _emit(self, event: Event) -> None:
        self._log.add(event)
        self._has_events.set()
        if event.finish is not None:
            self._has_finished.set()

    def _observe(self) -> None:
        active = len(self._running)
        self._occupancy.observe(min(active, self._slots), active)

    @functools.cached_property
    def _stop_strings(self) -> StopStrings:
        return StopStrings(PromptTokenizer.of(self._config).hf)

    # -- states --------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    def _check_paused(self, call: str) -> None:
        self._check_alive()
        if not self.paused:
            raise EngineError(f"{call} while the engine is running; pause it first")

    def _die(self, death: EngineDied) -> None:
        self._death = self._death or death
        self._occupancy.observe(0, 0)
        self._has_events.set()
        self._has_finished.set()

    def _close_requests(self) -> None:
        """Pending and later calls raise EngineDied."""
        self._die(EngineDied("the engine is closed"))
        for running in list(self._running.values()):
            if running.task is not None:
                running.task.cancel()

    async def _free(self) -> int:
        return 0 if self._device == "cpu" else await self._free_bytes()


async def all_ended(running: Iterable[StreamedRequest]) -> None:
    """Wait until the engine has ended these requests."""
    if tasks := [r.task for r in running if r.task is not None]:
        await asyncio.wait(tasks)


def _comparable(spans: Spans, running: StreamedRequest) -> Spans:
    """The engine's spans, comparable with ours. If a request finishes on its adapter, the engine's versions only show
    when tokens were sampled: all of them belong to the first version, with which the request started."""
    if not running.slot or not spans:
        return spans
    return [(spans[0][0], sum(count for _, count in spans))]


def _extended(spans: Spans, version: str, count: int) -> Spans:
    if spans and spans[-1][0] == version:
        return [*spans[:-1], (version, spans[-1][1] + count)]
    return [*spans, (version, count)]
