"""The native engine's asyncio interface: a worker thread steps the core.

Everything that touches the core runs in that thread, between two steps: a method puts a command into its inbox and
awaits the answer. The thread sleeps on a condition while idle::

    engine = NativeEngine("checkpoint", EngineConfig(slots=32))
    await engine.submit(requests)
    await engine.resume(PolicyVersion(0, 0))     # an engine starts paused, with weights of no version yet
    batch = await engine.events()
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import torch

from asyncrl.config.schema import EngineConfig, LoraConfig, MTPConfig
from asyncrl.cpu.priority import give_way
from asyncrl.models.checkpoint import check_checkpoint
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.digest import digest_tensors
from asyncrl.param_sync.manifest import Role
from asyncrl.param_sync.transports.choose import make_reader
from asyncrl.param_sync.weight_receiver import LocalReceiver, WeightReceiver
from asyncrl.processes.device_memory import naming_memory, tensor_bytes
from asyncrl.rollouter.engines.base import (
    ALIVE_EVERY_S,
    EngineError,
    EventBatch,
    PauseMode,
    Request,
    Scheduling,
)
from asyncrl.rollouter.engines.device import resolve_device
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.rollouter.engines.native.speculation import Speculation
from asyncrl.rollouter.engines.native.weights import NativeAdaptedWeights, NativeWeights
from asyncrl.rollouter.engines.stops import Tokenizer
from asyncrl.types.versions import PolicyVersion

_ENDS_EVERY_S = 0.2  # while others wait for the slots: a call costs both ends a millisecond or two
_WANTED_EVERY_S = 0.03  # while none does

T = TypeVar("T")


class NativeEngine:
    """Implements `asyncrl.rollouter.engines.base.Engine`.

    ``load_tokenizer`` is called for the first stop string or grammar. With ``load_weights=False`` the weights are zeros
    and must be synced before the first `resume`. ``mtp`` decides whether it speculates. With ``lora`` syncs send such
    adapters, and the base only once. ``warm_bytes``: for finished turns' KV. ``float32_head``: see
    `asyncrl.models.chunked.head_logits`.

    Raises CheckpointError for a checkpoint that cannot be built or read, EngineError for options that do not fit it.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        config: EngineConfig,
        *,
        recorder: Recorder | None = None,
        load_tokenizer: Callable[[], Tokenizer] | None = None,
        load_weights: bool = True,
        mtp: MTPConfig | None = None,
        lora: LoraConfig | None = None,
        warm_bytes: int = 0,
        float32_head: bool = False,
    ) -> None:
        from_trunk = mtp is not None and mtp.init_from_trunk
        decoder = check_checkpoint(checkpoint, from_trunk)
        context = config.max_context_tokens or decoder.max_position_embeddings
        if context > decoder.max_position_embeddings:
            raise EngineError(
                f"rollout.engine.max_context_tokens is {context}, but the model of {checkpoint} was made for "
                f"{decoder.max_position_embeddings}"
            )
        dtype = getattr(torch, decoder.engine_dtype(config.dtype))
        device = torch.device(resolve_device(config.device))
        self._device = torch.empty(0, device=device).device  # with its index
        with self._naming_memory("while it loaded the native engine's weights"):
            self._model = NativeModel(decoder, context, dtype, device, float32_head)
            if load_weights:
                self._model.load(checkpoint, from_trunk)
        with self._naming_memory(f"while it allocated KV of {config.slots} slots of {context} tokens"):
            self._core = Core(
                self._model,
                slots=config.slots,
                context_tokens=context,
                prefill_chunk_tokens=config.prefill_chunk_tokens or (4096 if device.type == "cuda" else 512),
                deterministic=config.deterministic,
                recorder=recorder,
                load_tokenizer=load_tokenizer,
                speculation=Speculation(mtp.num_speculative_tokens, mtp.guard) if mtp and mtp.enable_rollout else None,
                warm_bytes=warm_bytes,
            )
        self._threads, self._priority = config.threads, config.cpu_priority
        self._weights_loaded = load_weights
        self._committed: PolicyVersion | None = None
        self._weights: NativeWeights | NativeAdaptedWeights = NativeWeights(self._model, self._on_commit)
        if lora is not None:
            self._weights = NativeAdaptedWeights(self._model, lora, self._on_commit)

        self._state: Literal["running", "draining", "paused"] = "paused"
        self._drained: concurrent.futures.Future[int] | None = None
        self._waited_for = 0  # requests that must finish before the pause
        self._wake = threading.Condition()  # guards the four below
        self._inbox: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()
        self._listener: concurrent.futures.Future[None] | None = None  # `events` waits on it
        self._outbox: deque[EventBatch] = deque()
        self._end: BaseException | None = None  # why the thread has ended or must end
        self._published_s = self._progress_s = 0.0
        self._progress_every_s = Scheduling().progress_every_s
        self._thread = threading.Thread(target=self._run, name="native-engine", daemon=True)
        self._thread.start()

    # -- Engine ----------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> None:
        if any(request.sampling.grammar is not None for request in requests):
            await asyncio.to_thread(self._core.compile_grammars, requests)
        await self._call(lambda: self._core.submit(requests))

    async def events(self) -> EventBatch:
        """Returns ends about five times a second, sooner if no request waits for a slot. One caller at a time."""
        while True:
            with self._wake:
                if self._outbox:
                    return self._outbox.popleft()
                if self._end is not None:
                    raise self._end
                listener: concurrent.futures.Future[None] = concurrent.futures.Future()
                self._listener = listener
                self._wake.notify()
            await asyncio.wrap_future(listener)

    async def abort(self, ids: Sequence[str]) -> None:
        await self._call(lambda: self._core.abort(ids))

    async def set_scheduling(self, scheduling: Scheduling) -> None:
        self._progress_every_s = scheduling.progress_every_s
        await self._call(lambda: self._core.set_scheduling(scheduling))

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        """``wait`` finishes the requests submitted before. Later ones stay queued in every mode. At the deadline, or if
        cancelled, the engine continues as before."""
        if mode not in get_args(PauseMode):
            raise EngineError(f"pause mode {mode!r} is not one of {', '.join(get_args(PauseMode))}")
        before = self._state
        asked = self._post(lambda: self._pause(mode))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), deadline_s)
        except TimeoutError:
            left = await self._call(lambda: self._unpause(before))
            raise TimeoutError(
                f"native engine: pause({mode!r}) did not complete within {deadline_s:g} s, {left}"
            ) from None
        except asyncio.CancelledError:
            await self._call(lambda: self._unpause(before))
            raise

    async def resume(self, version: PolicyVersion) -> None:
        """Raises EngineError if the weights are not those of ``version`` or the KV cache is released."""
        await self._call(lambda: self._resume(version))

    async def release_kv(self) -> int:
        return await self._call(lambda: self._paused("release_kv", self._core.release_kv))

    async def restore_kv(self) -> None:
        await self._call(self._restore_kv)

    async def flush_kv(self) -> None:
        await self._call(lambda: self._paused("flush_kv", self._core.flush_kv))

    def weight_receiver(self, name: str, transport: str) -> WeightReceiver:
        return LocalReceiver(name, self._weights, make_reader(transport, name))

    async def digest(self, role: Role) -> str:
        return await self._call(lambda: digest_tensors(self._weights.held(role).items()))

    async def close(self) -> None:
        """End the worker thread; pending and later calls raise EngineError."""
        with self._wake:
            self._end = self._end or EngineError("the engine is closed")
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # -- commands, run by the worker thread ------------------------------------------------------------------------

    def _pause(self, mode: PauseMode) -> int | concurrent.futures.Future[int]:
        core = self._core
        if mode == "wait" and core.active and self._state != "paused":
            self._waited_for = core.active
            core.close_gate()
            self._state, self._drained = "draining", concurrent.futures.Future()
            return self._drained
        self._state = "paused"
        core.settle()
        core.rest()
        cut = core.abort() if mode == "abort" else core.active if mode == "keep" else 0
        self._open_gate()
        return cut

    def _unpause(self, before: Literal["running", "draining", "paused"]) -> str:
        """Returns the remaining work, for an error."""
        self._state = before
        self._open_gate()
        core = self._core
        return f"{core.running} requests run and {core.waiting} wait; generation continues under {core.version}"

    def _open_gate(self) -> None:
        drained, self._drained = self._drained, None
        self._core.open_gate()
        if drained is not None:
            drained.set_result(self._waited_for)

    def _resume(self, version: PolicyVersion) -> None:
        if not self._weights.intact():
            raise EngineError(
                f"resume({version}): a sync was interrupted during its transfer, so the weights are of no version; "
                f"send everything again"
            )
        if self._committed not in (None, version):
            raise EngineError(f"resume({version}): the last committed weights are of version {self._committed}")
        if self._committed is None and not self._weights_loaded:
            raise EngineError(f"resume({version}): built with load_weights=False, and nothing was committed yet")
        if not self._core.kv.allocated:
            raise EngineError(f"resume({version}): the KV cache is released; call restore_kv first")
        self._core.start(version)
        self._open_gate()
        self._state = "running"

    def _restore_kv(self) -> None:
        with self._naming_memory("while it restored the KV cache"):
            self._core.kv.restore()

    def _naming_memory(self, doing: str) -> AbstractContextManager[None]:
        def held() -> dict[str, int]:
            model, core = getattr(self, "_model", None), getattr(self, "_core", None)
            weights = tensor_bytes(model.named_views(), self._device) if model is not None else 0
            kept = {} if core is None else {"KV cache": core.kv.nbytes, "KV of finished turns": core.warm_bytes}
            return {"weights": weights, **kept}

        options = "slots, max_context_tokens, warm_kv_mb or prefill_chunk_tokens"
        return naming_memory(self._device, doing, held, f"rollout.engine.{options}")

    def _paused(self, what: str, command: Callable[[], T]) -> T:
        if self._state != "paused":
            raise EngineError(f"{what} while the engine is {self._state}; pause it first")
        return command()

    def _on_commit(self, version: PolicyVersion) -> None:
        self._committed = version

    # -- the thread ------------------------------------------------------------------------------------------------

    def _post(self, command: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._wake:
            if self._end is not None:
                raise self._end
            self._inbox.append((answer, command))
            self._wake.notify()
        return answer

    async def _call(self, command: Callable[[], T]) -> T:
        return cast(T, await asyncio.wrap_future(self._post(command)))

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps this per thread
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # so does CUDA the current device, of which graphs and kernels are
        if self._model.device.type == "cpu":
            # Generation runs ahead of training, so the trainer, the queue and short tasks come first. When all of them
            # wait for generation, they need little of the core.
            give_way(self._priority)
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._obey()
                    if self._stepping():
                        with self._naming_memory("while it generated"):
                            self._core.step()
                    if self._state == "draining" and not self._core.active:
                        self._state = "paused"
                        self._core.settle()
                        self._core.rest()
                        self._open_gate()
                    self._publish()
        except BaseException as problem:  # every failure must reach the waiting callers
            self._end = problem
        self._fail_all()

    def _stepping(self) -> bool:
        return self._state != "paused" and self._core.active > 0

    def _wait_for_work(self) -> bool:
        """Sleep until there is work; False once the engine is closed."""
        with self._wake:
            while self._end is None and not (self._inbox or self._stepping() or self._should_publish()):
                self._core.rest()
                self._wake.wait()
            return self._end is None

    def _obey(self) -> None:
        while self._inbox:
            with self._wake:
                answer, command = self._inbox.popleft()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                result = command()
            except BaseException as problem:  # for the caller to handle; the engine continues
                answer.set_exception(problem)
                if not isinstance(problem, Exception):
                    raise
            else:
                if isinstance(result, concurrent.futures.Future):
                    result.add_done_callback(functools.partial(_pass_on, answer))
                else:
                    answer.set_result(result)

    def _should_publish(self) -> bool:
        """True if a call of `events` waits and events are due, or a sign of life: a deterministic engine that computes
        the tokens of continued requests again has no events for long."""
        if self._listener is None:
            return False
        if not self._core.has_events:
            return self._stepping() and now_s() - self._published_s >= ALIVE_EVERY_S
        wanted_s = ALIVE_EVERY_S
        if self._core.has_finished:
            wanted_s = _ENDS_EVERY_S if self._core.waiting else _WANTED_EVERY_S
        return self._progress_is_due() or now_s() - self._published_s >= wanted_s

    def _progress_is_due(self) -> bool:
        return not self._stepping() or now_s() - self._progress_s >= self._progress_every_s

    def _publish(self) -> None:
        with self._wake:
            if not self._should_publish():
                return
            progress, self._published_s = self._progress_is_due(), now_s()
            if progress:
                self._progress_s = self._published_s
            self._outbox.append(self._core.drain(progress))
            listener, self._listener = self._listener, None
        if listener is not None and listener.set_running_or_notify_cancel():
            listener.set_result(None)

    def _fail_all(self) -> None:
        self._core.rest()
        with self._wake:
            problem = self._end or EngineError("the engine is closed")
            waiting = [answer for answer, _ in self._inbox]
            waiting += [f for f in (self._listener, self._drained) if f is not None]
            self._inbox.clear()
            self._listener = self._drained = None
        for future in waiting:
            if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
                future.set_exception(problem)


def _pass_on(answer: concurrent.futures.Future[Any], done: concurrent.futures.Future[Any]) -> None:
    if problem := done.exception():
        answer.set_exception(problem)
    else:
        answer.set_result(done.result())
