"""SGLang behind the engine seam: a server process below the replica's, spoken to over HTTP.

Every request is a task that follows the server's stream of it; what they hear of becomes the columns of `events`. While
the engine is paused, requests wait here and not in the server: it frees its KV cache only while it works on none.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from collections.abc import Collection, Sequence
from typing import Any

import torch

from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import tensor_shapes
from asyncrl.models.config import DecoderConfig
from asyncrl.param_sync.intake import Intake
from asyncrl.param_sync.manifest import Role
from asyncrl.param_sync.transports.choose import make_reader
from asyncrl.rollouter.engine import (
    Capabilities,
    EngineDied,
    EngineError,
    EngineStats,
    EventBatch,
    PauseMode,
    Request,
    pause_kv,
)
from asyncrl.rollouter.engines.admission import why_impossible
from asyncrl.rollouter.engines.events import Event, EventLog
from asyncrl.rollouter.engines.occupancy import Occupancy
from asyncrl.rollouter.engines.sglang.arguments import (
    SESSIONS_SINCE,
    check_version,
    context_tokens,
    kv_token_bytes,
    resolve_device,
    sampling_parameters,
    server_arguments,
    server_environment,
)
from asyncrl.rollouter.engines.sglang.intake import ServerIntake
from asyncrl.rollouter.engines.sglang.metrics import count_speculation
from asyncrl.rollouter.engines.sglang.server import Server
from asyncrl.sample import FinishReason, PolicyVersion
from asyncrl.telemetry.recorder import Recorder

_EVENTS_EVERY_S = 0.1  # while tokens flow and nothing ends
_ENDS_EVERY_S = 0.03  # while requests end
_ABORT_AGAIN_S = 0.5  # SGLang does not hear of an abort that overtakes its request
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
#: tokens per event of a stream: an event costs each side a tenth of a millisecond
_STREAM_INTERVAL = 16


class _Running:
    """A request in SGLang's hands. ``rid`` is its name there: SGLang aborts all whose names begin with the one given,
    so ours will not do."""

    def __init__(self, request: Request, version: PolicyVersion) -> None:
        self.request = request
        self.rid = uuid.uuid4().hex
        self.spans: list[tuple[str, int]] = []  # version and how many tokens we have told under it, as SGLang tells
        self.version = version  # under which it began: its KV may be shared with others of that version
        self.mixed_kv = False
        self.told = 0
        self.task: asyncio.Task[None] | None = None


class SGLangEngine:
    """Implements `asyncrl.rollouter.engine.Engine`; made by `start`. Paused until the first `resume`."""

    def __init__(self, server: Server, config: Config, device: str, recorder: Recorder, kv_bytes: int) -> None:
        self._server, self._client = server, server.client
        self._config, self._device, self._recorder = config, device, recorder
        self._slots = config.rollout.engine.slots
        self._context_tokens = context_tokens(config)
        self._vocabulary = DecoderConfig.load(config.model.path).vocab_size
        self._kv_bytes = kv_bytes
        self._drafts_greedily = device == "cpu" and config.mtp.enable_rollout
        # A stream's event has tokens of one version if each step is told at once; only kept requests see two.
        self._stream_interval = 1 if config.param_sync.pause == "keep" else _STREAM_INTERVAL
        self._intake: ServerIntake | None = None
        self._version: PolicyVersion | None = None
        self._running: dict[str, _Running] = {}
        self._held: dict[str, Request] = {}  # while paused
        self.paused = True  # or about to be: requests are held back
        self._kept_kv = False  # requests stay over the pause with their KV
        self._released = False
        self._generated = 0
        self._log = EventLog()
        self._news, self._ends = asyncio.Event(), asyncio.Event()
        self._death: EngineDied | None = None
        self._occupancy = Occupancy(recorder, self._slots)
        self._told_of_cpu = False
        server.ended.add_done_callback(lambda _: self._die(EngineDied(server.account())))

    @classmethod
    async def start(cls, config: Config, *, recorder: Recorder) -> SGLangEngine:
        """Starts the server, which loads the checkpoint: this takes a minute or two. Raises EngineError for options
        that do not fit."""
        check_version()
        device = resolve_device(config.rollout.engine.device)
        arguments = server_arguments(config, device)
        server = await Server.start(arguments, server_environment(config, device))
        said = await server.client.get("/server_info")
        kv_bytes = int(said.get("max_total_num_tokens") or 0) * kv_token_bytes(config)
        return cls(server, config, device, recorder, kv_bytes)

    # -- the seam ------------------------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="sglang",
            pause_kv=pause_kv("sglang"),
            receiver="delegated",
            staging=frozenset({"bucket"}),
            deterministic=False,
            speculation=self._config.mtp.enable_rollout,
            max_context_tokens=self._context_tokens,
            slots=self._slots,
        )

    async def submit(self, requests: Sequence[Request]) -> None:
        self._alive()
        for request in requests:
            why = why_impossible(request, self._context_tokens, self._vocabulary, has_tokenizer=True)
            if self._drafts_greedily and request.sampling.temperature > 0:
                why = "SGLang's speculation on the CPU takes the likeliest token whatever the temperature; expected 0"
            if why is not None:
                self._tell(Event(request.id, [], [], self._version or _NONE, FinishReason.ERROR, error=why))
            elif self.paused:
                self._held[request.id] = request
            else:
                self._begin(request)

    async def events(self) -> EventBatch:
        """Wakes soon after a request ended, or about ten times a second while tokens flow. One caller at a time."""
        await self._news.wait()
        self._alive()
        if not self._log.has_finished:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), _EVENTS_EVERY_S)
        if len(self._running):
            await asyncio.sleep(_ENDS_EVERY_S)  # others end in the same step
        self._alive()
        self._news.clear()
        self._ends.clear()
        return self._log.take()

    async def abort(self, ids: Sequence[str]) -> None:
        """Returns when they have ended."""
        self._alive()
        for id in ids:
            if self._held.pop(id, None) is not None:
                self._tell(Event(id, [], [], self._version or _NONE, FinishReason.ABORT))
        await self._end_all([r for id in ids if (r := self._running.get(id)) is not None])

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        """``wait`` lets everything finish that was submitted before; what is submitted later is held back. At the
        deadline the engine goes on as it did before."""
        self._alive()
        if mode == "keep" and self._stream_interval > 1:
            raise EngineError("pause('keep'): SGLang was started for another param_sync.pause and tells no spans of it")
        was_paused, self.paused = self.paused, True
        if mode == "abort":
            for id in list(self._held):
                await self.abort([id])
        running = list(self._running.values())
        try:
            async with asyncio.timeout(deadline_s):
                if mode == "abort":
                    await self._end_all(running)
                elif mode == "wait" and running:
                    await asyncio.wait([r.task for r in running if r.task is not None])
                # "retract" stops as "in_place" does where nothing runs; what runs keeps its KV until `flush_kv`
                await self._client.post("/pause_generation", mode="in_place" if mode == "keep" else "retract")
        except TimeoutError:
            await self._client.post("/continue_generation", torch_empty_cache=False)
            self.paused = was_paused
            self._release_held()
            raise TimeoutError(
                f"SGLang: pause({mode!r}) was not reached within {deadline_s:g} s, {len(self._running)} requests run; "
                f"it goes on under version {self._version}"
            ) from None
        self._alive()
        self._kept_kv = mode == "keep"
        self._occupancy.observe(0, 0)
        return len(running)

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
            await self._client.post("/update_weight_version", new_version=str(version), abort_all_requests=False)
        for running in self._running.values():
            running.mixed_kv |= self._kept_kv and self._version != version
        self._version, self._kept_kv = version, False
        await self._client.post("/continue_generation", torch_empty_cache=False)
        self.paused = False
        self._release_held()
        self._observe()

    async def release_kv(self) -> int:
        """On the CPU SGLang keeps the memory: its cache is emptied, and 0 returned."""
        self._need_pause("release_kv")
        if self._running:  # SGLang's scheduler would end itself
            raise EngineError(f"release_kv: {len(self._running)} requests stay over this pause, with KV of theirs")
        if self._device == "cpu" and not self._told_of_cpu:
            print(
                f"{self._recorder.actor}: SGLang on the CPU cannot free its KV cache: param_sync.kv unload empties it "
                "and frees no memory",
                file=sys.stderr,
                flush=True,
            )
            self._told_of_cpu = True
        before = self._free_bytes()
        await self._client.post("/release_memory_occupation", tags=["kv_cache"])
        self._released = True
        return self._free_bytes() - before

    async def restore_kv(self) -> None:
        if self._released:
            await self._client.post("/resume_memory_occupation", tags=["kv_cache"])
            self._released = False

    async def flush_kv(self) -> None:
        self._need_pause("flush_kv")
        if self._running:
            await self._client.post("/pause_generation", mode="retract")  # they give their KV up and queue again
        await self._client.post("/flush_cache")
        self._kept_kv = False

    def intake(self, name: str, transport: str) -> Intake:
        engine = self._config.rollout.engine
        self._intake = ServerIntake(
            self._client,
            name,
            make_reader(transport, name),
            shapes=tensor_shapes(self._config.model.path),
            dtype=DecoderConfig.load(self._config.model.path).engine_dtype(engine.dtype),
            device=self._device,
            workers=engine.tensor_parallel_size,
            draft=self._config.mtp.enable_rollout,
            sessions=check_version() >= SESSIONS_SINCE,
        )
        return self._intake

    async def digest(self, role: Role) -> str:
        """Of the tensors that were given to the server."""
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

    async def close(self) -> None:
        """End the server; every call that waits, and every later one, raises EngineError."""
        self._die(EngineDied("the engine is closed"))
        for running in list(self._running.values()):
            if running.task is not None:
                running.task.cancel()
        await self._server.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        assert self._version is not None
        running = _Running(request, self._version)
        self._running[request.id] = running
        running.task = asyncio.create_task(self._follow(running))
        self._observe()

    def _release_held(self) -> None:
        if self.paused:
            return
        held, self._held = self._held, {}
        for request in held.values():
            self._begin(request)

    async def _follow(self, running: _Running) -> None:
        """Tell of a request until it ends."""
        request = running.request
        try:
            events = self._client.generate(
                rid=running.rid,
                input_ids=request.tokens.tolist(),
                sampling_params=sampling_parameters(request, self._stream_interval),
                return_logprob=True,
                priority=request.priority,
                # what an older version computed of the same prompt must not be taken for this one's
                extra_key=str(running.version),
            )
            async for event in events:
                self._take(running, event)
            if request.id in self._running:
                raise EngineError("its stream ended before the request did")
        except EngineDied as death:
            self._die(death)
        except Exception as e:
            self._end(running)
            self._tell(Event(request.id, [], [], self._version or _NONE, FinishReason.ERROR, error=f"SGLang: {e}"))

    async def _end_all(self, running: Collection[_Running]) -> None:
        """Abort them, and return when all have ended."""
        tasks = {r.task: r.rid for r in running if r.task is not None}
        while waiting := [task for task in tasks if not task.done()]:
            await asyncio.gather(*(self._client.post("/abort_request", rid=tasks[task]) for task in waiting))
            await asyncio.wait(waiting, timeout=_ABORT_AGAIN_S)
            self._alive()

    def _take(self, running: _Running, event: dict[str, Any]) -> None:
        meta = event["meta_info"]
        # by the count: an abort of a waiting request repeats its last token
        new = meta["completion_tokens"] - running.told
        tokens = event["output_ids"][-new:] if new > 0 else []
        logprobs = [entry[0] for entry in meta["output_token_logprobs"][-new:]] if new > 0 else []
        reason = meta["finish_reason"] or {}
        finish = _FINISH.get(reason["type"], FinishReason.ERROR) if reason else None
        error = ""
        if finish is FinishReason.ERROR or reason.get("status_code"):
            finish, error = FinishReason.ERROR, f"SGLang ended the request: {reason.get('message', reason)}"
        if len(tokens) != new or len(logprobs) != new:
            message = f"{new} new tokens, {len(tokens)} ids and {len(logprobs)} logprobs"
            self._die(EngineDied(f"{running.request.id}: SGLang's stream is not whole: {message}"))
            return
        running.told += new
        self._generated += new
        self._recorder.count("rollout/tokens", new)
        version = self._version
        assert version is not None
        if tokens:
            running.spans = _extended(running.spans, str(version), new)
        if finish is not None:
            self._end(running)
            self._check_versions(running, meta)
            count_speculation(self._recorder, meta)
        if tokens or finish is not None:
            self._tell(Event(running.request.id, tokens, logprobs, version, finish, running.mixed_kv, error))

    def _check_versions(self, running: _Running, meta: dict[str, Any]) -> None:
        """SGLang's scheduler knows under which version each token was sampled; we must have told the same."""
        theirs = [(span["version"], span["end"] - span["start"]) for span in meta.get("weight_versions") or ()]
        if (theirs := [t for t in theirs if t[1]]) and theirs != running.spans:
            self._die(EngineDied(f"{running.request.id}: told versions {running.spans}, SGLang says {theirs}"))

    def _end(self, running: _Running) -> None:
        self._running.pop(running.request.id, None)
        self._observe()

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

    def _need_pause(self, what: str) -> None:
        self._alive()
        if not self.paused:
            raise EngineError(f"{what} while the engine is running: pause it first")

    def _free_bytes(self) -> int:
        """Of the GPUs that this replica sees."""
        if self._device == "cpu":
            return 0
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))


_NONE = PolicyVersion(0, 0)  # of events without tokens before any version


def _extended(spans: list[tuple[str, int]], version: str, count: int) -> list[tuple[str, int]]:
    if spans and spans[-1][0] == version:
        return [*spans[:-1], (version, spans[-1][1] + count)]
    return [*spans, (version, count)]
