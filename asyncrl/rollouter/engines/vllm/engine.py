"""vLLM behind the engine seam: an AsyncLLM in the replica's process, its core and workers in processes of their own.

Every request is a task that follows vLLM's stream of it; what they hear of becomes the columns of `events`. While the
engine is paused, requests wait here and not in vLLM: it frees its KV cache only while it holds none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence

from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from asyncrl.config.schema import Config
from asyncrl.param_sync.adapter_slots import AdapterSlots
from asyncrl.param_sync.intake import Intake
from asyncrl.param_sync.manifest import Role
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
from asyncrl.rollouter.engines.vllm.arguments import (
    adapted_modules,
    adapter_slots,
    check_version,
    engine_arguments,
    prepare_environment,
    resolve_device,
    sampling_parameters,
)
from asyncrl.rollouter.engines.vllm.intake import THE_SLOT, WorkerIntake
from asyncrl.rollouter.engines.vllm.metrics import stat_logger
from asyncrl.sample import FinishReason, PolicyVersion
from asyncrl.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

_EVENTS_EVERY_S = 0.1  # while tokens flow and nothing ends
_ENDS_EVERY_S = 0.03  # while requests end
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class _Running:
    """A request in vLLM's hands."""

    def __init__(self, request: Request, version: PolicyVersion) -> None:
        self.request = request
        self.spans: list[tuple[str, int]] = []  # version and how many tokens we have told under it, as vLLM tells
        self.version = version
        self.slot = 0  # of its adapter, where it is to finish on that
        self.mixed_kv = False
        self.told = 0
        self.added = asyncio.Event()  # whether vLLM's core has it: only then do pause and abort see it there
        self.task: asyncio.Task[None] | None = None


class VLLMEngine:
    """Implements `asyncrl.rollouter.engine.Engine`; made by `start`. Paused until the first `resume`."""

    def __init__(self, llm: AsyncLLM, config: Config, device: str, recorder: Recorder) -> None:
        self._llm, self._config, self._device, self._recorder = llm, config, device, recorder
        self._slots = config.rollout.engine.slots
        self._context_tokens = llm.model_config.max_model_len
        self._vocabulary = llm.model_config.get_vocab_size()
        self._intake: WorkerIntake | None = None
        # where requests finish on the adapters they began with; without, they move with the replica
        self._adapters = AdapterSlots(slots) if (slots := adapter_slots(config)) > 1 else None
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

    @classmethod
    async def start(cls, config: Config, *, recorder: Recorder) -> VLLMEngine:
        """Starts vLLM's processes and loads the checkpoint: this takes a minute, and blocks the event loop, since the
        workers live as long as the thread that started them. Raises EngineError for options that do not fit."""
        check_version()
        device = resolve_device(config.rollout.engine.device)
        prepare_environment(device, config.rollout.engine.threads)
        arguments = engine_arguments(config, device)
        try:
            llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[stat_logger(recorder)])
        except (ValueError, RuntimeError, ImportError) as e:
            raise EngineError(f"vLLM did not start with {config.model.path}: {e}") from e
        return cls(llm, config, device, recorder)

    # -- the seam ------------------------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="vllm",
            pause_kv=pause_kv("vllm"),
            receiver="local",
            staging=frozenset({"bucket"}),
            deterministic=False,
            speculation=self._config.mtp.enable_rollout,
            max_context_tokens=self._context_tokens,
            slots=self._slots,
        )

    async def submit(self, requests: Sequence[Request]) -> None:
        """Returns when vLLM has them, or they are held back."""
        self._alive()
        for request in requests:
            why = why_impossible(request, self._context_tokens, self._vocabulary, has_tokenizer=True)
            if why is not None:
                self._tell(Event(request.id, [], [], self._version or _NONE, FinishReason.ERROR, error=why))
            elif self.paused:
                self._held[request.id] = request
            else:
                self._begin(request)
        await self._added(r for request in requests if (r := self._running.get(request.id)) is not None)

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
        self._alive()
        for id in ids:
            if self._held.pop(id, None) is not None:
                self._tell(Event(id, [], [], self._version or _NONE, FinishReason.ABORT))
        running = [r for id in ids if (r := self._running.get(id)) is not None]
        await self._added(running)
        await self._llm.abort([r.request.id for r in running])

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        """``wait`` lets everything finish that was submitted before; what is submitted later is held back. At the
        deadline the engine goes on as it did before."""
        self._alive()
        was_paused, self.paused = self.paused, True
        if mode == "abort":
            for id in list(self._held):
                await self.abort([id])
        running = list(self._running.values())
        try:
            async with asyncio.timeout(deadline_s):
                await self._added(running)
                await self._llm.pause_generation(mode=mode, clear_cache=False)
                if mode != "keep" and running:
                    await asyncio.wait([r.task for r in running if r.task is not None])
        except TimeoutError:
            await self._llm.resume_generation()
            self.paused = was_paused
            self._release_held()
            raise TimeoutError(
                f"vLLM: pause({mode!r}) was not reached within {deadline_s:g} s, {len(self._running)} requests run; it "
                f"goes on under version {self._version}"
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
            await self._llm.update_weight_version(str(version))
        for running in self._running.values():
            running.mixed_kv |= self._kept_kv and self._version != version and self._adapters is None
        self._version, self._kept_kv = version, False
        await self._llm.resume_generation()
        self.paused = False
        self._release_held()
        self._observe()

    async def release_kv(self) -> int:
        """On the CPU vLLM keeps the memory: its cache is emptied, and 0 returned."""
        self._need_pause("release_kv")
        if self._device == "cpu":
            if not self._told_of_cpu:
                log.warning("vLLM on the CPU cannot free its KV cache: param_sync.kv unload empties it, no more")
            self._told_of_cpu = True
            await self.flush_kv()
            return 0
        before = await self._free_bytes()
        await self._llm.release_kv_cache_memory()
        self._released = True
        return await self._free_bytes() - before

    async def restore_kv(self) -> None:
        if self._released:
            await self._llm.wake_up(["kv_cache"])
            self._released = False

    async def flush_kv(self) -> None:
        self._need_pause("flush_kv")
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not empty its prefix cache: requests hold blocks of it")
        self._kept_kv = False

    def intake(self, name: str, transport: str) -> Intake:
        self._intake = WorkerIntake(self._llm, name, transport, adapted_modules(self._config), self._adapters)
        return self._intake

    async def digest(self, role: Role) -> str:
        """Of the tensors that the workers took in the session: their kernels' own layout cannot be compared."""
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
            kv_bytes=0 if self._released else int(self._llm.vllm_config.cache_config.kv_cache_memory_bytes or 0),
            generated_tokens=self._generated,
            version=self._version,
        )

    async def close(self) -> None:
        """End vLLM's processes; every call that waits, and every later one, raises EngineError."""
        self._die(EngineDied("the engine is closed"))
        for running in list(self._running.values()):
            if running.task is not None:
                running.task.cancel()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would log the end of its engine as an error
        await asyncio.to_thread(self._llm.shutdown)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        assert self._version is not None
        running = _Running(request, self._version)
        if self._adapters is not None:
            running.slot = self._adapters.begin(request.id)
        self._running[request.id] = running
        running.task = asyncio.create_task(self._follow(running))
        self._observe()

    def _release_held(self) -> None:
        held, self._held = self._held, {}
        if self.paused:
            self._held = held
            return
        for request in held.values():
            self._begin(request)

    async def _follow(self, running: _Running) -> None:
        """Tell of a request until it ends."""
        request = running.request
        # Salted: what an older version computed of the same prompt must not be taken for this one's.
        prompt = tokens_input(request.tokens.tolist(), cache_salt=str(running.version))
        try:
            outputs = await self._llm.add_request(
                request.id,
                prompt,
                sampling_parameters(request),
                lora_request=self._adapter_of(running),
                priority=request.priority,
            )
            running.added.set()
            finished = False
            while not finished:
                output = outputs.get_nowait() or await outputs.get()
                assert isinstance(output, RequestOutput)
                self._take(running, output.outputs[0])
                finished = output.finished
        except EngineDeadError as e:
            self._die(EngineDied(f"vLLM's engine process is gone ({e})"))
        except Exception as e:
            self._end(running)
            self._tell(Event(request.id, [], [], self._version or _NONE, FinishReason.ERROR, error=f"vLLM: {e}"))
        finally:
            running.added.set()

    def _adapter_of(self, running: _Running) -> LoRARequest | None:
        """The workers hold it, so its path is never read. Where all versions have one slot, kept requests go on under a
        new adapter as they do under new weights; prompts are told apart by their salt."""
        adapter, slot = self._intake.adapter if self._intake is not None else None, running.slot or THE_SLOT
        return None if adapter is None else LoRARequest(f"{adapter.name}-{slot}", slot, "(sent)")

    @staticmethod
    async def _added(requests: Iterable[_Running]) -> None:
        for running in list(requests):
            await running.added.wait()

    def _take(self, running: _Running, output: CompletionOutput) -> None:
        tokens = list(output.token_ids)
        finish = None if output.finish_reason is None else _FINISH.get(output.finish_reason, FinishReason.ERROR)
        error = f"vLLM ended the request: {output.finish_reason}" if finish is FinishReason.ERROR else ""
        logprobs = [step[token].logprob for token, step in zip(tokens, output.logprobs or (), strict=True)]
        running.told += len(tokens)
        self._generated += len(tokens)
        self._recorder.count("rollout/tokens", len(tokens))
        version = self._version if self._adapters is None else running.version
        assert version is not None
        if tokens:
            running.spans = _extended(running.spans, str(version), len(tokens))
        if finish is not None:
            self._end(running)
            self._check_versions(running, output)
        if tokens or finish is not None:
            self._tell(Event(running.request.id, tokens, logprobs, version, finish, running.mixed_kv, error))

    def _check_versions(self, running: _Running, output: CompletionOutput) -> None:
        """vLLM's core stamps every token with the version it was sampled under; ours must be the same. Where requests
        finish on their adapters, the stamp says no more than when: the first one's is the version it began with."""
        theirs = [(span.version, span.end - span.start) for span in output.weight_versions or ()]
        if self._adapters is not None and theirs:
            theirs = [(theirs[0][0], sum(count for _, count in theirs))]
        if theirs and [t for t in theirs if t[1]] != running.spans:
            self._die(EngineDied(f"{running.request.id}: told versions {running.spans}, vLLM says {theirs}"))

    def _end(self, running: _Running) -> None:
        if self._running.pop(running.request.id, None) is not None and self._adapters is not None:
            self._adapters.end(running.request.id)
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

    async def _free_bytes(self) -> int:
        assert self._intake is not None
        return sum(await self._intake.ask("free_bytes"))


_NONE = PolicyVersion(0, 0)  # of events without tokens before any version


def _extended(spans: list[tuple[str, int]], version: str, count: int) -> list[tuple[str, int]]:
    if spans and spans[-1][0] == version:
        return [*spans[:-1], (version, spans[-1][1] + count)]
    return [*spans, (version, count)]
