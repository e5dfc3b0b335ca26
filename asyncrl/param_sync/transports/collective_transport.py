"""Base of the transports that broadcast within a process group."""

from __future__ import annotations

from abc import abstractmethod

import torch

from asyncrl.param_sync.transports.base import MIB, Transport
from asyncrl.param_sync.transports.broadcast import BroadcastChannel, GroupRendezvous
from asyncrl.param_sync.transports.collective import CollectiveWriter
from asyncrl.param_sync.transports.collective_reader import CollectiveReader


class CollectiveTransport(Transport):
    """Also implements `asyncrl.param_sync.transports.broadcast.CollectiveBackend`; subclasses define ``name``, the
    device and the channel."""

    name: str
    bucket_bytes = 32 * MIB  # a broadcast costs half a millisecond however little it carries
    across_machines = True

    def writer(self, sender: int, bucket_bytes: int, host: str) -> CollectiveWriter:
        return CollectiveWriter(sender, bucket_bytes, host, self)

    def reader(self, replica: str) -> CollectiveReader:
        return CollectiveReader(replica, self)

    @abstractmethod
    def device_for(self, device: torch.device | str | None) -> torch.device: ...

    @abstractmethod
    def open_channel(self, rendezvous: GroupRendezvous, host: str, device: torch.device) -> BroadcastChannel: ...
