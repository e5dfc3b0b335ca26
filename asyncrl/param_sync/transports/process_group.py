"""A process group of one's own beside the trainer's default one: formed and used in threads that can be left.

Every call of a process group may block until a timeout. So each generation of a group has threads for its calls, which
are left behind when it is given up: they end by themselves, at the latest when the calls they were given time out. But
once `Group.abort` has said so, none of them writes to a tensor.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from asyncrl.param_sync.transports.backends import Backend, Seat, Way, make_way

BUFFERS = 2  # filling one overlaps sending the other

_ENDING_S = 5.0  # for calls in progress to end when they are told to


class Calls:
    """Calls that other threads hand over to one that waits on a selector: ``fd`` is readable when there are any."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def hand_over(self, call: Callable[[], None]) -> None:
        """From any thread; after `close` nobody is there to do it, and it is dropped."""
        with self._lock:
            if not self._closed:
                self._calls.put(call)
                os.eventfd_write(self.fd, 1)

    def run(self) -> None:
        with contextlib.suppress(BlockingIOError):  # an earlier run has done what this wake-up was for
            os.eventfd_read(self.fd)
        while not self._calls.empty():
            self._calls.get()()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class Group:
    """One generation of a group, in which rank 0 sends to all others. ``host`` is this member's address on the network
    that the data takes.

    ``on_done(group, error)`` is called in a thread of the group after each `broadcast`, in their order, and with the
    error that ended the group. After `abort` it may still be called: compare the group with the one in use."""

    def __init__(
        self,
        seat: Seat,
        host: str,
        backend: Backend,
        device: torch.device,
        on_done: Callable[[Group, Exception | None], None],
    ) -> None:
        self.generation = seat.generation
        self._seat, self._device, self._on_done = seat, device, on_done
        self._way: Way | None = None
        self._asked: queue.SimpleQueue[Sequence[torch.Tensor] | None] = queue.SimpleQueue()
        self._receiving: queue.SimpleQueue[_Receiving | None] = queue.SimpleQueue()
        self._sending: queue.SimpleQueue[_Sending | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # of what follows
        self._aborted = self._failed = False
        self._receipts = 0  # begun, and not ended yet
        # Calls are under way before those ahead of them have ended; and whoever waits for a receipt must not wait for a
        # send: gloo does not tell a send that its connection was closed.
        threading.Thread(target=self._begin_calls, args=(host, backend), daemon=True).start()
        threading.Thread(target=self._await_receipts, daemon=True).start()
        threading.Thread(target=self._await_sends, daemon=True).start()

    def broadcast(self, pieces: Sequence[torch.Tensor]) -> None:
        """Send these tensors, flat bytes, from rank 0 or receive into them elsewhere; on a device they must be free for
        use by now."""
        self._asked.put(pieces)

    def abort(self) -> bool:
        """Give the group up, also after an error. Whether nobody writes to the tensors that it was given any more; if
        not, another call of this may find it so."""
        with self._changed:
            self._aborted = True
        self._asked.put(None)
        if (way := self._way) is None or way.end_calls():
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._receipts, _ENDING_S)

    def _begin_calls(self, host: str, backend: Backend) -> None:
        try:
            self._way = make_way(self._seat, host, backend, self._device)
            with _stream_of_its_own(self._device):
                while (pieces := self._asked.get()) is not None:
                    self._begin(self._way, pieces)
                    del pieces  # others' tensors: none is held longer than it is used
        except _Aborted:
            pass
        except Exception as error:
            self._fail(error)
        finally:
            self._receiving.put(None)

    def _begin(self, way: Way, pieces: Sequence[torch.Tensor]) -> None:
        parts = [part for piece in pieces for part in way.cut(piece)]
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            if way.begins_with_sends:
                self._sending.put(_Sending(way.send(part), last))
                continue
            with self._receipt():
                self._receiving.put(_Receiving(way, way.receive(part), part, last))

    def _await_receipts(self) -> None:
        with _stream_of_its_own(self._device) as stream:
            while (receiving := self._receiving.get()) is not None:
                way, work, part, last = receiving
                try:
                    work.wait()
                    if stream is not None:
                        stream.synchronize()
                    sends = way.send(part)
                except Exception as error:
                    self._fail(error)
                else:
                    self._sending.put(_Sending(sends, last))
                del way, work, part, receiving
                self._end_receipt()
        self._sending.put(None)

    def _await_sends(self) -> None:
        while (sending := self._sending.get()) is not None:
            try:
                for work in sending.works:
                    work.wait()
                    del work
            except Exception as error:
                self._fail(error)
            else:
                if sending.last and not self._failed:
                    self._on_done(self, None)
            del sending
        # Destroyed here, where no call is in progress: its destructor waits for them and lets no other thread run.
        self._way = None

    @contextlib.contextmanager
    def _receipt(self) -> Iterator[None]:
        """Around the beginning of a receipt, which is under way until `_end_receipt` unless this fails."""
        with self._changed:
            if self._aborted:
                raise _Aborted
            self._receipts += 1
        try:
            yield
        except BaseException:
            self._end_receipt()
            raise

    def _end_receipt(self) -> None:
        with self._changed:
            self._receipts -= 1
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            first, self._failed = not self._failed, True
        if first:
            self._on_done(self, error)


class _Receiving(NamedTuple):
    way: Way
    work: Any
    part: torch.Tensor
    last: bool  # of a broadcast


class _Sending(NamedTuple):
    works: list[Any]
    last: bool


class _Aborted(Exception):
    """The group was given up before this began."""


def host_store(host: str, shared: bool = False) -> dist.TCPStore:
    """A store for members to find each other, listening on ``host`` only (by itself it would on every interface).

    ``shared``: who asks in this process for a store at its address, as an ``init_method`` does, gets this one."""
    listener = listen(host)
    port, fd = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd, multi_tenant=shared)


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of ``host``. Raises OSError if that is no address of this machine."""
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    except OSError as e:
        raise OSError(f"cannot listen on {host} ({e}); it must be an address of this machine that others reach") from e


def settle(device: torch.device) -> None:
    """Return when this thread's work on the device is done, so that its buffers may be given to other streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def device_for(backend: Backend, device: torch.device | str | None) -> torch.device:
    """Where the buckets of a process lie; ``device`` None: where the backend wants them. Raises ValueError."""
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ValueError(
            "nccl needs a CUDA device and a torch built with it, which this process does not have; use gloo"
        )
    found = torch.device(device or ("cuda" if backend == "nccl" else "cpu"))
    if found.type == "cuda" and found.index is None:  # the current one of this thread, in all threads
        return torch.device("cuda", torch.cuda.current_device())
    return found


def make_buffers(capacity: int, device: torch.device) -> list[torch.Tensor]:
    """uint8 [capacity] each, written to once, so that no page fault is left for the transfer."""
    return [torch.empty(capacity, dtype=torch.uint8, device=device).zero_() for _ in range(BUFFERS)]


@contextlib.contextmanager
def _stream_of_its_own(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream
