"""vLLM behind the engine seam: an AsyncLLM in the replica's process, its core and workers in processes of their own."""

from __future__ import annotations

import asyncio
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
from asyncrl.rollouter.engine import (
    Capabilities,
    EngineDied,
    EngineError,
    PauseMode,
    Request,
    pause_kv,
)
from asyncrl.rollouter.engines.adapters import adapted_modules, adapter_slots
from asyncrl.rollouter.engines.followed import FINISH, FollowedRequest, FollowingEngine
from asyncrl.rollouter.engines.vllm.arguments import (
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

_LOOK_EVERY_S = 0.5


class _Running(FollowedRequest):
    """A request in vLLM's hands."""

    def __init__(self, request: Request, version: PolicyVersion, slot: int) -> None:
        super().__init__(request, version, slot)
        self.added = asyncio.Event()  # whether vLLM's core has it: only then do pause and abort see it there


class VLLMEngine(FollowingEngine[_Running]):
    """Implements `asyncrl.rollouter.engine.Engine`; made by `start`. Paused until the first `resume`."""

    title = "vLLM"
    _intake: WorkerIntake | None

    def __init__(self, llm: AsyncLLM, config: Config, device: str, recorder: Recorder) -> None:
        model, cache = llm.model_config, llm.vllm_config.cache_config
        kv_bytes = int(cache.kv_cache_memory_bytes or 0) * config.rollout.engine.data_parallel_size
        # without slots of their own, kept requests move to the replica's new adapter
        adapters = AdapterSlots(slots) if (slots := adapter_slots(config)) > 1 else None
        super().__init__(config, recorder, model.max_model_len, model.get_vocab_size(), kv_bytes, adapters)
        self._llm, self._device = llm, device
        self._watching = asyncio.create_task(self._watch())

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
        await super().submit(requests)
        await self._added(self._known(request.id for request in requests))

    async def abort(self, ids: Sequence[str]) -> None:
        self._alive()
        self._abort_held(ids)
        running = self._known(ids)
        await self._added(running)
        await self._llm.abort([r.request.id for r in running])

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        """``wait`` lets everything finish that was submitted before; what is submitted later is held back. At the
        deadline the engine goes on as it did before."""
        self._alive()
        was_paused, self.paused = self.paused, True
        running, waiting = list(self._running.values()), list(self._held)
        try:
            async with asyncio.timeout(deadline_s):
                await self._added(running)
                await self._llm.pause_generation(mode=mode, clear_cache=False)
                if mode != "keep" and running:
                    await asyncio.wait([r.task for r in running if r.task is not None])
        except TimeoutError:
            await self._llm.resume_generation()
            raise self._not_reached(mode, deadline_s, was_paused) from None
        self._alive()
        if mode == "abort":  # after those that run, so that they come after them again
            self._abort_held(waiting)
        self._kept_kv = mode == "keep"
        self._occupancy.observe(0, 0)
        return len(running)

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

    async def close(self) -> None:
        """End vLLM's processes; every call that waits, and every later one, raises EngineError."""
        self._close_requests()
        self._watching.cancel()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would log the end of its engine as an error
        await asyncio.to_thread(self._llm.shutdown)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _taken(self, request: Request, version: PolicyVersion, slot: int) -> _Running:
        return _Running(request, version, slot)

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
            self._fail(request, f"vLLM: {e}")
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
        finish = None if output.finish_reason is None else FINISH.get(output.finish_reason, FinishReason.ERROR)
        error = f"vLLM ended the request: {output.finish_reason}" if finish is FinishReason.ERROR else ""
        logprobs = [step[token].logprob for token, step in zip(tokens, output.logprobs or (), strict=True)]
        spans = [(span.version, span.end - span.start) for span in output.weight_versions or ()]
        self._heard(running, tokens, logprobs, finish, spans, error)

    # -- states --------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Of the death of its processes vLLM tells the requests that they have. Without any nobody would hear of it,
        and what else they are asked is never answered."""
        while not self._llm.errored:
            await asyncio.sleep(_LOOK_EVERY_S)
        self._die(EngineDied("vLLM's engine process is gone"))

    async def _name_version(self, version: PolicyVersion) -> None:
        await self._llm.update_weight_version(str(version))

    async def _generate_on(self) -> None:
        await self._llm.resume_generation()

    async def _free_bytes(self) -> int:
        assert self._intake is not None
        return sum(await self._intake.ask("free_bytes"))
