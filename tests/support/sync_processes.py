"""Replicas and trainer ranks for the parameter sync tests: real processes and transports, called over pipes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch

from asyncrl.config.schema import DeadlinesConfig, ParamSyncConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.buckets import Filled
from asyncrl.param_sync.digest import digest_tensors, dtype_name
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.param_sync.manifest import Manifest, Role, TensorSpec
from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.param_sync.sender import Sender
from asyncrl.param_sync.session import SyncReport, SyncSession
from asyncrl.param_sync.session_protocol import Offer, SendPlan, SendReport
from asyncrl.param_sync.transports.base import BucketWriter
from asyncrl.param_sync.transports.choose import make_reader, make_writer
from asyncrl.param_sync.weight_receiver import LocalReceiver
from asyncrl.types.versions import PolicyVersion
from benchmarks.remote import Remote, context
from tests.support.collective_processes import HOST, resources

Tensors = dict[str, torch.Tensor]
BUCKET_BYTES = 4096
ZERO_COPY_BYTES = 700  # lower than in production, so that a few of the small weights take the zero-copy path
TIED = {"lm_head.weight": "embed.weight"}


def weights(seed: int) -> Tensors:
    """A small model with every awkward case: bf16, an odd size, an empty tensor, one larger than a bucket, slices of a
    fused parameter, strided tensors (one larger than a bucket), a draft."""
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
    """An engine that holds weights and records its calls."""

    def __init__(self, views: Tensors) -> None:
        self.views = views
        self.calls: list[str] = []
        self.receiver = LiveWeights(views, TIED, on_commit=lambda v: self.calls.append(f"commit {v}"))

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

    async def digest(self, role: Role) -> str:
        return digest(self.views, role)


class ReplicaProcess(EngineSession):
    """A replica session that reports its calls; runs in a replica's process."""

    def __init__(self, name: str, transport: str, extra: Tensors) -> None:
        self.engine = WeightsEngine(weights(0) | extra)
        super().__init__(name, self.engine, LocalReceiver(name, self.engine.receiver, make_reader(transport, name)))

    async def look(self) -> dict[str, Any]:
        digests = {role: digest(self.engine.views, role) for role in ("target", "draft")}
        return {"calls": self.engine.calls, "digests": digests, "intact": self.engine.receiver.intact()}

    async def resources(self) -> dict[str, int]:
        return resources()

    async def strike(self, phase: str, number: signal.Signals) -> None:
        """Send this process a signal once, during a phase."""
        engine, receiver = self.engine, self.engine.receiver
        methods_of: dict[str, list[tuple[Any, str]]] = {
            "plan": [(receiver, "open")],
            "pause": [(engine, "pause")],
            "unload": [(engine, "release_kv")],
            "transfer": [(self._receiver, "_take"), (self._receiver, "_stage")],  # whichever comes first
            "load": [(self._receiver, "_take")],
            "verify": [(engine, "digest")],
            "commit": [(receiver, "commit")],
            "reload": [(engine, "restore_kv")],
            "resume": [(engine, "resume")],
        }
        strike(methods_of[phase], number)


def strike(methods: Sequence[tuple[Any, str]], number: signal.Signals, at: int = 0) -> None:
    """Send this process a signal before the call number ``at`` (from 0) of these methods, then make the call."""
    calls = 0

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                # To this thread: a signal to the process may reach another thread first, while this one continues.
                signal.pthread_kill(threading.get_ident(), number)
            return method(*args)

        return call

    for owner, name in methods:
        setattr(owner, name, counted(getattr(owner, name)))


class DamagingWriter:
    """A writer that, if ``damage`` is set, flips one bit of the next bucket after its checksum was taken: in the
    bucket's buffer, or in its first zero-copy part if it has no others."""

    def __init__(self, writer: BucketWriter) -> None:
        self._writer, self.damage = writer, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def buffer(self) -> torch.Tensor:
        self._last = self._writer.buffer()
        return self._last

    def publish(self, filled: Filled) -> None:
        if self.damage:
            self.damage = False
            if filled.zero_copy.keys() == {part.name for part in filled.parts}:
                name, tensor = next(iter(filled.zero_copy.items()))
                damaged = tensor.clone()
                damaged[0] ^= 1
                filled = filled._replace(zero_copy={**filled.zero_copy, name: damaged})
            else:
                self._last[0] ^= 1
        del self._last
        self._writer.publish(filled)


class RankProcess:
    """Sends `weights(version.number)`; runs in a trainer rank's process.

    The export blocks once before its ``hold_at``-th tensor, until ``release``; before ``fail_at`` it raises."""

    def __init__(self, sender: int, transport: str, share: slice) -> None:
        writer = make_writer(transport, sender, BUCKET_BYTES, HOST)
        if writer.zero_copy_from is not None:
            writer.zero_copy_from = ZERO_COPY_BYTES
        self._writer = DamagingWriter(writer)
        self._sender = Sender(f"trainer/{sender}", self._writer)
        self._share = share
        self._thread = ThreadPoolExecutor(1)  # a rank computes and sends in one thread
        self._gate = context.Event()
        self._reached = asyncio.Event()
        self.hold_at = self.fail_at = self.exported = -1

    async def set(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    async def damage_next(self) -> None:
        self._writer.damage = True

    async def held(self) -> None:
        """Wait until the export blocks at ``hold_at``."""
        await self._reached.wait()
        self._reached.clear()

    async def release(self) -> None:
        self._gate.set()

    async def look(self) -> dict[str, Any]:
        return {"exported": self.exported}

    async def resources(self) -> dict[str, int]:
        return resources()

    async def strike(self, call: str, number: signal.Signals) -> None:
        """Send this process a signal at a call: ``offer``, or in the transfer ``open``, ``publish`` of the third
        bucket, ``finish``."""
        owner = {"offer": self, "open": self._sender}.get(call, self._writer)
        strike([(owner, call)], number, at=2 if call == "publish" else 0)

    async def offer(self) -> Offer:
        return Offer(self.manifest(), self._sender.address)

    def manifest(self) -> Manifest:
        return manifest_of(weights(0))

    async def send(self, plan: SendPlan) -> SendReport:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._send, plan, loop)

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
    replicas: int,
    shares: tuple[slice, ...] = (slice(None),),
    extra: Tensors | None = None,
    transport: str = "shared_memory",
) -> AsyncIterator[tuple[list[Remote], dict[str, Remote]]]:
    """Starts trainer ranks (each with its share of the tensors) and replicas (the last with ``extra`` parameters).

    On exit it ends all processes in the yielded containers, including those that the test added."""
    ranks = [Remote(RankProcess, i, transport, share) for i, share in enumerate(shares)]
    others: dict[str, Remote] = {}
    for i in range(replicas):
        more = (extra or {}) if i == replicas - 1 else {}
        others[f"replica/{i}"] = Remote(ReplicaProcess, f"replica/{i}", transport, more)
    try:
        yield ranks, others
    finally:
        for remote in [*ranks, *others.values()]:
            remote.end()


def version(number: int) -> PolicyVersion:
    return PolicyVersion(0, number)


def fleet_of(replicas: dict[str, Remote]) -> Fleet:
    fleet = Fleet()
    for name, handle in replicas.items():
        fleet.add(name, handle)
    return fleet


async def sync(
    ranks: Sequence[Remote],
    fleet: Fleet,
    number: int,
    settings: ParamSyncConfig | None = None,
    recorder: Recorder | None = None,
) -> SyncReport:
    senders = {f"trainer/{i}": rank for i, rank in enumerate(ranks)}
    return await SyncSession(senders, fleet, settings or config(), recorder).run(version(number))


def digests(number: int) -> dict[Role, str]:
    """Digests of a version's weights, as a replica's `look` returns them."""
    return {role: digest(weights(number), role) for role in ("target", "draft")}


def segments(pid: int) -> list[Any]:
    """Bucket memory that a process has mapped or open, and its names in /dev/shm."""
    with open(f"/proc/{pid}/maps") as maps:
        mapped = [line for line in maps if "asyncrl-bucket" in line]
    opened = [fd for fd in os.listdir(f"/proc/{pid}/fd") if "asyncrl-bucket" in os.readlink(f"/proc/{pid}/fd/{fd}")]
    return mapped + opened + [name for name in os.listdir("/dev/shm") if "asyncrl-bucket" in name]


def config(**changes: Any) -> ParamSyncConfig:
    deadlines = DeadlinesConfig(**{f"{phase}_s": 20.0 for phase in "plan pause unload verify commit".split()})
    return replace(ParamSyncConfig(pause="abort", kv="unload", deadlines=deadlines), **changes)


def hurried(**deadlines: float) -> ParamSyncConfig:
    return config(deadlines=DeadlinesConfig(**deadlines))
