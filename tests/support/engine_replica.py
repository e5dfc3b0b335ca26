"""One replica of a real engine on the CPU, and a sender in this process that syncs a test's weights."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from asyncrl.config.schema import Config, EngineConfig, ModelConfig, MTPConfig, ParamSyncConfig, RolloutConfig
from asyncrl.models.checkpoint import is_draft
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.digest import dtype_name
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.manifest import Manifest, TensorSpec
from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.param_sync.sender import Sender
from asyncrl.param_sync.session import SyncReport, SyncSession
from asyncrl.param_sync.session_protocol import Offer, SendPlan, SendReport
from asyncrl.param_sync.transports.choose import make_writer
from asyncrl.rollouter.engines.base import ENGINES, EventBatch, Request, SamplingParams
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion
from tests.support.sync_processes import DamagingWriter

Tensors = Mapping[str, torch.Tensor]


def replica_config(
    name: str,
    checkpoint: Path,
    *,
    mtp: MTPConfig | None = None,
    pause: str = "abort",
    kv: str = "unload",
    **engine: Any,
) -> Config:
    options = {"name": name, "slots": 8, "max_context_tokens": 1024, "device": "cpu", "dtype": "float32"}
    return Config(
        name="test",
        model=ModelConfig(path=str(checkpoint)),
        rollout=RolloutConfig(agent_loop="conversations", engine=EngineConfig(**(options | engine))),
        mtp=mtp or MTPConfig(),
        param_sync=ParamSyncConfig(pause=pause),
    )


class TensorRank:
    """Implements `asyncrl.param_sync.session_protocol.SenderSession` for `tensors`, in a thread."""

    def __init__(self, transport: str) -> None:
        self.writer = DamagingWriter(make_writer(transport, 0, 1 << 20, "127.0.0.1"))
        self._sender = Sender("trainer/0", self.writer)
        self._thread = ThreadPoolExecutor(1)
        self.tensors: Tensors = {}
        self.tied: tuple[TensorSpec, ...] = ()
        self.break_at = ""

    async def offer(self) -> Offer:
        specs = [
            TensorSpec(name, dtype_name(t), tuple(t.shape), "draft" if is_draft(name) else "target")
            for name, t in self.tensors.items()
        ]
        return Offer(Manifest((*specs, *self.tied)), self._sender.address)

    async def send(self, plan: SendPlan) -> SendReport:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._send, plan)

    async def abort(self, session: str) -> None:
        self._sender.abort(session)

    def _send(self, plan: SendPlan) -> SendReport:
        self._sender.open(plan)
        return self._sender.send(self._export())

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            if name == self.break_at:
                raise RuntimeError("the trainer ran out of memory")
            yield name, tensor

    def close(self) -> None:
        self._sender.close()


class Replica:
    """A started engine, its session, its sender and its recorder."""

    def __init__(self, engine: Any, config: Config, transport: str, recorder: Recorder) -> None:
        self.engine, self.config, self.recorder = engine, config, recorder
        self.receiver = engine.weight_receiver("replica/0", transport)
        self.session = EngineSession("replica/0", engine, self.receiver)
        self.rank = TensorRank(transport)
        self.fleet = Fleet()
        self.fleet.add("replica/0", self.session)
        self.version = PolicyVersion(0, 0)

    @classmethod
    async def start(cls, config: Config, transport: str = "shared_memory") -> Self:
        recorder = Recorder("replica/0")
        return cls(await ENGINES.find(config.rollout.engine.name).start(config, recorder), config, transport, recorder)

    async def sync(self, tensors: Tensors, pause: str = "abort", kv: str = "unload", **settings: Any) -> SyncReport:
        self.rank.tensors = tensors
        self.version = PolicyVersion(0, self.version.number + 1)
        chosen = dataclasses.replace(self.config.param_sync, pause=pause, kv=kv, **settings)
        return await SyncSession({"trainer/0": self.rank}, self.fleet, chosen).run(self.version)

    async def generate(self, requests: list[Request]) -> dict[str, Answer]:
        await self.engine.submit(requests)
        return await self.collect({r.id for r in requests})

    async def collect(self, ids: set[str], answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
        """Read events until all these requests have ended."""
        answers = answers if answers is not None else {}
        while any(id not in answers or answers[id].finish is None for id in ids):
            add(answers, await self.engine.events())
        return {id: answers[id] for id in ids}

    async def close(self) -> None:
        await self.engine.close()
        self.rank.close()


@dataclasses.dataclass
class Answer:
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[PolicyVersion] = dataclasses.field(default_factory=list)
    mixed_kv: list[bool] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""


def add(answers: dict[str, Answer], batch: EventBatch) -> None:
    for e, id in enumerate(batch.ids):
        answer = answers.setdefault(id, Answer())
        lo, hi = int(batch.offsets[e]), int(batch.offsets[e + 1])
        answer.tokens += batch.tokens[lo:hi].tolist()
        answer.logprobs += batch.logprobs[lo:hi].tolist()
        answer.versions += [batch.versions[e]] * (hi - lo)
        answer.mixed_kv += [batch.mixed_kv[e]] * (hi - lo)
        answer.finish = batch.finish[e]
        answer.error = batch.errors.get(id, answer.error)


def request(id: str, tokens: list[int], new: int, **sampling: Any) -> Request:
    prompt = np.array(tokens, np.int32)
    return Request(id, id.split("/")[0], prompt, len(prompt), 0, 0, new, SamplingParams(**sampling))
