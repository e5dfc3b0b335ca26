"""Syncs of the real size between processes on one device: the bare transfer, whole sessions, and NCCL."""

from __future__ import annotations

import asyncio
import functools
import statistics
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.config.schema import DeadlinesConfig, EngineConfig, ParamSyncConfig
from asyncrl.models.checkpoint import read_tensors
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.param_sync.sender import Sender
from asyncrl.param_sync.session import SyncSession
from asyncrl.param_sync.transports.base import TRANSPORTS
from asyncrl.param_sync.transports.choose import make_writer
from asyncrl.rollouter.engines.base import Request, SamplingParams
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.types.versions import PolicyVersion
from benchmarks.gpu.models import Run, random_model
from benchmarks.param_sync import HOST, Link, Rank, manifest_of, medians, started
from benchmarks.remote import Remote

SLOTS, ROUNDS = 64, 5
MODES: tuple[tuple[Literal["keep", "abort"], Literal["keep", "recompute", "unload"]], ...] = (
    ("keep", "keep"),
    ("keep", "recompute"),
    ("abort", "unload"),
)


def transport_of(run: Run) -> str:
    return "cuda_ipc" if run.device == "cuda" else "shared_memory"


def transfer(run: Run) -> dict[str, Any]:
    """The model's tensors to another process on the device, into live parameters, digests included. ``of_copies``: the
    time of two copies within the device, since every byte goes into a bucket and out of it, over that of the transfer;
    the copies are tensor by tensor, or (``of_flat_copies``) of all bytes at once."""
    tensors = {name: view.contiguous() for name, view in random_model(run, 16).named_views().items()}
    nbytes = manifest_of(tensors).nbytes
    other = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    flat, flat_other = (torch.zeros(nbytes, dtype=torch.uint8, device=run.device) for _ in range(2))

    def tensor_by_tensor() -> None:
        for to, of in ((other, tensors), (tensors, other)):
            for name, tensor in of.items():
                to[name].copy_(tensor)

    def at_once() -> None:
        flat_other.copy_(flat)
        flat.copy_(flat_other)

    name = transport_of(run)
    link = Link(name, tensors, TRANSPORTS.find(name).bucket_bytes)
    each_s, flat_s, digested_s, checksummed_s = medians(
        ROUNDS,
        lambda: run.seconds(tensor_by_tensor),
        lambda: run.seconds(at_once),
        functools.partial(link.transfer_s, checksum=False),
        functools.partial(link.transfer_s, checksum=True),
    )
    link.close()
    return {
        "tensors": len(tensors),
        "gib": round(nbytes / 2**30, 3),
        "copies_ms": round(1e3 * each_s, 2),
        "flat_copies_ms": round(1e3 * flat_s, 2),
        "transfer_ms": round(1e3 * digested_s, 2),
        "checksummed_ms": round(1e3 * checksummed_s, 2),
        "gb_per_s": round(nbytes / digested_s / 1e9, 1),
        "of_copies": round(each_s / digested_s, 3),
        "of_flat_copies": round(flat_s / digested_s, 3),
    }


class DeviceRank(Rank):
    """Sends the checkpoint's tensors from the device."""

    def __init__(self, folder: str, device: str, transport: str) -> None:
        torch.set_num_threads(1)
        self._tensors = {name: tensor.to(device) for name, tensor in read_tensors(folder).items()}
        bucket_bytes = TRANSPORTS.find(transport).bucket_bytes
        self._sender = Sender("trainer/0", make_writer(transport, 0, bucket_bytes, HOST))


class Replica:
    """A native engine that generates for requests without end, and notes the free memory around its KV unloads."""

    def __init__(self, folder: str, device: Literal["cpu", "cuda"], transport: str, context_tokens: int) -> None:
        torch.set_num_threads(1)
        self._device, self._context, self._number = device, context_tokens, 0
        options = EngineConfig(slots=SLOTS, max_context_tokens=context_tokens, device=device)
        self._engine = NativeEngine(folder, options, load_weights=False)
        receiver = self._engine.weight_receiver("replica/0", transport)
        self._session = EngineSession("replica/0", self._engine, receiver)
        self._freed: list[int] = []

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return getattr(self._session, method)

    async def generate(self, seconds: float) -> float:
        """Keep all slots busy for ``seconds``; returns tokens per second."""
        vocabulary = self._engine._model.config.vocab_size
        self._number += 1
        prompts = np.random.default_rng(self._number).integers(0, vocabulary, (2 * SLOTS, 32)).astype(np.int32)
        most = self._context - 32
        await self._engine.submit(
            [
                Request(f"{self._number}.{i}", f"{i}", prompt, 0, i, 0, most, SamplingParams())
                for i, prompt in enumerate(prompts)
            ]
        )
        loop = asyncio.get_running_loop()
        began, tokens = loop.time(), 0
        while loop.time() - began < seconds:
            tokens += len((await self._engine.events()).tokens)
        return tokens / (loop.time() - began)

    async def unload(self, *args: Any) -> int:
        before = self._free()
        freed = int(await self._session.unload(*args))
        self._freed.append(self._free() - before)
        return freed

    async def device_freed(self) -> list[int]:
        """Bytes by which the device's free memory grew in each unload."""
        return self._freed

    def _free(self) -> int:
        return torch.cuda.mem_get_info()[0] if self._device == "cuda" else 0


def session(run: Run) -> dict[str, Any]:
    """Whole sync sessions to a replica that generates, with its KV kept, recomputed and unloaded: the pause and its
    phases, and the memory that the unload frees on the device."""
    return asyncio.run(_session(run))


async def _session(run: Run) -> dict[str, Any]:
    transport, folder, context = transport_of(run), str(run.checkpoint), 64 if run.tiny else 2048
    rank = Remote(DeviceRank, folder, run.device, transport)
    engine = Remote(Replica, folder, run.device, transport, context)
    fleet, number, figures = Fleet(), 0, {}
    fleet.add("replica/0", engine)
    config = replace(ParamSyncConfig(), deadlines=DeadlinesConfig())
    try:
        await SyncSession({"trainer/0": rank}, fleet, replace(config, pause="abort")).run(PolicyVersion(0, 0))
        for pause, kv in MODES:
            reports, rates = [], []
            for _ in range(3):
                rates.append(await engine.generate(0.3 if run.tiny else 1.5))
                number += 1
                own = replace(config, pause=pause, kv=kv)
                reports.append(await SyncSession({"trainer/0": rank}, fleet, own).run(PolicyVersion(0, number)))
                assert not reports[-1].evicted
            middle = lambda values: round(1e3 * statistics.median(values), 1)
            figures[f"{pause}_{kv}"] = {
                "paused_ms": middle(sum(report.paused_s.values()) for report in reports),
                "phases_ms": {
                    phase: middle(report.seconds.get(phase, 0.0) for report in reports) for phase in reports[0].seconds
                },
                "freed_gib": round(statistics.median(sum(r.freed_bytes.values()) for r in reports) / 2**30, 3),
                "tokens_per_s": round(statistics.median(rates)),
            }
        figures["abort_unload"]["device_freed_gib"] = [round(n / 2**30, 3) for n in await engine.device_freed()]
    finally:
        rank.end()
        engine.end()
    return figures


def nccl(run: Run) -> dict[str, Any]:
    """Whether NCCL joins two processes on one device; if not, in its words."""
    if run.device != "cuda":
        return {"joined": None, "said": "no CUDA device"}
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    pipe, process = started(_join, store.port, 1)
    said = _joined(store, 0)
    theirs = pipe.recv() if pipe.poll(60) else "no answer within 60 s"
    process.kill()
    return {"joined": said == theirs == "joined", "said": said.splitlines()[0][:200]}


def _join(pipe: Connection, port: int, rank: int) -> None:
    pipe.send(_joined(dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False), rank))


def _joined(store: dist.TCPStore, rank: int) -> str:
    try:
        dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=40))
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        return "joined" if total.item() == 2 else f"summed to {total.item()}"
    except Exception as refusal:
        return next((line for line in str(refusal).splitlines() if "uplicate" in line), str(refusal))
