"""Measures the speed of weight transfers and the length of pauses. The last line is JSON.

    python -m benchmarks.param_sync

Processes with one thread each on this machine; alternatives are measured in turns, and the results are medians. For
shared memory the median is also over several launches, since read speed depends on where a process's pages lie.

- ``shm_fraction_of_memcpy``: throughput of a transfer over shared memory into live parameters, tensor digests included,
  over that of copying the same tensors within one process; ``…_checksummed``: also with the checksum of every bucket on
  both sides.
- ``bucketed_over_per_tensor``: throughput of the same bytes as thousands of tensors, in buckets, over that of one call
  per tensor, each sent after the last one was received. (Two such calls in flight at once need a third of that time.)
- ``gloo_fraction_of_broadcast``: throughput of a transfer over gloo into live parameters, tensor digests included, over
  that of a bare gloo broadcast of one flat tensor of that size; ``…_checksummed``: also with the checksum of every
  bucket on both sides.
- ``session_over_floor``: a whole session between the quickstart's trainer rank and engine, idle in their Ray actors,
  over a copy of its weights and nine empty calls, one after the other: a frozen baseline, a call for each phase.
  ``session_over_calls_together``: over the copy and empty calls in the order in which a session makes its own.
- ``rolling_pause_ratio``: pause of a replica in a rolling update of four, over that of a single replica. The sender
  writes the weights once for all replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from asyncrl.config.schema import DeadlinesConfig, ParamSyncConfig
from asyncrl.param_sync.buckets import pack
from asyncrl.param_sync.digest import digest_tensors, dtype_name
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.param_sync.manifest import Manifest, Role, TensorSpec
from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.param_sync.sender import Sender
from asyncrl.param_sync.session import SyncReport, SyncSession
from asyncrl.param_sync.session_protocol import Offer, SendPlan, SendReport
from asyncrl.param_sync.transports.choose import make_reader, make_writer
from asyncrl.param_sync.transports.shared_memory import SharedMemoryWriter
from asyncrl.param_sync.weight_receiver import LocalReceiver
from asyncrl.types.versions import PolicyVersion
from benchmarks.remote import Remote
from benchmarks.sync_session import session_times

Tensors = dict[str, torch.Tensor]
MIB = 1024 * 1024
HOST = "127.0.0.1"


def large_and_small(total_bytes: int) -> Tensors:
    """64 large tensors and 400 small ones, bfloat16."""
    sizes = [("small", 400, 2048), ("large", 64, (total_bytes // 2 - 400 * 2048) // 64)]
    generator = torch.Generator().manual_seed(0)
    return {
        f"{kind}.{i}": torch.randn(n, generator=generator).to(torch.bfloat16)
        for kind, count, n in sizes
        for i in range(count)
    }


def many(count: int, elements: int) -> Tensors:
    return {f"layer.{i}.weight": torch.full((elements,), float(i)) for i in range(count)}


def manifest_of(tensors: Tensors) -> Manifest:
    return Manifest(tuple(TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()))


# -- one sender, one replica -------------------------------------------------------------------------------------------


def receive_forever(pipe: Connection, transport: str, manifest: Manifest, device: torch.device) -> None:
    """A replica without an engine: joins a session for each session id and address that arrives over the pipe."""
    torch.set_num_threads(1)
    live = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype), device=device) for t in manifest}
    receiver = LiveWeights(live, {}, on_commit=lambda version: None)
    reader = make_reader(transport, "replica/0")
    with contextlib.suppress(EOFError):
        while True:
            session, address = pipe.recv()
            receiver.open(session, manifest)
            reader.connect(session, [address], 60)
            pipe.send("ready")
            for bucket in reader.buckets(60, receiver.destination):
                receiver.take(bucket)
            receiver.verify()
            receiver.commit(PolicyVersion(0, 1))


class Link:
    """A sender in this process and a receiver in its own, with live tensors on the same device."""

    def __init__(
        self, transport: str, tensors: Tensors, bucket_bytes: int, writer: SharedMemoryWriter | None = None
    ) -> None:
        self._tensors, self._manifest = tensors, manifest_of(tensors)
        self._pipe, self._process = started(
            receive_forever, transport, self._manifest, next(iter(tensors.values())).device
        )
        self._writer = writer or make_writer(transport, 0, bucket_bytes, HOST)
        self._sender = Sender("trainer/0", self._writer)
        self._sessions = 0

    def transfer_s(self, checksum: bool) -> float:
        """Seconds from packing the first byte until the receiver has taken the last one."""
        session = self._joined()
        plan = SendPlan(session, PolicyVersion(0, 1), self._manifest, ("replica/0",), 60, 60, checksum)
        began = time.perf_counter()
        self._sender.open(plan)
        report = self._sender.send(iter(self._tensors.items()))
        seconds = time.perf_counter() - began
        assert report.nbytes == self._manifest.nbytes
        assert not report.dropped
        return seconds

    def undigested_s(self) -> float:
        """Seconds of a transfer without digests and checksums: the transport alone."""
        session = self._joined()
        began = time.perf_counter()
        self._writer.open(session, ("replica/0",), 60, 60)
        for filled in pack(self._tensors.items(), self._writer.buffer, checksum=False):
            self._writer.publish(filled)
        self._writer.finish()
        assert not self._writer.dropped
        return time.perf_counter() - began

    def _joined(self) -> str:
        """Start a session that the receiver has joined; returns its id."""
        self._sessions += 1
        self._pipe.send((f"s{self._sessions}", self._sender.address))
        assert self._pipe.recv() == "ready"
        return f"s{self._sessions}"

    def close(self) -> None:
        self._pipe.close()
        self._process.join()
        self._sender.close()


def started(target: Callable[..., None], *args: object) -> tuple[Connection, multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def receive_broadcasts(pipe: Connection, port: int, nbytes: int) -> None:
    torch.set_num_threads(1)
    group, flat = gloo_pair(port, rank=1), torch.zeros(nbytes, dtype=torch.uint8)
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            broadcast(group, flat)
            pipe.send("received")


def gloo_pair(port: int, rank: int) -> dist.ProcessGroupGloo:
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))


def broadcast(group: dist.ProcessGroupGloo, flat: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([flat], options).wait()


class Broadcast:
    """A bare gloo broadcast of one flat tensor between two processes."""

    def __init__(self, nbytes: int) -> None:
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._pipe, self._process = started(receive_broadcasts, self._store.port, nbytes)
        self._group, self._flat = gloo_pair(self._store.port, rank=0), torch.ones(nbytes, dtype=torch.uint8)

    def seconds(self) -> float:
        self._pipe.send("now")
        began = time.perf_counter()
        broadcast(self._group, self._flat)
        assert self._pipe.recv() == "received"
        return time.perf_counter() - began

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


# -- rolling updates ---------------------------------------------------------------------------------------------------


class Weights:
    """An engine that holds weights and generates nothing."""

    def __init__(self, manifest: Manifest) -> None:
        self._views = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest}
        self.weights = LiveWeights(self._views, {}, on_commit=lambda version: None)

    async def pause(self, mode: str, deadline_s: float) -> int:
        return 0

    async def resume(self, version: PolicyVersion) -> None: ...
    async def release_kv(self) -> int:
        return 0

    async def restore_kv(self) -> None: ...
    async def flush_kv(self) -> None: ...
    async def digest(self, role: Role) -> str:
        return digest_tensors(self._views.items() if role == "target" else [])


def replica(name: str, manifest: Manifest) -> EngineSession:
    engine = Weights(manifest)
    return EngineSession(name, engine, LocalReceiver(name, engine.weights, make_reader("shared_memory", name)))


class Rank:
    """Sends the weights that ``make`` returns, at every version."""

    def __init__(self, make: Callable[[], Tensors], bucket_bytes: int) -> None:
        self._tensors = make()
        self._sender = Sender("trainer/0", make_writer("shared_memory", 0, bucket_bytes, HOST))

    async def offer(self) -> Offer:
        return Offer(manifest_of(self._tensors), self._sender.address)

    async def send(self, plan: SendPlan) -> SendReport:
        def send() -> SendReport:
            self._sender.open(plan)
            return self._sender.send(iter(self._tensors.items()))

        return await asyncio.to_thread(send)

    async def abort(self, session: str) -> None:
        self._sender.abort(session)


async def rolling(replicas: int, mib: int, bucket_bytes: int, rounds: int) -> list[SyncReport]:
    deadlines = DeadlinesConfig(**{f"{phase}_s": 60.0 for phase in "plan pause unload transfer verify".split()})
    config = replace(ParamSyncConfig(), pause="abort", staging="full", rollout_update="rolling", deadlines=deadlines)
    rank, fleet = Remote(Rank, functools.partial(large_and_small, mib * MIB), bucket_bytes), Fleet()
    manifest = (await rank.offer()).manifest
    remotes = {f"replica/{i}": Remote(replica, f"replica/{i}", manifest) for i in range(replicas)}
    for name, remote in remotes.items():
        fleet.add(name, remote)
    reports = []
    for number in range(rounds + 1):
        session = SyncSession({"trainer/0": rank}, fleet, config)
        reports.append(await session.run(PolicyVersion(0, number)))
        assert not reports[-1].evicted
        assert reports[-1].nbytes == manifest.nbytes
    for remote in (rank, *remotes.values()):
        remote.end()
    return reports[1:]


def pause_s(reports: list[SyncReport]) -> float:
    """Median seconds over sessions and replicas."""
    return statistics.median(seconds for report in reports for seconds in report.paused_s.values())


# -- the benchmark -----------------------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(rounds: int, *measure: Callable[[], float]) -> list[float]:
    """Median of each measure over ``rounds``, in turns, after one warm-up round."""
    times = [[run() for run in measure] for _ in range(rounds + 1)]
    return [statistics.median(column) for column in zip(*times[1:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the large transfer")
    parser.add_argument("--bucket-mib", type=int, default=4)
    parser.add_argument("--gloo-bucket-mib", type=int, default=32)
    parser.add_argument("--tensors", type=int, default=5000, help="number of tensors in the per-tensor measurement")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--launches", type=int, default=5, help="launches of the shared-memory link")
    args = parser.parse_args()
    torch.set_num_threads(1)

    tensors, bucket_bytes = large_and_small(args.mib * MIB), args.bucket_mib * MIB
    nbytes = manifest_of(tensors).nbytes
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    launches = []
    for _ in range(args.launches):
        link = Link("shared_memory", tensors, bucket_bytes)
        launches.append(
            medians(
                args.rounds,
                lambda: timed(lambda: [live[name].copy_(tensor) for name, tensor in tensors.items()]),
                lambda: link.transfer_s(checksum=False),  # noqa: B023 (used at once)
                lambda: link.transfer_s(checksum=True),  # noqa: B023
            )
        )
        link.close()
    memcpy_s, plain_s, checked_s = (statistics.median(column) for column in zip(*launches, strict=True))

    small = many(args.tensors, nbytes // args.tensors // 64 * 16)
    small_bytes = manifest_of(small).nbytes
    bucketed = Link("shared_memory", small, bucket_bytes)
    # a bucket of a tensor's size holds one tensor, and with one buffer each waits until the last one is received
    one_each = small_bytes // args.tensors
    single = Link("shared_memory", small, one_each, SharedMemoryWriter(0, one_each, buffers=1))
    bucketed_s, single_s = medians(
        args.rounds, lambda: bucketed.transfer_s(checksum=True), lambda: single.transfer_s(checksum=True)
    )
    bucketed.close()
    single.close()

    gloo, bare = Link("gloo", tensors, args.gloo_bucket_mib * MIB), Broadcast(nbytes)
    gloo_s, gloo_checked_s, bare_s = medians(
        args.rounds,
        lambda: gloo.transfer_s(checksum=False),
        lambda: gloo.transfer_s(checksum=True),
        bare.seconds,
    )
    gloo.close()
    bare.close()

    session = session_times(3 * args.rounds)
    counts = (1, 2, 4)
    pauses = [pause_s(asyncio.run(rolling(n, args.mib, bucket_bytes, args.rounds))) for n in counts]

    rows = [
        (f"memcpy, {nbytes / MIB:.0f} MiB", nbytes, memcpy_s),
        ("shared memory, digests", nbytes, plain_s),
        ("shared memory, digests and checksums", nbytes, checked_s),
        (f"{args.tensors} tensors, bucketed", small_bytes, bucketed_s),
        (f"{args.tensors} tensors, one call each", small_bytes, single_s),
        ("bare gloo broadcast", nbytes, bare_s),
        ("gloo, digests", nbytes, gloo_s),
        ("gloo, digests and checksums", nbytes, gloo_checked_s),
        *((f"pause per replica, rolling over {n}", nbytes, seconds) for n, seconds in zip(counts, pauses, strict=True)),
    ]
    print(f"{os.cpu_count()} cores, buckets of {args.bucket_mib} MiB, medians of {args.rounds} rounds\n")
    print(f"{'':42}{'ms':>10}{'GB/s':>10}")
    for name, size, seconds in rows:
        print(f"{name:42}{seconds * 1e3:10.1f}{size / seconds / 1e9:10.2f}")
    phases = ", ".join(f"{phase} {seconds * 1e3:.1f}" for phase, seconds in session.phases_s.items())
    print(f"{'a session of the quickstart':42}{session.session_s * 1e3:10.1f}  {phases}")
    floor_ms = [s * 1e3 for s in (session.copy_s, session.calls_s, session.together_s)]
    print(f"{'its copy; empty calls, one by one, together':42}{' '.join(f'{ms:10.1f}' for ms in floor_ms)}")
    figures = {
        "shm_fraction_of_memcpy": memcpy_s / plain_s,
        "shm_fraction_of_memcpy_checksummed": memcpy_s / checked_s,
        "bucketed_over_per_tensor": single_s / bucketed_s,
        "gloo_fraction_of_broadcast": bare_s / gloo_s,
        "gloo_fraction_of_broadcast_checksummed": bare_s / gloo_checked_s,
        "session_over_floor": session.session_s / (session.copy_s + session.calls_s),
        "session_over_calls_together": session.session_s / (session.copy_s + session.together_s),
        "rolling_pause_ratio": pauses[-1] / pauses[0],
    }
    print("\n" + json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
