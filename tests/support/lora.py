"""A trainer rank with LoRA in this process that syncs engines, and comparisons of both on the same samples."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.config.schema import Config, LoraConfig
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.param_sync.sender import Sender
from asyncrl.param_sync.session import SyncReport, SyncSession
from asyncrl.param_sync.session_protocol import Offer, SendPlan, SendReport
from asyncrl.param_sync.transports.choose import make_writer
from asyncrl.rollouter.engines.base import Engine, Request, SamplingParams
from asyncrl.trainer.batches import build_batch
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from tests.support.trainer import make_config

PROMPT = [*range(5, 25)] * 8  # more than a block of vLLM's prefix cache


def lora_config(checkpoint: str, **options: Any) -> Config:
    """`make_config` with LoRA and a learning rate that moves the policy far; same ``options``."""
    config = make_config(checkpoint, **{"lr": 2e-2, **options})
    config.model.lora = LoraConfig(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj"])
    config.param_sync.pause = "abort"
    return config


class LoraTrainer:
    """Implements `asyncrl.param_sync.session_protocol.SenderSession` over ``rank``, and syncs engines with it. ::

    await trainer.join("replica/0", engine)
    report = await trainer.sync()  # all of them, to the next version
    """

    def __init__(self, rank: TrainerRank, config: Config, transport: str = "shared_memory") -> None:
        self.rank, self.config, self._transport = rank, config, transport
        self._sender = Sender("trainer/0", make_writer(transport, 0, 1 << 16, "127.0.0.1"))
        self._thread = ThreadPoolExecutor(1)
        self.fleet, self.version = Fleet(), PolicyVersion(0, 0)
        self._sessions: list[EngineSession] = []

    def join(self, name: str, engine: Engine) -> None:
        session = EngineSession(name, engine, engine.weight_receiver(name, self._transport))
        self._sessions.append(session)
        self.fleet.add(name, session)

    async def sync(self, **settings: Any) -> SyncReport:
        self.version = PolicyVersion(0, self.version.number + 1)
        chosen = replace(self.config.param_sync, **settings)
        return await SyncSession({"trainer/0": self}, self.fleet, chosen).run(self.version)

    async def offer(self) -> Offer:
        return Offer(self.rank.manifest(), self._sender.address)

    async def send(self, plan: SendPlan) -> SendReport:
        def send() -> SendReport:
            self._sender.open(plan)
            return self._sender.send(self.rank.export(plan.manifest.sends_base))

        return await asyncio.get_running_loop().run_in_executor(self._thread, send)

    async def abort(self, session: str) -> None:
        self._sender.abort(session)

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()
        self._sender.close()

    def learn(self, samples: list[Sample]) -> None:
        """Train one step on the samples. The reward is arbitrary; it only has to move the policy."""
        for s in samples:
            s.reward = float(s.sequences[0].tokens[0] % 7)
        self.rank.train(0, [self._group(samples).to_bytes()])

    def error(self, samples: list[Sample], temperature: float) -> float:
        """Largest difference between the samples' logprobs and the trainer's current ones."""
        sampled = np.concatenate([q.logprobs for s in samples for q in s.sequences])
        return float(np.abs(self.scores(samples, temperature) - sampled).max())

    def scores(self, samples: list[Sample], temperature: float) -> np.ndarray:
        """The trainer's logprobs of all their tokens, concatenated."""
        return self.rank._backend.outputs(build_batch([self._group(samples)]), temperature)["logprobs"]

    def _group(self, samples: list[Sample]) -> Group:
        return Group.from_samples("g", "p", 0, np.array(PROMPT), samples)


def requests(count: int, new: int = 12, name: str = "r", **sampling: Any) -> list[Request]:
    prompt = np.array(PROMPT, np.int32)
    return [
        Request(f"{name}{i}", "g", prompt, len(prompt), i, 0, new, SamplingParams(**sampling)) for i in range(count)
    ]


async def samples_of(engine: Engine, wanted: list[Request]) -> list[Sample]:
    """Generate these requests to their end."""
    await engine.submit(wanted)
    return await ResponseCollector(engine).of([r.id for r in wanted])


class ResponseCollector:
    """Collects an engine's responses, by request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._responses: dict[str, tuple[list[int], list[float], list[VersionSpan]]] = {}
        self._ended: set[str] = set()

    async def of(self, ids: list[str], tokens: int | None = None) -> list[Sample]:
        """These requests' samples, once all have ended or have ``tokens`` tokens."""
        while any(id not in self._ended and (tokens is None or len(self._of(id)[0]) < tokens) for id in ids):
            await self._listen()
        return [
            Sample.single(
                index=i,
                tokens=np.array(drawn, np.int32),
                logprobs=np.array(logprobs, np.float32),
                loss_mask=np.ones(len(drawn), bool),
                spans=list(spans),
                finish=FinishReason.LENGTH,
                reward=0.0,
            )
            for i, (drawn, logprobs, spans) in enumerate(map(self._of, ids))
        ]

    def ended(self, ids: list[str]) -> bool:
        return any(id in self._ended for id in ids)

    def _of(self, id: str) -> tuple[list[int], list[float], list[VersionSpan]]:
        return self._responses.setdefault(id, ([], [], []))

    async def _listen(self) -> None:
        events = await asyncio.wait_for(self._engine.events(), 60)
        for e, id in enumerate(events.ids):
            part = slice(events.offsets[e], events.offsets[e + 1])
            drawn, logprobs, spans = self._of(id)
            span = VersionSpan(len(drawn), events.versions[e], events.mixed_kv[e])
            if part.stop > part.start and (not spans or spans[-1][1:] != span[1:]):
                spans.append(span)
            drawn += events.tokens[part].tolist()
            logprobs += events.logprobs[part].tolist()
            if events.finish[e] is not None:
                assert events.finish[e] is not FinishReason.ERROR, events.errors
                self._ended.add(id)


def breaking_off(export):
    """An export that raises RuntimeError after its fifth tensor."""

    def broken(base):
        for number, item in enumerate(export(base)):
            if number == 5:
                raise RuntimeError("the trainer ran out of memory")
            yield item

    return broken
