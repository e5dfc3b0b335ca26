"""Transport over NCCL: GPU to GPU, one GPU per sender and per replica."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrl.config.schema import Config
from asyncrl.param_sync.transports.broadcast import (
    BroadcastChannel,
    GroupBroadcast,
    GroupRendezvous,
    join_store,
    with_index,
)
from asyncrl.param_sync.transports.collective_transport import CollectiveTransport
from asyncrl.param_sync.transports.placement import Placements, have_own_gpus, needs_gpus

_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
_FORMING = threading.Lock()


class NcclTransport(CollectiveTransport):
    name = "nccl"
    auto_order = 20

    def unfit(self, senders: Placements, replicas: Placements) -> str | None:
        """NCCL refuses two members on one GPU."""
        fits = have_own_gpus([*senders, *replicas])
        return None if fits else "needs each sender and replica on its own GPU"

    def route(self, senders: Placements, replicas: Placements) -> str:
        return f"{len(senders)} + {len(replicas)} separate GPUs"

    def problems(self, config: Config) -> Iterator[str]:
        yield from needs_gpus(self.name, config)

    def device_for(self, device: torch.device | str | None) -> torch.device:
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise ValueError(
                "nccl needs a CUDA device and a torch built with NCCL, which this process does not have; set "
                "param_sync.transport=auto"
            )
        return with_index(torch.device(device or "cuda"))

    def open_channel(self, rendezvous: GroupRendezvous, host: str, device: torch.device) -> BroadcastChannel:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=rendezvous.timeout_s)
        store = join_store(rendezvous)
        # By default a watchdog thread kills the process when a collective fails. A group reads this when it is created.
        with _FORMING, _environment(_NO_WATCHDOG, "1"):
            return GroupBroadcast(dist.ProcessGroupNCCL(store, rendezvous.rank, rendezvous.size, options), rendezvous)


TRANSPORT = NcclTransport()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
