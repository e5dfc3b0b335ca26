"""Broadcast from rank 0 of a process group to all other ranks: the interface of a collective backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class GroupRendezvous:
    """Parameters with which one member joins one generation of a group. The members meet at ``store_host`` and
    ``store_port``; ``timeout_s`` limits every single call. ``chained``: on the CPU each member forwards to the next;
    False for groups with foreign members, which use the backend's own broadcast."""

    generation: str
    rank: int
    size: int
    store_host: str
    store_port: int
    timeout_s: float
    chained: bool = True


class BroadcastChannel(Protocol):
    """Broadcasts from rank 0 to all others. Every member handles the same parts in the same order: it posts the receive
    of each, and forwards the part once it has arrived."""

    begins_with_sends: bool  # True if this member receives nothing

    def split(self, piece: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a flat tensor."""

    def receive(self, part: torch.Tensor) -> Any:
        """Post the receive; returns a work object to wait for."""

    def send(self, part: torch.Tensor) -> list[Any]:
        """Post the sends that this member owes to others. May be called from another thread."""

    def end_calls(self) -> bool:
        """Break the connections. True if nothing writes to a tensor from now on; otherwise wait until every posted
        receive has failed, which takes moments. May be called from any thread."""


class CollectiveBackend(Protocol):
    """A kind of process group."""

    name: str

    def device_for(self, device: torch.device | str | None) -> torch.device:
        """Device of the buckets in this process; ``device`` None: the backend's default. Raises ValueError if the
        backend cannot run here."""
        ...

    def open_channel(self, rendezvous: GroupRendezvous, host: str, device: torch.device) -> BroadcastChannel:
        """Join a group; waits for all its members. ``host``: this member's address on the data's network."""
        ...


class GroupBroadcast:
    """Implements `BroadcastChannel` by the group's own collective: even rank 0 calls ``receive``."""

    begins_with_sends = False

    def __init__(self, group: Any, rendezvous: GroupRendezvous) -> None:
        self._group, self._rendezvous = group, rendezvous
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0

    def split(self, piece: torch.Tensor) -> Sequence[torch.Tensor]:
        return [piece]

    def receive(self, part: torch.Tensor) -> Any:
        return self._group.broadcast([part], self._options)

    def send(self, part: torch.Tensor) -> list[Any]:
        return []

    def end_calls(self) -> bool:
        self._group.abort()
        return False


def join_store(rendezvous: GroupRendezvous) -> dist.Store:
    """A separate connection to the store, so that a blocking call on it delays no other."""
    timeout = timedelta(seconds=rendezvous.timeout_s)
    host, port = rendezvous.store_host, rendezvous.store_port
    client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(rendezvous.generation, client)


def with_index(device: torch.device) -> torch.device:
    """Give a CUDA device without an index that of this thread's current one, so that it means the same in all
    threads."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
