"""Replicas and trainer ranks for the parameter sync tests: real processes, real shared memory, calls over a pipe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch

from asyncrl.config.schema import DeadlinesConfig, ParamSyncConfig
from asyncrl.param_sync.buckets import Filled
from asyncrl.param_sync.digest import digest_tensors, dtype_name
from asyncrl.param_sync.endpoint import ReplicaEndpoint
from asyncrl.param_sync.live_receiver import LiveViewReceiver
from asyncrl.param_sync.manifest import Manifest, Role, TensorSpec
from asyncrl.param_sync.sender import Sender, SendPlan, SendReport
from asyncrl.param_sync.transports.shared_memory import SharedMemoryReader, SharedMemoryWriter
from asyncrl.sample import PolicyVersion
from benchmarks.remote import Remote, context

Tensors = dict[str, torch.Tensor]
BUCKET_BYTES = 4096
TIED = {"lm_head.weight": "embed.weight"}


def weights(seed: int) -> Tensors:
    """A small model with everything that is awkward: bf16, an odd size, an empty tensor, one larger than a bucket,
    slices of a fused parameter, strided tensors (one of them larger than a bucket), a draft."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)
    qkv, gate_up = rand(24, 16), rand(40, 96)
    return {
        "embed.weight": rand(67, 33).to(torch.bfloat16),
        "norm.weight": rand(7),
        "empty": torch.empty(0, 5),
        "scalar": rand(1)[0],
        "q.weight": qkv[:12],
        "k.weight": qkv[12:18],
        "v.weight": qkv[18:],
        "gate.weight": gate_up[:, :41],
        "up.weight": gate_up[:, 41:],
        "transposed.weight": rand(50, 60).t(),
        "step": torch.tensor([seed], dtype=torch.int64),
        "mask": rand(9) > 0,
        "mtp.proj.weight": rand(30, 31).to(torch.float16),
    }


def role_of(name: str) -> Role:
    return "draft" if name.startswith("mtp.") else "target"


def manifest_of(tensors: Tensors) -> Manifest:
    specs = [TensorSpec(n, dtype_name(t), tuple(t.shape), role_of(n)) for n, t in tensors.items()]
    return Manifest((*specs, TensorSpec("lm_head.weight", "bfloat16", (67, 33), "target", "embed.weight")))


def digest(tensors: Tensors, role: Role) -> str:
    return digest_tensors((n, t) for n, t in tensors.items() if role_of(n) == role)


class WeightsEngine:
    """An engine that holds weights and writes down what was asked of it."""

    def __init__(self, views: Tensors) -> None:
        self.views = views
        self.calls: list[str] = []
        self.receiver = LiveViewReceiver(views, TIED, on_commit=lambda v: self.calls.append(f"commit {v}"))

    async def pause(self, mode: str, deadline_s: float) -> int:
        self.calls.append(f"pause {mode}")
        return 0

    async def resume(self, version: PolicyVersion) -> None:
        self.calls.append(f"resume {version}")

    async def release_kv(self) -> int:
        self.calls.append("release_kv")
        return 0

    async def restore_kv(self) -> None:
        self.calls.append("restore_kv")

    async def flush_kv(self) -> None:
        self.calls.append("flush_kv")

    def receivers(self) -> list[LiveViewReceiver]:
        return [self.receiver]

    async def digest(self, role: Role) -> str:
        return digest(self.views, role)


class ReplicaProcess(ReplicaEndpoint):
    """Runs in a replica's process: the endpoint, and a look at what it did."""

    def __init__(self, name: str, extra: Tensors) -> None:
        self.engine = WeightsEngine(weights(0) | extra)
        super().__init__(name, self.engine, SharedMemoryReader(name))

    async def look(self) -> dict[str, Any]:
        fds = len(os.listdir("/proc/self/fd"))
        digests = {role: digest(self.engine.views, role) for role in ("target", "draft")}
        return {"calls": self.engine.calls, "fds": fds, "digests": digests, "intact": self.engine.receiver.intact()}


class DamagingWriter(SharedMemoryWriter):
    """Flips one bit of a bucket when told to, after its checksum was taken."""

    damage = False

    def buffer(self) -> torch.Tensor:
        self._last = super().buffer()
        return self._last

    def publish(self, filled: Filled) -> None:
        if self.damage:
            self.damage = False
            self._last[0] ^= 1
        del self._last
        super().publish(filled)


class RankProcess:
    """Runs in a trainer rank's process: sends `weights(version.number)`.

    The export stops before its ``hold_at``-th tensor, once, until ``release``; ``fail_at`` raises there."""

    def __init__(self, sender: int, share: slice) -> None:
        self._writer = DamagingWriter(sender, BUCKET_BYTES)
        self._sender = Sender(f"trainer/{sender}", self._writer)
        self._share = share
        self._gate = context.Event()
        self._reached = asyncio.Event()
        self.hold_at = self.fail_at = self.exported = -1

    async def set(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    async def damage_next(self) -> None:
        self._writer.damage = True

    async def held(self) -> None:
        """Returns when the export stands at ``hold_at``."""
        await self._reached.wait()
        self._reached.clear()

    async def release(self) -> None:
        self._gate.set()

    async def look(self) -> dict[str, Any]:
        return {"fds": len(os.listdir("/proc/self/fd")), "exported": self.exported}

    async def manifest(self) -> Manifest:
        return manifest_of(weights(0))

    async def address(self) -> Any:
        return self._sender.address

    async def send(self, plan: SendPlan) -> SendReport:
        loop = asyncio.get_running_loop()
        return await asyncio.to_thread(self._send, plan, loop)

    async def abort(self, session: str) -> None:
        self._sender.abort(session)

    async def close(self) -> None:
        self._sender.close()

    def _send(self, plan: SendPlan, loop: asyncio.AbstractEventLoop) -> SendReport:
        self._sender.open(plan)
        return self._sender.send(self._export(plan.version.number, loop))

    def _export(self, number: int, loop: asyncio.AbstractEventLoop) -> Iterator[tuple[str, torch.Tensor]]:
        for at, item in enumerate(list(weights(number).items())[self._share]):
            self.exported = at
            if self.exported == self.hold_at:
                self.hold_at = -1
                self._gate.clear()
                loop.call_soon_threadsafe(self._reached.set)
                self._gate.wait()
            if self.exported == self.fail_at:
                raise RuntimeError("the trainer ran out of memory")
            yield item
        self.exported += 1


@asynccontextmanager
async def processes(
    replicas: int, shares: tuple[slice, ...] = (slice(None),), extra: Tensors | None = None
) -> AsyncIterator[tuple[list[Remote], dict[str, Remote]]]:
    """Trainer ranks (each with its share of the tensors) and replicas (the last one with ``extra`` parameters)."""
    ranks = [Remote(RankProcess, i, share) for i, share in enumerate(shares)]
    others: dict[str, Remote] = {}
    for i in range(replicas):
        others[f"replica/{i}"] = Remote(ReplicaProcess, f"replica/{i}", (extra or {}) if i == replicas - 1 else {})
    try:
        yield ranks, others
    finally:
        for remote in [*ranks, *others.values()]:
            remote.end()


def config(**changes: Any) -> ParamSyncConfig:
    deadlines = DeadlinesConfig(**{f"{phase}_s": 20.0 for phase in "plan pause unload verify commit".split()})
    return replace(ParamSyncConfig(pause="abort", kv="unload", deadlines=deadlines), **changes)


def hurried(**deadlines: float) -> ParamSyncConfig:
    return config(deadlines=DeadlinesConfig(**deadlines))
