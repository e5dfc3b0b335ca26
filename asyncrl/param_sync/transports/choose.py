"""Which transport joins senders and replicas, given where they are, and how to make its two ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.param_sync.transports.base import BucketReader, BucketWriter

TRANSPORTS = ("cuda_ipc", "nccl", "shared_memory", "gloo")

MIB = 1024 * 1024
#: the size of a bucket where none is configured: in shared memory two should stay in the cache between the two ends; a
#: collective costs half a millisecond however little it carries
BUCKET_BYTES = {"shared_memory": 4 * MIB, "cuda_ipc": 32 * MIB, "nccl": 32 * MIB, "gloo": 32 * MIB}


class Place(NamedTuple):
    """Where an end of the sync is. ``device``: its GPU, unique in the cluster; None: on the CPU."""

    machine: str
    device: str | None = None


class Choice(NamedTuple):
    transport: str
    why: str


class TransportError(ValueError):
    """The transport that was asked for cannot join these places; the message says which can."""


def choose(wanted: str, senders: Sequence[Place], replicas: Sequence[Place]) -> Choice:
    """``wanted``: a transport, or ``auto`` for the fastest that fits. Raises TransportError for one that does not."""
    fitting = list(_fitting(senders, replicas))
    if wanted == "auto":
        return fitting[0]
    for choice in fitting:
        if choice.transport == wanted:
            return Choice(wanted, "as configured")
    others = ", ".join(f"{transport} ({why})" for transport, why in fitting)
    raise TransportError(
        f"param_sync.transport: {wanted} needs {_NEEDS[wanted]}; found senders {_told(senders)} and replicas "
        f"{_told(replicas)}. What fits: {others}"
    )


def make_writer(transport: str, sender: int, bucket_bytes: int, host: str) -> BucketWriter:
    """The sending end of rank ``sender``. ``bucket_bytes`` 0: what suits the transport. ``host``: its machine's address
    on the network where the replicas are."""
    bucket_bytes = bucket_bytes or BUCKET_BYTES[transport]
    if transport == "shared_memory":
        from asyncrl.param_sync.transports.shared_memory import SharedMemoryWriter

        return SharedMemoryWriter(sender, bucket_bytes)
    if transport == "cuda_ipc":
        from asyncrl.param_sync.transports.cuda_ipc import CudaIpcWriter

        return CudaIpcWriter(sender, bucket_bytes)
    from asyncrl.param_sync.transports.collective import CollectiveWriter

    return CollectiveWriter(sender, bucket_bytes, host, "nccl" if transport == "nccl" else "gloo")


def make_reader(transport: str, who: str) -> BucketReader:
    """The receiving end of replica ``who``."""
    if transport == "shared_memory":
        from asyncrl.param_sync.transports.shared_memory import SharedMemoryReader

        return SharedMemoryReader(who)
    if transport == "cuda_ipc":
        from asyncrl.param_sync.transports.cuda_ipc import CudaIpcReader

        return CudaIpcReader(who)
    from asyncrl.param_sync.transports.collective_reader import CollectiveReader

    return CollectiveReader(who, "nccl" if transport == "nccl" else "gloo")


_NEEDS = {
    "cuda_ipc": "all senders and replicas on one and the same GPU",
    "shared_memory": "all senders and replicas on one machine",
    "nccl": "each sender and replica on a GPU of its own",
    "gloo": "nothing but a network",
}


def _fitting(senders: Sequence[Place], replicas: Sequence[Place]) -> list[Choice]:
    """All that fit, the fastest first."""
    everyone = [*senders, *replicas]
    machines = len({place.machine for place in everyone})
    devices = [place.device for place in everyone]
    found = []
    if None not in devices and len(set(devices)) == 1:
        found.append(Choice("cuda_ipc", f"all on GPU {devices[0]}"))
    if None not in devices and len(set(devices)) == len(devices):  # NCCL refuses two members on one GPU
        found.append(Choice("nccl", f"{len(senders)} + {len(replicas)} GPUs of their own"))
    # Through the host, also from GPU to GPU where they are neither all the same nor all different.
    mixed = "; their GPUs are neither one for all nor one for each" if not found and any(devices) else ""
    if machines == 1:
        found.append(Choice("shared_memory", f"all on one machine{mixed}"))
    found.append(Choice("gloo", f"{machines} machine{'s' if machines > 1 else ''}, over the network{mixed}"))
    return found


def _told(places: Sequence[Place]) -> str:
    return ", ".join(f"{place.machine}{'/' + place.device if place.device else ' (CPU)'}" for place in places)
