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
    ``timeout_s`` limits every single call. ``chained``: on the CPU each passes on to the next what it has; if not, as
    with members that are not ours, the backend's own broadcast is used."""

    generation: str
    rank: int
    size: int
    store_host: str
    store_port: int
    timeout_s: float
    chained: bool = True


class Way(Protocol):
    """From rank 0 to all others. Every member goes through the same parts in the same order: it begins to receive each,
    and sends it when it is here."""

    begins_with_sends: bool  # nothing to receive here

    def cut(self, piece: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a flat tensor."""

    def receive(self, part: torch.Tensor) -> Any:
        """Begin to receive: a work to wait for."""

    def send(self, part: torch.Tensor) -> list[Any]:
        """Begin to send what this member owes to others. May be called from another thread."""

    def end_calls(self) -> bool:
        """Break the connections. Whether nothing is written to a tensor from now on; if not, wait until all that is
        being received has failed, which is soon. From any thread."""


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
        return _Chain(group, seat) if seat.chained and device.type == "cpu" else _GlooBroadcast(group, seat)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # By default a watchdog thread ends the process when a collective fails. A group reads this when it is made.
    with _FORMING, _environment(_NO_WATCHDOG, "1"):
        return _Broadcast(dist.ProcessGroupNCCL(store, seat.rank, seat.size, options), seat)


class _Broadcast:
    """The backend's own collective: whoever takes part in it, "receives"."""

    begins_with_sends = False

    def __init__(self, group: Any, seat: Seat) -> None:
        self._group, self._seat = group, seat
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0

    def cut(self, piece: torch.Tensor) -> Sequence[torch.Tensor]:
        return [piece]

    def receive(self, part: torch.Tensor) -> Any:
        return self._group.broadcast([part], self._options)

    def send(self, part: torch.Tensor) -> list[Any]:
        return []

    def end_calls(self) -> bool:
        self._group.abort()
        return False


class _GlooBroadcast(_Broadcast):
    """gloo's, which takes tensors of a device too, by way of the host."""

    def end_calls(self) -> bool:
        self._close()
        return False

    def _close(self) -> bool:
        """Whether all connections are closed. gloo's abort does nothing; but when a receive times out, gloo closes them
        all, and tells most calls, but no send, nor a receive that has got some of its bytes."""
        for rank in range(self._seat.size):
            if rank != self._seat.rank:
                with contextlib.suppress(RuntimeError):
                    self._receive_nothing(rank).wait(timedelta(milliseconds=1))
        return all(self._closed(rank) for rank in range(self._seat.size) if rank != self._seat.rank)

    def _closed(self, rank: int) -> bool:
        try:
            self._receive_nothing(rank)
        except RuntimeError:
            return True
        return False

    def _receive_nothing(self, rank: int) -> Any:
        return self._group.recv([torch.empty(1)], rank, _TAGS)


class _Chain(_GlooBroadcast):
    """Rank 0 sends to rank 1, which passes on to rank 2 what it has of it, and so on: nobody sends anything twice.

    Unlike gloo's broadcast, which costs half a millisecond however little it carries, any number of sends and receives
    can be under way at once."""

    def __init__(self, group: Any, seat: Seat) -> None:
        super().__init__(group, seat)
        self.begins_with_sends = seat.rank == 0
        self._received, self._sent = itertools.count(), itertools.count()

    def cut(self, piece: torch.Tensor) -> Sequence[torch.Tensor]:
        return piece.split(_LINK_BYTES) if self._seat.size > 2 else [piece]

    def receive(self, part: torch.Tensor) -> Any:
        return self._group.recv([part], self._seat.rank - 1, next(self._received) % _TAGS)

    def send(self, part: torch.Tensor) -> list[Any]:
        tag, following = next(self._sent) % _TAGS, self._seat.rank + 1
        return [self._group.send([part], following, tag)] if following < self._seat.size else []

    def end_calls(self) -> bool:
        return self._close()


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
