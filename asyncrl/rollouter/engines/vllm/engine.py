"""vLLM as an engine: an AsyncLLM in the replica's process, with its core and workers in their own processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from asyncrl.config.schema import Config
from asyncrl.config.secrets import hidden
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.lora.slots import AdapterSlots
from asyncrl.param_sync.weight_receiver import WeightReceiver
from asyncrl.rollouter.engines.adapters import adapted_modules, adapter_slots
from asyncrl.rollouter.engines.base import EngineDied, EngineError, PauseMode, Request
from asyncrl.rollouter.engines.device import resolve_device
from asyncrl.rollouter.engines.socket_folder import SocketFolder
from asyncrl.rollouter.engines.streaming import FINISH, StreamedRequest, StreamingEngine, all_ended
from asyncrl.rollouter.engines.vllm.arguments import (
    engine_arguments,
    prepare_environment,
    reason,
    sampling_parameters,
)
from asyncrl.rollouter.engines.vllm.metrics import stat_logger
from asyncrl.rollouter.engines.vllm.receiver import THE_SLOT, WorkerReceiver
from asyncrl.rollouter.engines.vllm.release import check_release
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

_WATCH_EVERY_S = 0.5


class _Running(StreamedRequest):
    def __init__(self, request: Request, version: PolicyVersion, slot: int) -> None:
        super().__init__(request, version, slot)
        self.added = asyncio.Event()  # set once vLLM's core has it: earlier pauses and aborts would miss it


class VLLMEngine(StreamingEngine[_Running]):
    """Implements `asyncrl.rollouter.engines.base.Engine`; made by `start`. Paused until the first `resume`."""

    title = "vLLM"
    request_type = _Running
    _receiver: WorkerReceiver | None

    def __init__(self, llm: AsyncLLM, config: Config, device: str, recorder: Recorder, sockets: SocketFolder) -> None:
        # with one slot, kept requests move to the replica's new adapter
        adapters = AdapterSlots(slots) if (slots := adapter_slots(config)) > 1 else None
        model = llm.model_config
        super().__init__(config, device, recorder, model.max_model_len, model.get_vocab_size(), adapters)
        self._llm, self._sockets = llm, sockets
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, config: Config, *, recorder: Recorder) -> VLLMEngine:
        """Start vLLM's processes and load the checkpoint. Takes a minute and blocks the event loop: the workers live
        only as long as the thread that started them. Raises EngineError for options that vLLM refuses."""
        check_release()
        device = resolve_device(config.rollout.engine.device)
        engine = config.rollout.engine
        with contextlib.ExitStack() as unwanted:
            sockets = SocketFolder()
            unwanted.callback(sockets.close)
            prepare_environment(device, engine.threads, sockets.path)
            arguments = engine_arguments(config, device)
            try:
                llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[stat_logger(recorder)])
            except (ValueError, RuntimeError, ImportError) as e:
                cause = None if hidden(engine.args) else e  # a traceback shows the cause's own text
                raise EngineError(f"vLLM did not start with {config.model.path}: {reason(e, engine)}") from cause
            unwanted.pop_all()
        return cls(llm, config, device, recorder, sockets)

    # -- Engine --------------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> None:
        """Returns when vLLM's core has the requests that are not held back."""
        await super().submit(requests)
        await self._added(running for r in requests if (running := self._running.get(r.id)) is not None)

    def weight_receiver(self, name: str, transport: str) -> WeightReceiver:
        self._receiver = WorkerReceiver(self._llm, name, transport, adapted_modules(self._config), self._adapters)
        return self._receiver

    async def close(self) -> None:
        """End vLLM's processes; pending and later calls raise EngineError."""
        self._close_requests()
        self._watching.cancel()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would log the shutdown as an error
        await asyncio.to_thread(self._llm.shutdown)
        self._sockets.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _stream(self, running: _Running) -> None:
        request = running.request
        # salted: the same prompt's KV of an older version must not be reused
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
                if self._take(running, output.outputs[0]):
                    await self._llm.abort(request.id)
                finished = output.finished
        except EngineDeadError as e:
            raise EngineDied(f"vLLM's engine process is gone ({e})") from e
        finally:
            running.added.set()

    def _adapter_of(self, running: _Running) -> LoRARequest | None:
        """The request's adapter. The workers hold it, so its path is never read. If all versions share one slot, kept
        requests continue under a new adapter as they would under new weights; the salts keep their KV apart."""
        adapter, slot = self._receiver.adapter if self._receiver is not None else None, running.slot or THE_SLOT
        return None if adapter is None else LoRARequest(f"{adapter.name}-{slot}", slot, "(sent)")

    async def _abort(self, running: Sequence[_Running]) -> None:
        await self._added(running)
        await self._llm.abort([r.request.id for r in running])

    @staticmethod
    async def _added(requests: Iterable[_Running]) -> None:
        for running in list(requests):
            await running.added.wait()

    def _take(self, running: _Running, output: CompletionOutput) -> bool:
        tokens = list(output.token_ids)
        finish = None if output.finish_reason is None else FINISH.get(output.finish_reason, FinishReason.ERROR)
        error = f"vLLM ended the request: {output.finish_reason}" if finish is FinishReason.ERROR else ""
        logprobs = [step[token].logprob for token, step in zip(tokens, output.logprobs or (), strict=True)]
        spans = [(span.version, span.end - span.start) for span in output.weight_versions or ()]
        return self._received(running, tokens, logprobs, finish, spans, error)

    # -- states --------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Detect the death of vLLM's processes: vLLM raises it only in running requests; other calls never return."""
        while not self._llm.errored:
            await asyncio.sleep(_WATCH_EVERY_S)
        self._die(EngineDied("vLLM's engine process is gone"))

    async def _stop(self, mode: PauseMode, running: Sequence[_Running]) -> None:
        await self._added(running)
        if mode == "wait":  # before the pause: once paused, vLLM starts no request that waits for a slot
            await all_ended(running)
        await self._llm.pause_generation(mode=mode, clear_cache=False)
        if mode == "abort":
            await all_ended(running)

    async def _continue(self) -> None:
        await self._llm.resume_generation()

    async def _set_version(self, version: PolicyVersion) -> None:
        await self._llm.update_weight_version(str(version))

    async def _release_kv(self) -> None:
        if self._device == "cpu":
            await self._flush_kv()
        else:
            await self._llm.release_kv_cache_memory()

    async def _restore_kv(self) -> None:
        if self._device != "cpu":
            await self._llm.wake_up(["kv_cache"])

    async def _flush_kv(self) -> None:
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not empty its prefix cache: requests still hold blocks of it")

    async def _free_bytes(self) -> int:
        assert self._receiver is not None
        return sum(await self._receiver.ask("free_bytes"))
