"""A process group of one's own beside the trainer's default one: formed and used in threads that can be left.

Every call of a process group may block until a timeout, and gloo's cannot be interrupted. So each generation of a group
has threads for its calls, and who has to give a group up leaves them behind: they end by themselves, at the latest when
the calls they were given time out, and touch no tensor but those they were given.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

Backend = Literal["gloo", "nccl"]
BUFFERS = 2  # filling one overlaps sending the other

_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
_FORMING = threading.Lock()


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


class Group:
    """One generation of a group. Its broadcasts, all from rank 0, run in the order in which they are asked for.
    ``host`` is this member's address on the network that the data takes.

    ``on_done(group, error)`` is called in a thread of the group after each broadcast, and with the error that ended
    the group. After `abort` it may still be called: compare the group with the one in use."""

    def __init__(
        self,
        seat: Seat,
        host: str,
        backend: Backend,
        device: torch.device,
        on_done: Callable[[Group, Exception | None], None],
    ) -> None:
        self.generation = seat.generation
        self._device, self._on_done = device, on_done
        self._tensors: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._process_group: Any = None
        self._aborted = False
        # Two, so that a broadcast is under way before the one ahead of it has ended.
        threading.Thread(target=self._start_broadcasts, args=(seat, host, backend), daemon=True).start()
        threading.Thread(target=self._await_broadcasts, daemon=True).start()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send ``tensor`` from rank 0 or receive into it elsewhere; on a device it must be free for use by now."""
        self._tensors.put(tensor)

    def abort(self) -> None:
        """Give the group up, also after an error. NCCL's calls in progress end, gloo's when they fail or time out."""
        self._aborted = True
        self._tensors.put(None)
        if (process_group := self._process_group) is not None:
            process_group.abort()

    def _start_broadcasts(self, seat: Seat, host: str, backend: Backend) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            self._process_group = _form(seat, host, backend)
            with _stream_of_its_own(self._device):
                while (tensor := self._tensors.get()) is not None and not self._aborted:
                    self._works.put(self._process_group.broadcast([tensor], options))
        except Exception as error:
            self._on_done(self, error)
        finally:
            self._works.put(None)

    def _await_broadcasts(self) -> None:
        failed = False
        with _stream_of_its_own(self._device) as stream:
            while (work := self._works.get()) is not None:
                try:
                    work.wait()
                    if stream is not None:
                        stream.synchronize()
                except Exception as error:
                    if not failed:
                        self._on_done(self, error)
                    failed = True
                else:
                    self._on_done(self, None)
        # Destroyed here, where no call is in progress: its destructor waits for them and lets no other thread run.
        self._process_group = None


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


def _form(seat: Seat, host: str, backend: Backend) -> Any:
    timeout = timedelta(seconds=seat.timeout_s)
    # A connection of its own: a call that blocks on it holds nobody else up.
    client = dist.TCPStore(seat.store_host, seat.store_port, is_master=False, wait_for_workers=False, timeout=timeout)
    store = dist.PrefixStore(seat.generation, client)
    if backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo  # its type stub lacks what it takes
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=host)]
        return gloo(store, seat.rank, seat.size, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # By default a watchdog thread ends the process when a collective fails. A group reads this when it is made.
    with _FORMING, _environment(_NO_WATCHDOG, "1"):
        return dist.ProcessGroupNCCL(store, seat.rank, seat.size, options)


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


@contextlib.contextmanager
def _stream_of_its_own(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream
