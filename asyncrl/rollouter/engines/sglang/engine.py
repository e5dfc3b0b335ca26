"""SGLang behind the engine seam: a server process below the replica's, spoken to over HTTP."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Sequence
from typing import Any

import torch

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import tensor_shapes
from asyncrl.models.config import ModelConfig
from asyncrl.param_sync.adapter_slots import AdapterSlots
from asyncrl.param_sync.intake import Intake
from asyncrl.param_sync.transports.choose import make_reader
from asyncrl.rollouter.engine import (
    Capabilities,
    EngineDied,
    EngineError,
    PauseMode,
    Request,
    pause_kv,
)
from asyncrl.rollouter.engines.adapters import adapted_modules
from asyncrl.rollouter.engines.followed import FINISH, FollowedRequest, FollowingEngine
from asyncrl.rollouter.engines.sglang.arguments import (
    SESSIONS_SINCE,
    check_version,
    context_tokens,
    kv_token_bytes,
    lora_slots,
    resolve_device,
    sampling_parameters,
    server_arguments,
    server_environment,
)
from asyncrl.rollouter.engines.sglang.delivery import ByMemory, Delivery
from asyncrl.rollouter.engines.sglang.group_delivery import ByGroup
from asyncrl.rollouter.engines.sglang.intake import ServerIntake
from asyncrl.rollouter.engines.sglang.lora import adapter_name
from asyncrl.rollouter.engines.sglang.metrics import count_speculation
from asyncrl.rollouter.engines.sglang.server import Server
from asyncrl.sample import FinishReason, PolicyVersion
from asyncrl.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

_ABORT_AGAIN_S = 0.5  # SGLang does not hear of an abort that overtakes its request
#: tokens per event of a stream: an event costs each side a tenth of a millisecond
_STREAM_INTERVAL = 16


class _Running(FollowedRequest):
    """A request in SGLang's hands. ``rid`` is its name there: SGLang aborts all whose names begin with the one given,
    so ours will not do."""

    def __init__(self, request: Request, version: PolicyVersion, slot: int) -> None:
        super().__init__(request, version, slot)
        self.rid = uuid.uuid4().hex


class SGLangEngine(FollowingEngine[_Running]):
    """Implements `asyncrl.rollouter.engine.Engine`; made by `start`. Paused until the first `resume`."""

    title = "SGLang"
    _intake: ServerIntake | None

    def __init__(self, server: Server, config: Config, device: str, recorder: Recorder, kv_bytes: int) -> None:
        vocabulary = ModelConfig.load(config.model.path).vocab_size
        adapters = AdapterSlots(lora_slots(config)) if sends_adapters(config) else None
        super().__init__(config, recorder, context_tokens(config), vocabulary, kv_bytes, adapters)
        self._server, self._client, self._device = server, server.client, device
        self._drafts_greedily = device == "cpu" and config.mtp.enable_rollout
        # A stream's event has tokens of one version if each step is told at once; only kept requests see two.
        self._stream_interval = 1 if config.param_sync.pause == "keep" else _STREAM_INTERVAL
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

    async def abort(self, ids: Sequence[str]) -> None:
        """Returns when they have ended."""
        self._alive()
        self._abort_held(ids)
        await self._end_all(self._known(ids))

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        """``wait`` lets everything finish that was submitted before; what is submitted later is held back. At the
        deadline the engine goes on as it did before."""
        self._alive()
        if mode == "keep" and self._stream_interval > 1:
            raise EngineError("pause('keep'): SGLang was started for another param_sync.pause and tells no spans of it")
        was_paused, self.paused = self.paused, True
        running, waiting = list(self._running.values()), list(self._held)
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
            raise self._not_reached(mode, deadline_s, was_paused) from None
        self._alive()
        if mode == "abort":  # after those that run, so that they come after them again
            self._abort_held(waiting)
        self._kept_kv = mode == "keep"
        self._occupancy.observe(0, 0)
        return len(running)

    async def release_kv(self) -> int:
        """On the CPU SGLang keeps the memory: its cache is emptied, and 0 returned."""
        self._need_pause("release_kv")
        if self._running:  # SGLang's scheduler would end itself
            raise EngineError(f"release_kv: {len(self._running)} requests stay over this pause, with KV of theirs")
        if self._device == "cpu" and not self._told_of_cpu:
            log.warning("SGLang on the CPU cannot free its KV cache: param_sync.kv unload empties it, no more")
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
            self._delivery(),
            shapes=tensor_shapes(self._config.model.path),
            dtype=ModelConfig.load(self._config.model.path).engine_dtype(engine.dtype),
            device=self._device,
            workers=engine.tensor_parallel_size,
            draft=self._config.mtp.enable_rollout,
            sessions=check_version() >= SESSIONS_SINCE,
            modules=adapted_modules(self._config),
            slots=self._adapters,
        )
        return self._intake

    def _delivery(self) -> Delivery:
        engine = self._config.rollout.engine
        if engine.delivery == "memory":
            return ByMemory(self._client, self._device, engine.tensor_parallel_size)
        return ByGroup(self._client, "nccl" if engine.delivery == "nccl" else "gloo", engine.tensor_parallel_size)

    async def close(self) -> None:
        """End the server; every call that waits, and every later one, raises EngineError."""
        self._close_requests()
        await self._server.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _why_impossible(self, request: Request) -> str | None:
        if self._drafts_greedily and request.sampling.temperature > 0:
            return "SGLang's speculation on the CPU takes the likeliest token whatever the temperature; expected 0"
        return super()._why_impossible(request)

    def _taken(self, request: Request, version: PolicyVersion, slot: int) -> _Running:
        return _Running(request, version, slot)

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
                lora_path=self._adapter_of(running),
                # what an older version computed of the same prompt must not be taken for this one's
                extra_key=str(running.version),
            )
            async for event in events:
                self._take(running, event)
            if self._running.get(request.id) is running:
                raise EngineError("its stream ended before the request did")
        except EngineDied as death:
            self._die(death)
        except Exception as e:
            self._end(running)
            self._fail(request, f"SGLang: {e}")

    def _adapter_of(self, running: _Running) -> str | None:
        adapter = self._intake.adapter if self._intake is not None else None
        return None if adapter is None else adapter_name(adapter, running.slot)

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
        finish = FINISH.get(reason["type"], FinishReason.ERROR) if reason else None
        error = ""
        if finish is FinishReason.ERROR or reason.get("status_code"):
            finish, error = FinishReason.ERROR, f"SGLang ended the request: {reason.get('message', reason)}"
        if len(tokens) != new or len(logprobs) != new:
            message = f"{new} new tokens, {len(tokens)} ids and {len(logprobs)} logprobs"
            self._die(EngineDied(f"{running.request.id}: SGLang's stream is not whole: {message}"))
            return
        if finish is not None:
            count_speculation(self._recorder, meta)
        spans = [(span["version"], span["end"] - span["start"]) for span in meta.get("weight_versions") or ()]
        self._heard(running, tokens, logprobs, finish, spans, error)

    # -- states --------------------------------------------------------------------------------------------------------

    async def _name_version(self, version: PolicyVersion) -> None:
        await self._client.post("/update_weight_version", new_version=str(version), abort_all_requests=False)

    async def _generate_on(self) -> None:
        await self._client.post("/continue_generation", torch_empty_cache=False)

    def _free_bytes(self) -> int:
        """Of the GPUs that this replica sees."""
        if self._device == "cpu":
            return 0
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
