"""SGLang as an engine: a server, child process of the replica's, driven over HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.config.secrets import hidden
from asyncrl.models.checkpoint import tensor_shapes
from asyncrl.models.config import ModelConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.lora.slots import AdapterSlots
from asyncrl.param_sync.transports.choose import make_reader
from asyncrl.param_sync.weight_receiver import WeightReceiver
from asyncrl.rollouter.engines.adapters import adapted_modules
from asyncrl.rollouter.engines.base import EngineDied, EngineError, PauseMode, Request
from asyncrl.rollouter.engines.device import resolve_device
from asyncrl.rollouter.engines.sglang.arguments import (
    QUANTIZING,
    context_tokens,
    lora_slots,
    sampling_parameters,
    server_arguments,
    server_environment,
)
from asyncrl.rollouter.engines.sglang.delivery import ByMemory, Delivery
from asyncrl.rollouter.engines.sglang.group_delivery import ByGroup
from asyncrl.rollouter.engines.sglang.lora import adapter_name
from asyncrl.rollouter.engines.sglang.metrics import count_finished
from asyncrl.rollouter.engines.sglang.receiver import ServerReceiver
from asyncrl.rollouter.engines.sglang.release import SESSIONS_SINCE, check_release
from asyncrl.rollouter.engines.sglang.server import Server
from asyncrl.rollouter.engines.streaming import FINISH, StreamedRequest, StreamingEngine, all_ended
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

_ABORT_AGAIN_S = 0.5  # retry interval: SGLang drops an abort that overtakes its request
#: what SGLang reports as matched stop if it replaced an invalid token by a stop token
_NO_TOKEN = "NaN happened"
#: tokens per event of a stream; an event costs each side a tenth of a millisecond
_STREAM_INTERVAL = 16


class _Running(StreamedRequest):
    """``rid``: the request's id in SGLang. Not ours, because SGLang's abort matches ids by prefix."""

    def __init__(self, request: Request, version: PolicyVersion, slot: int) -> None:
        super().__init__(request, version, slot)
        self.rid = uuid.uuid4().hex


class SGLangEngine(StreamingEngine[_Running]):
    """Implements `asyncrl.rollouter.engines.base.Engine`; made by `start`. Paused until the first `resume`."""

    title = "SGLang"
    request_type = _Running
    _receiver: ServerReceiver | None

    def __init__(self, server: Server, config: Config, device: str, recorder: Recorder) -> None:
        vocabulary = ModelConfig.load(config.model.path).vocab_size
        adapters = AdapterSlots(lora_slots(config)) if sends_adapters(config) else None
        super().__init__(config, device, recorder, context_tokens(config), vocabulary, adapters)
        self._server, self._client = server, server.client
        self._drafts_greedily = device == "cpu" and config.mtp.enable_rollout
        # Only kept requests see two versions. One event per step, so that an event's tokens share a version.
        self._stream_interval = 1 if config.param_sync.pause == "keep" else _STREAM_INTERVAL
        server.ended.add_done_callback(lambda _: self._die(EngineDied(server.account())))

    @classmethod
    async def start(cls, config: Config, *, recorder: Recorder) -> SGLangEngine:
        """Start the server, which loads the checkpoint; takes a minute or two. Raises EngineError for options that
        SGLang refuses."""
        check_release()
        device = resolve_device(config.rollout.engine.device)
        secrets = hidden(config.rollout.engine.args)
        server = await Server.start(server_arguments(config, device), server_environment(config, device), secrets)
        return cls(server, config, device, recorder)

    # -- Engine --------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        if mode == "keep" and self._stream_interval > 1:
            raise EngineError("pause('keep'): SGLang was started for another param_sync.pause: events may mix versions")
        return await super().pause(mode, deadline_s)

    def weight_receiver(self, name: str, transport: str) -> WeightReceiver:
        engine = self._config.rollout.engine
        self._receiver = ServerReceiver(
            self._client,
            name,
            make_reader(transport, name),
            self._delivery(),
            shapes=tensor_shapes(self._config.model.path),
            dtype=ModelConfig.load(self._config.model.path).engine_dtype(engine.dtype),
            device=self._device,
            workers=engine.tensor_parallel_size,
            draft=self._config.mtp.enable_rollout,
            sessions=check_release().release >= SESSIONS_SINCE.release,
            quantized=not QUANTIZING.isdisjoint(engine.args),
            modules=adapted_modules(self._config),
            slots=self._adapters,
        )
        return self._receiver

    def _delivery(self) -> Delivery:
        engine = self._config.rollout.engine
        if engine.delivery == "memory":
            return ByMemory(self._client, self._device, engine.tensor_parallel_size)
        return ByGroup(self._client, "nccl" if engine.delivery == "nccl" else "gloo", engine.tensor_parallel_size)

    async def close(self) -> None:
        """End the server; pending and later calls raise EngineError."""
        self._close_requests()
        await self._server.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _why_impossible(self, request: Request) -> str | None:
        if self._drafts_greedily and request.sampling.temperature > 0:
            return "SGLang's speculation on the CPU is always greedy; expected temperature 0"
        return super()._why_impossible(request)

    async def _stream(self, running: _Running) -> None:
        request = running.request
        events = self._client.generate(
            rid=running.rid,
            input_ids=request.tokens.tolist(),
            sampling_params=sampling_parameters(request, self._stream_interval),
            return_logprob=True,
            priority=request.priority,
            lora_path=self._adapter_of(running),
            # the same prompt's KV of an older version must not be reused
            extra_key=str(running.version),
        )
        async for event in events:
            if self._take(running, event):
                await self._client.post("/abort_request", rid=running.rid)
        if self._running.get(request.id) is running:
            raise EngineError("the stream ended before the request did")

    def _adapter_of(self, running: _Running) -> str | None:
        adapter = self._receiver.adapter if self._receiver is not None else None
        return None if adapter is None else adapter_name(adapter, running.slot)

    async def _abort(self, running: Sequence[_Running]) -> None:
        """Returns when the requests have ended."""
        tasks = {r.task: r.rid for r in running if r.task is not None}
        while waiting := [task for task in tasks if not task.done()]:
            await asyncio.gather(*(self._client.post("/abort_request", rid=tasks[task]) for task in waiting))
            await asyncio.wait(waiting, timeout=_ABORT_AGAIN_S)
            self._check_alive()

    def _take(self, running: _Running, event: dict[str, Any]) -> bool:
        meta = event["meta_info"]
        reason = meta["finish_reason"] or {}
        finish = FINISH.get(reason["type"], FinishReason.ERROR) if reason else None
        if finish is FinishReason.ERROR or reason.get("status_code"):
            # without tokens: SGLang runs a request that it refuses, such as one with a malformed grammar, for a token
            # without a logprob
            count_finished(self._recorder, meta)
            error = f"SGLang ended the request: {reason.get('message', reason)}"
            return self._received(running, [], [], FinishReason.ERROR, [], error)
        # by count: aborting a waiting request repeats its last token
        new = meta["completion_tokens"] - running.received
        tokens = event["output_ids"][-new:] if new > 0 else []
        logprobs = [entry[0] for entry in meta["output_token_logprobs"][-new:]] if new > 0 else []
        error = ""
        if reason.get("matched") == _NO_TOKEN:
            finish, error = FinishReason.ERROR, "SGLang sampled no valid token: its logits are NaN"
        if len(tokens) != new or len(logprobs) != new:
            message = f"{new} new tokens, {len(tokens)} ids and {len(logprobs)} logprobs"
            self._die(EngineDied(f"{running.request.id}: SGLang's stream is inconsistent: {message}"))
            return False
        if finish is not None:
            count_finished(self._recorder, meta)
        spans = [(span["version"], span["end"] - span["start"]) for span in meta.get("weight_versions") or ()]
        return self._received(running, tokens, logprobs, finish, spans, error)

    # -- states --------------------------------------------------------------------------------------------------------

    async def _stop(self, mode: PauseMode, running: Sequence[_Running]) -> None:
        if mode == "abort":
            await self._abort(running)
        elif mode == "wait":
            await all_ended(running)
        # without running requests "retract" equals "in_place"; kept requests hold their KV until `flush_kv`
        await self._client.post("/pause_generation", mode="in_place" if mode == "keep" else "retract")

    async def _continue(self) -> None:
        await self._client.post("/continue_generation", torch_empty_cache=False)

    async def _set_version(self, version: PolicyVersion) -> None:
        await self._client.post("/update_weight_version", new_version=str(version), abort_all_requests=False)

    async def _release_kv(self) -> None:
        if self._running:  # SGLang's scheduler would exit
            raise EngineError(f"release_kv: {len(self._running)} requests are kept during this pause and hold KV")
        await self._client.post("/release_memory_occupation", tags=["kv_cache"])

    async def _restore_kv(self) -> None:
        await self._client.post("/resume_memory_occupation", tags=["kv_cache"])

    async def _flush_kv(self) -> None:
        if self._running:
            await self._client.post("/pause_generation", mode="retract")  # requests release their KV and queue again
        await self._client.post("/flush_cache")

    async def _free_bytes(self) -> int:
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
