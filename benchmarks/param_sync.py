"""How fast weights travel: `python -m benchmarks.param_sync`. Ends with one line of JSON.

Two processes with one thread each; what is compared is measured in turn and the best of all rounds counts, so that
the ratios mean something on a machine that does other work too.

- ``shm_fraction_of_memcpy``: throughput of a transfer into live parameters, tensor digests included, over that of one
  ``memcpy`` of as many bytes; ``…_checksummed``: with the checksum of every bucket on both sides as well.
- ``bucketed_over_per_tensor``: a transfer of many small tensors in buckets against one bucket for each tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch

from asyncrl.param_sync.digest import dtype_name
from asyncrl.param_sync.live_receiver import LiveViewReceiver
from asyncrl.param_sync.manifest import Manifest, TensorSpec
from asyncrl.param_sync.sender import Sender, SendPlan
from asyncrl.param_sync.transports.shared_memory import SharedMemoryReader, SharedMemoryWriter
from asyncrl.sample import PolicyVersion

Tensors = dict[str, torch.Tensor]
MIB = 1024 * 1024


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


def receive_forever(pipe: Connection, manifest: Manifest) -> None:
    """A replica without an engine: joins a session for each address and session id that comes over the pipe."""
    torch.set_num_threads(1)
    live = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest}
    receiver = LiveViewReceiver(live, {}, on_commit=lambda version: None)
    reader = SharedMemoryReader("replica/0")
    with contextlib.suppress(EOFError):
        while True:
            session, address = pipe.recv()
            receiver.open(session, manifest)
            reader.connect(session, [address], 60)
            pipe.send("ready")
            for bucket in reader.buckets(60):
                receiver.take(bucket)
            receiver.verify()
            receiver.commit(PolicyVersion(0, 1))


class Link:
    """A sender here and a receiver in a process of its own."""

    def __init__(self, tensors: Tensors, bucket_bytes: int) -> None:
        self._tensors, self._manifest = tensors, manifest_of(tensors)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=receive_forever, args=(theirs, self._manifest), daemon=True)
        self._process.start()
        theirs.close()
        self._sender = Sender("trainer/0", SharedMemoryWriter(0, bucket_bytes))
        self._session = 0

    def transfer_s(self, checksum: bool) -> float:
        """Seconds from the first byte packed until the receiver has taken the last one."""
        self._session += 1
        self._pipe.send((f"s{self._session}", self._sender.address))
        assert self._pipe.recv() == "ready"
        version = PolicyVersion(0, self._session)
        plan = SendPlan(f"s{self._session}", version, self._manifest, ("replica/0",), 60, 60, checksum)
        started = time.perf_counter()
        self._sender.open(plan)
        report = self._sender.send(iter(self._tensors.items()))
        seconds = time.perf_counter() - started
        assert report.nbytes == self._manifest.nbytes
        assert not report.dropped
        return seconds

    def close(self) -> None:
        self._pipe.close()
        self._process.join()
        self._sender.close()


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def best(rounds: int, *measure: Callable[[], float]) -> list[float]:
    """The least of each measure over ``rounds``, in turn, after one round to warm up."""
    times = [[run() for run in measure] for _ in range(rounds + 1)]
    return [min(column) for column in zip(*times[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="bytes of the large transfer")
    parser.add_argument("--bucket-mib", type=int, default=4)
    parser.add_argument("--tensors", type=int, default=5000, help="tensors of the small transfer, 4 KiB each")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)

    tensors, bucket_bytes = large_and_small(args.mib * MIB), args.bucket_mib * MIB
    nbytes = manifest_of(tensors).nbytes
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    link = Link(tensors, bucket_bytes)
    memcpy_s, plain_s, checked_s = best(
        args.rounds,
        lambda: timed(lambda: np.copyto(target, source)),
        lambda: link.transfer_s(checksum=False),
        lambda: link.transfer_s(checksum=True),
    )
    link.close()

    small = many(args.tensors, 1024)
    small_bytes = manifest_of(small).nbytes
    bucketed, single = Link(small, bucket_bytes), Link(small, 4096)  # a bucket of a tensor's size holds just one
    bucketed_s, single_s = best(
        args.rounds, lambda: bucketed.transfer_s(checksum=True), lambda: single.transfer_s(checksum=True)
    )
    bucketed.close()
    single.close()

    rows = [
        (f"memcpy, {nbytes / MIB:.0f} MiB", nbytes, memcpy_s),
        ("shared memory, digests", nbytes, plain_s),
        ("shared memory, digests and checksums", nbytes, checked_s),
        (f"{args.tensors} tensors of 4 KiB, bucketed", small_bytes, bucketed_s),
        (f"{args.tensors} tensors of 4 KiB, one call each", small_bytes, single_s),
    ]
    print(f"{os.cpu_count()} cores, buckets of {args.bucket_mib} MiB, best of {args.rounds} rounds\n")
    print(f"{'':42}{'ms':>10}{'GB/s':>10}")
    for name, size, seconds in rows:
        print(f"{name:42}{seconds * 1e3:10.1f}{size / seconds / 1e9:10.2f}")
    figures = {
        "shm_fraction_of_memcpy": memcpy_s / plain_s,
        "shm_fraction_of_memcpy_checksummed": memcpy_s / checked_s,
        "bucketed_over_per_tensor": single_s / bucketed_s,
    }
    print("\n" + json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
