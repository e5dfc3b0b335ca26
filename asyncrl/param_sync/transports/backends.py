"""What gloo and NCCL differ in: how a group is formed, how bytes get from rank 0 to all others, how that is ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

Backend = Literal["gloo", "nccl"]

_LINK_BYTES = 4 << 20  # of a chain's links
_TAGS = 1 << 16  # far more than are in flight
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
_FORMING = threading.Lock()


@dataclass(frozen=True)
class Seat:
    """A place in one generation of a group. The members find each other at ``store_host`` and ``store_port``;
    ``timeout_s`` limits every single call."""

    generation: str
    rank: int
    size: int
    store_host: str
    store_port: int
    timeout_s: float


class Way(Protocol):
    """From rank 0 to all others. Every member calls ``begin`` for the same pieces in the same order, from one thread,
    and ``pass_on`` for each in this order when its begun work is done, from another one."""

    def cut(self, piece: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a flat tensor to begin one by one."""

    def begin(self, part: torch.Tensor) -> Any:
        """Begin to send or to receive: a work to wait for."""

    def pass_on(self, part: torch.Tensor) -> list[Any]:
        """Begin what this member owes to others, now that it has the part."""

    def end_calls(self) -> None:
        """Let all that is in progress fail, soon. From any thread."""


def make_way(seat: Seat, host: str, backend: Backend, device: torch.device) -> Way:
    """Join a group; waits for all its members. ``host`` is this member's address on the network that the data takes."""
    timeout = timedelta(seconds=seat.timeout_s)
    # A connection of its own: a call that blocks on it holds nobody else up.
    client = dist.TCPStore(seat.store_host, seat.store_port, is_master=False, wait_for_workers=False, timeout=timeout)
    store = dist.PrefixStore(seat.generation, client)
    if backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo  # its type stub lacks what it takes
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=host)]
        group = gloo(store, seat.rank, seat.size, options)
        return _Chain(group, seat) if device.type == "cpu" else _GlooBroadcast(group, seat)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # By default a watchdog thread ends the process when a collective fails. A group reads this when it is made.
    with _FORMING, _environment(_NO_WATCHDOG, "1"):
        return _Broadcast(dist.ProcessGroupNCCL(store, seat.rank, seat.size, options), seat)


class _Broadcast:
    """The backend's own collective."""

    def __init__(self, group: Any, seat: Seat) -> None:
        self._group, self._seat = group, seat
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0

    def cut(self, piece: torch.Tensor) -> Sequence[torch.Tensor]:
        return [piece]

    def begin(self, part: torch.Tensor) -> Any:
        return self._group.broadcast([part], self._options)

    def pass_on(self, part: torch.Tensor) -> list[Any]:
        return []

    def end_calls(self) -> None:
        self._group.abort()


class _GlooBroadcast(_Broadcast):
    def end_calls(self) -> None:
        """gloo's abort does nothing. But when a receive times out, it closes the group's connections."""
        for rank in range(self._seat.size):
            if rank != self._seat.rank:
                with contextlib.suppress(RuntimeError):  # it times out, or this connection was closed before
                    self._group.recv([torch.empty(1)], rank, _TAGS).wait(timedelta(milliseconds=1))


class _Chain(_GlooBroadcast):
    """Rank 0 sends to rank 1, which passes on to rank 2 what it has got of it, and so on: nobody sends anything twice.

    Unlike gloo's broadcast, which costs half a millisecond however little it carries, any number of sends and receives
    can be under way at once."""

    def __init__(self, group: Any, seat: Seat) -> None:
        super().__init__(group, seat)
        self._begun, self._passed = itertools.count(), itertools.count()

    def cut(self, piece: torch.Tensor) -> Sequence[torch.Tensor]:
        return piece.split(_LINK_BYTES)

    def begin(self, part: torch.Tensor) -> Any:
        tag = next(self._begun) % _TAGS
        if self._seat.rank == 0:
            return self._group.send([part], 1, tag)
        return self._group.recv([part], self._seat.rank - 1, tag)

    def pass_on(self, part: torch.Tensor) -> list[Any]:
        tag, following = next(self._passed) % _TAGS, self._seat.rank + 1
        return [self._group.send([part], following, tag)] if 1 < following < self._seat.size else []


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
