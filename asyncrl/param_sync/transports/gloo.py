"""Transport over gloo: any network, weights on the CPU or copied through it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.param_sync.transports.broadcast import (
    BroadcastChannel,
    GroupBroadcast,
    GroupRendezvous,
    join_store,
    with_index,
)
from asyncrl.param_sync.transports.collective_transport import CollectiveTransport
from asyncrl.param_sync.transports.placement import Placements, mixed_gpus

_LINK_BYTES = 4 << 20  # size of a part that a chain forwards
_TAGS = 1 << 16  # far more than are in flight


class GlooTransport(CollectiveTransport):
    """Fits everywhere, so ``auto`` takes it last."""

    name = "gloo"
    auto_order = 40

    def route(self, senders: Placements, replicas: Placements) -> str:
        everyone = [*senders, *replicas]
        machines = len({placement.machine for placement in everyone})
        return f"{machines} machine{'s' if machines > 1 else ''}, over the network{mixed_gpus(everyone)}"

    def device_for(self, device: torch.device | str | None) -> torch.device:
        return with_index(torch.device(device or "cpu"))

    def open_channel(self, rendezvous: GroupRendezvous, host: str, device: torch.device) -> BroadcastChannel:
        gloo: Any = dist.ProcessGroupGloo  # its type stub lacks the options
        options = gloo._Options()
        options._timeout = timedelta(seconds=rendezvous.timeout_s)
        options._devices = [gloo.create_device(hostname=host)]
        group = gloo(join_store(rendezvous), rendezvous.rank, rendezvous.size, options)
        chained = rendezvous.chained and device.type == "cpu"
        return _Chain(group, rendezvous) if chained else _GlooBroadcast(group, rendezvous)


TRANSPORT = GlooTransport()


class _GlooBroadcast(GroupBroadcast):
    """gloo's own broadcast, which also sends device tensors, through the host."""

    def end_calls(self) -> bool:
        self._close()
        return False

    def _close(self) -> bool:
        """Close all connections; True if they are closed. gloo's own abort does nothing, but a receive that times out
        closes all connections and fails most calls: all except sends and receives with some bytes transferred."""
        for rank in self._others():
            with contextlib.suppress(RuntimeError):
                self._receive_nothing(rank).wait(timedelta(milliseconds=1))
        return all(self._closed(rank) for rank in self._others())

    def _closed(self, rank: int) -> bool:
        try:
            self._receive_nothing(rank)
        except RuntimeError:
            return True
        return False

    def _receive_nothing(self, rank: int) -> Any:
        return self._group.recv([torch.empty(1)], rank, _TAGS)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._rendezvous.size) if rank != self._rendezvous.rank]


class _Chain(_GlooBroadcast):
    """Rank 0 sends to rank 1, which forwards to rank 2 as parts arrive, and so on: no member sends anything twice.

    Unlike gloo's broadcast, which costs half a millisecond however small it is, it allows any number of sends and
    receives in flight."""

    def __init__(self, group: Any, rendezvous: GroupRendezvous) -> None:
        super().__init__(group, rendezvous)
        self.begins_with_sends = rendezvous.rank == 0
        self._received, self._sent = itertools.count(), itertools.count()

    def split(self, piece: torch.Tensor) -> Sequence[torch.Tensor]:
        return piece.split(_LINK_BYTES) if self._rendezvous.size > 2 else [piece]

    def receive(self, part: torch.Tensor) -> Any:
        return self._group.recv([part], self._rendezvous.rank - 1, next(self._received) % _TAGS)

    def send(self, part: torch.Tensor) -> list[Any]:
        tag, following = next(self._sent) % _TAGS, self._rendezvous.rank + 1
        return [self._group.send([part], following, tag)] if following < self._rendezvous.size else []

    def end_calls(self) -> bool:
        return self._close()
