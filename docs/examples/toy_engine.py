"""A whole engine in one file: asyncrl's own decoder without a KV cache, one forward pass per step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import is_draft, load_decoder
from asyncrl.models.layout import PackedLayout
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.digest import digest_tensors
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.param_sync.manifest import AdapterSpec, Role
from asyncrl.param_sync.transports.choose import make_reader
from asyncrl.param_sync.weight_receiver import LocalReceiver, WeightReceiver
from asyncrl.rollouter.engines.base import PAUSE_KV, Engine, EngineDied, EngineSpec, PauseMode, Request
from asyncrl.rollouter.engines.streaming import StreamedRequest, StreamingEngine, all_ended
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion


class ToySpec(EngineSpec):
    pause_kv = frozenset((pause, kv) for pause, kv in PAUSE_KV if kv != "keep")  # there is no cache to keep
    native_decoder = True

    async def start(self, config: Config, recorder: Recorder) -> Engine:
        return ToyEngine(config, recorder)


ENGINE = ToySpec()


class Running(StreamedRequest):
    def __init__(self, request: Request, version: PolicyVersion, slot: int) -> None:
        super().__init__(request, version, slot)
        self.drawn: list[int] = []
        self.done = asyncio.Event()


class ToyEngine(StreamingEngine[Running]):
    title = "toy"
    request_type = Running

    def __init__(self, config: Config, recorder: Recorder) -> None:
        self._decoder = load_decoder(config.model.path).requires_grad_(False)
        model = self._decoder.config
        context = config.rollout.engine.max_context_tokens or model.max_position_embeddings
        super().__init__(config, "cpu", recorder, context, model.vocab_size, adapters=None)
        self._queue: list[Running] = []  # submitted and not done, in order of arrival
        self._wake = asyncio.Event()
        self._stepping = asyncio.Lock()  # held during a step, and while stopped
        self._stopped = False
        self._loop = asyncio.create_task(self._generate())

    def weight_receiver(self, name: str, transport: str) -> WeightReceiver:
        self._receiver = receiver = Weights(name, transport, dict(self._decoder.named_parameters()))
        return receiver

    async def close(self) -> None:
        self._close_requests()
        self._loop.cancel()

    async def _stream(self, running: Running) -> None:
        if not running.done.is_set():  # aborted before it began
            self._queue.append(running)
            self._wake.set()
        await running.done.wait()

    async def _abort(self, running: Sequence[Running]) -> None:
        for request in running:
            self._report(request, [], [], FinishReason.ABORT)

    async def _stop(self, mode: PauseMode, running: Sequence[Running]) -> None:
        if mode == "wait":
            await all_ended(running)
        if not self._stopped:
            await self._stepping.acquire()
            self._stopped = True
        if mode == "abort":
            await self._abort(running)

    async def _continue(self) -> None:
        if self._stopped:
            self._stepping.release()
            self._stopped = False

    async def _nothing(self, *_: Any) -> Any: ...

    _set_version = _release_kv = _restore_kv = _flush_kv = _free_bytes = _nothing  # no cache, no names of versions

    async def _generate(self) -> None:
        try:
            while True:
                if not self._queue:
                    self._wake.clear()
                await self._wake.wait()
                async with self._stepping:
                    if batch := sorted(self._queue, key=lambda r: r.request.priority)[: self._slots]:
                        for running, token, logprob in await asyncio.to_thread(self._step, batch):
                            running.drawn.append(token)
                            r = running.request
                            full = len(running.drawn) == min(r.max_new_tokens, self._context_tokens - len(r.tokens))
                            self._report(running, [token], [logprob], FinishReason.LENGTH if full else None)
        except Exception as e:
            self._die(EngineDied(f"the toy engine failed: {e}"))

    @torch.inference_mode()
    def _step(self, batch: Sequence[Running]) -> list[tuple[Running, int, float]]:
        """The next token of each request, with its logprob."""
        sequences = [[*r.request.tokens.tolist(), *r.drawn] for r in batch]
        lengths = np.array([len(tokens) for tokens in sequences])
        packed = torch.tensor([token for tokens in sequences for token in tokens])
        hidden_TM = self._decoder.hidden_states(packed, PackedLayout.from_lengths(lengths))
        logits_BV = self._decoder.lm_head(hidden_TM[lengths.cumsum() - 1])
        return [(r, *_drawn(r, logits_V)) for r, logits_V in zip(batch, logits_BV, strict=True)]

    def _report(self, running: Running, tokens: list[int], logprobs: list[float], finish: FinishReason | None) -> None:
        if running.done.is_set():  # aborted during the step
            return
        if stopped := self._received(running, tokens, logprobs, finish, []):
            self._received(running, [], [], FinishReason.ABORT, [])
        if stopped or finish is not None:
            running.done.set()
            self._queue = [other for other in self._queue if other is not running]


def _drawn(running: Running, logits_V: torch.Tensor) -> tuple[int, float]:
    request, temperature = running.request, running.request.sampling.temperature
    logprobs_V = torch.log_softmax(logits_V / (temperature or 1.0), -1)
    if temperature == 0:
        token = int(logprobs_V.argmax())
    else:  # by key and position: a sample that is aborted and continued draws the same numbers
        uniform = np.random.default_rng([request.key, request.position + len(running.drawn)]).random()
        token = min(int((logprobs_V.exp().cumsum(-1) < uniform).sum()), len(logprobs_V) - 1)
    return token, float(logprobs_V[token])


class Weights(LocalReceiver):
    """Weights are written into the decoder's parameters as they arrive."""

    committed: PolicyVersion | None = None
    adapter: AdapterSpec | None = None

    def __init__(self, name: str, transport: str, views: dict[str, torch.Tensor]) -> None:
        self._views = views
        live = LiveWeights(views, {}, on_commit=self._on_commit)
        super().__init__(name, live, make_reader(transport, name))

    def _on_commit(self, version: PolicyVersion) -> None:
        self.committed = version

    async def digest(self, role: Role) -> str:
        return digest_tensors((n, t) for n, t in self._views.items() if is_draft(n) == (role == "draft"))
