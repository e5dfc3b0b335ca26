"""A process group of one's own beside the trainer's default one: formed and used in threads that can be left.

Every call of a process group may block until a timeout. So each generation of a group has threads for its calls. Giving
it up ends those in progress and leaves the threads behind: one that is still to find its peers ends by itself, at the
latest when that times out, and touches no tensor.
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
        self._asked: queue.SimpleQueue[Sequence[torch.Tensor] | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._way: Way | None = None
        self._aborted = False
        self._calls = 0  # in progress
        self._changed = threading.Condition()  # of the two above
        # Two, so that a call is under way before the one ahead of it has ended.
        threading.Thread(target=self._begin_calls, args=(host, backend), daemon=True).start()
        threading.Thread(target=self._await_calls, daemon=True).start()

    def broadcast(self, pieces: Sequence[torch.Tensor]) -> None:
        """Send these tensors, flat bytes, from rank 0 or receive into them elsewhere; on a device they must be free for
        use by now. They are used until ``on_done`` is called or `abort` returns."""
        self._asked.put(pieces)

    def abort(self) -> bool:
        """Give the group up, also after an error: its calls in progress end. Whether all have, and nobody reads or
        writes their tensors any more; if not, another call of this may find it so."""
        with self._changed:
            self._aborted = True
            in_progress = self._calls > 0
        self._asked.put(None)
        if in_progress and (way := self._way) is not None:
            way.end_calls()
        with self._changed:
            return self._changed.wait_for(lambda: not self._calls, _ENDING_S)

    def _begin_calls(self, host: str, backend: Backend) -> None:
        try:
            self._way = make_way(self._seat, host, backend, self._device)
            with _stream_of_its_own(self._device):
                while (pieces := self._asked.get()) is not None:
                    self._begin(pieces)
                    del pieces  # tensors of others: none is held longer than it is used
        except _Aborted:
            pass
        except Exception as error:
            self._on_done(self, error)
        finally:
            self._begun.put(None)

    def _begin(self, pieces: Sequence[torch.Tensor]) -> None:
        assert self._way is not None
        cut = [part for piece in pieces for part in self._way.cut(piece)]
        for i, part in enumerate(cut):
            with self._call():
                work = self._way.begin(part)
            self._begun.put(_Begun(self._way, work, part, i == len(cut) - 1))

    def _await_calls(self) -> None:
        failed, ended = False, 0
        passing: list[Any] = []
        with _stream_of_its_own(self._device) as stream:
            while (begun := self._begun.get()) is not None:
                try:
                    begun.work.wait()
                    if stream is not None:
                        stream.synchronize()
                    passing += begun.way.pass_on(begun.part)
                    while begun.last and passing:
                        passing.pop().wait()
                except Exception as error:
                    if not failed:
                        self._on_done(self, error)
                    failed = True
                else:
                    if begun.last and not failed:
                        self._on_done(self, None)
                ended += 1
                if begun.last or failed:
                    self._end_calls(ended, passing)
                    ended = 0
                del begun
        self._end_calls(ended, passing)
        # Destroyed here, where no call is in progress: its destructor waits for them and lets no other thread run.
        self._way = None

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Around the beginning of a call, which is in progress until `_end_calls` unless this fails."""
        with self._changed:
            if self._aborted:
                raise _Aborted
            self._calls += 1
        try:
            yield
        except BaseException:
            self._end_calls(1, [])
            raise

    def _end_calls(self, count: int, passing: list[Any]) -> None:
        while passing:
            with contextlib.suppress(Exception):
                passing.pop().wait()
        with self._changed:
            self._calls -= count
            self._changed.notify_all()


class _Begun(NamedTuple):
    """A call in progress; ``last``: of a broadcast."""

    way: Way
    work: Any
    part: torch.Tensor
    last: bool


class _Aborted(Exception):
    """The group was given up before this call began."""


def host_store(host: str) -> dist.TCPStore:
    """A store for members to find each other, listening on ``host`` only (by itself it would on every interface)."""
    listener = listen(host)
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


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
