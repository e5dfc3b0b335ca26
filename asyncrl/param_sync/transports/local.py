"""Buckets between processes of one machine: the data is written once and read where it lies.

Where that is, is for a `BucketMemory` to say: host memory (`shared_memory`), or that of a GPU (`cuda_ipc`). Everything
else takes a Unix socket in the abstract namespace, which has no name in any folder, so that a killed process leaves
nothing behind::

    reader                                            writer
      hello {session, who}              ───────────►
                                        ◄───────────   welcome: how the memory is opened
                                        ◄───────────   bucket {sequence, place, keep, checksum, parts}
      acknowledgement (sequence)        ───────────►   … the buffer is free when all readers have sent this
                                        ◄───────────   end {buckets}

The buffers take turns. In a session that keeps, each bucket has a buffer of its own, nobody acknowledges, and the
readers read when they like, until the next session.

Whoever dies closes the socket, which the other end sees at once. A connection lives for one session, so a message of an
earlier session has no way to arrive. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from asyncrl.param_sync.buckets import ALIGN_BYTES, Filled
from asyncrl.param_sync.errors import BucketKey, SyncError
from asyncrl.param_sync.receiver import Bucket, Placing, TensorPart
from asyncrl.param_sync.transports.base import NoReaders
from asyncrl.param_sync.transports.messages import framed, message_in, read_message, same_user
from asyncrl.param_sync.transports.pump import Pump
from asyncrl.telemetry.recorder import now_s

BUFFERS = 2  # filling one overlaps reading the other

_SEQUENCE = struct.Struct("<Q")  # an acknowledgement
_WELCOME = b"."  # descriptors travel with it, then a message
_MOST_FILES = 4
_BACKLOG = 1024
_WATCHFUL_S = 1e-3  # a reader that sleeps between two buckets costs its writer a tenth of the bucket's time to wake

#: where a bucket lies in its memory: a value for JSON that only the kind of memory reads
Place = Any


class LocalAddress(NamedTuple):
    """``socket`` is unique to one writer's life; ``machine`` is the boot id of where it lives, ``device`` the GPU that
    its buckets are on (None: in host memory)."""

    sender: int
    socket: str
    machine: str
    device: str | None


class Welcome(NamedTuple):
    """What a reader opens a memory by: values for JSON, and descriptors of files."""

    message: Mapping[str, Any]
    files: Sequence[int] = ()


class BucketMemory(Protocol):
    """The memory of a writer's buckets."""

    device: str | None
    keeps: bool  # there is room for all buckets of a session
    welcome: Welcome

    def buffer(self, index: int) -> torch.Tensor:
        """The buffer of this index, uint8 [capacity]; it is made if there was none yet."""
        ...

    def place(self, index: int) -> Place: ...

    def settle(self) -> None:
        """Return when what this thread has written may be read by others."""

    @property
    def ceiling(self) -> float | None:
        """Bytes per second of a plain copy of a bucket; None if it was not measured."""
        ...

    def close(self) -> None:
        """Give everything back, at the latest when nobody holds a buffer any more."""


class OpenedMemory(Protocol):
    """The same, as a reader has it."""

    def lent(self, place: Place, key: BucketKey, who: str) -> AbstractContextManager[memoryview | torch.Tensor]:
        """Lend a bucket's data to ``who``, see `asyncrl.param_sync.transports.lend`."""
        ...

    def kept(self, place: Place) -> memoryview:
        """Data that is left as it is until the next session; asked of a memory that ``keeps``."""
        ...

    def close(self) -> None: ...


class LocalWriter(Pump):
    """Implements `BucketWriter` over a memory, whose first ``buffers`` take turns. ``sender`` numbers the sending
    ranks."""

    def __init__(self, sender: int, memory: BucketMemory, buffers: int = BUFFERS) -> None:
        super().__init__()
        self._memory, self._buffers = memory, buffers
        self.loose_from = None
        self.address = LocalAddress(sender, f"asyncrl-{uuid.uuid4().hex}", _machine(), memory.device)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.address.socket)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._aborted: str | None = None
        self._session: str | None = None
        self._expected: set[str] = set()
        self._peers: dict[str, _Peer] = {}
        self._sequence = 0  # of the bucket being filled
        self._keep = False
        self.dropped: dict[str, str] = {}

    def open(self, session: str, readers: Sequence[str], deadline_s: float, stall_s: float, keep: bool = False) -> None:
        self._leave()
        self._session, self._expected, self._sequence = session, set(readers), 0
        self._keep = keep and self._memory.keeps
        self._deadline, self._stall_s = now_s() + deadline_s, stall_s
        self.dropped = {}
        if not self._pump(lambda: not self._expected, self._limit()):
            self.dropped |= dict.fromkeys(self._expected, f"did not join within {stall_s:g} s")
            self._expected = set()
        self._need_readers()

    def buffer(self) -> torch.Tensor:
        if self._keep:
            self._handle(0)  # who went, and an abort
        else:
            self._await_read(self._sequence - self._buffers)
        self._need_readers()
        return self._memory.buffer(self._index)

    def publish(self, filled: Filled) -> None:
        self._memory.settle()
        message = {
            "sequence": self._sequence,
            "place": self._memory.place(self._index),
            "keep": self._keep,
            "checksum": filled.checksum,
            "parts": filled.parts,
        }
        self._tell(self._peers.values(), message)
        self._sequence += 1
        self._need_readers()

    def finish(self) -> None:
        if not self._keep:
            self._await_read(self._sequence - 1)
        self._tell(self._peers.values(), {"end": self._sequence})
        self._leave()

    def abort(self, session: str) -> None:
        self._aborted = session
        os.eventfd_write(self._wake, 1)
        if session == self._session:  # the readers are to hear of it though the writer's own thread may wait no more
            for peer in tuple(self._peers.values()):
                with contextlib.suppress(OSError):
                    peer.sock.shutdown(socket.SHUT_RDWR)

    @property
    def ceiling(self) -> float | None:
        return self._memory.ceiling

    def close(self) -> None:
        self._leave()
        self._selector.close()
        self._listener.close()
        os.close(self._wake)
        self._memory.close()

    @property
    def _index(self) -> int:
        """Of the buffer for the bucket that is next."""
        return self._sequence if self._keep else self._sequence % self._buffers

    # -- readers come and go ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, partial(self._greet, sock, bytearray()))

    def _greet(self, sock: socket.socket, received: bytearray) -> None:
        """Read a hello, as far as it has come; let in whom this session expects, and turn away anybody else."""
        try:
            data = sock.recv(4096)
        except OSError:
            data = b""
        received += data
        hello = message_in(received)
        if data and hello is None:
            return
        self._selector.unregister(sock)
        who = "" if hello is None else hello["who"]
        if hello is None or hello["session"] != self._session or who not in self._expected or not same_user(sock):
            sock.close()
            return
        self._expected.discard(who)
        peer = self._peers[who] = _Peer(who, sock)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._acknowledged, peer))
        try:
            message, files = self._memory.welcome
            socket.send_fds(sock, [_WELCOME, framed(message)], files)
        except OSError as e:
            self._drop(peer, f"went away when it joined ({e})")

    def _acknowledged(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(4096)
        except OSError:
            data = b""
        if not data:
            gone = "went away (its end of the connection is closed)"
            self._drop(peer, "the session was aborted" if self._aborted == self._session else gone)
            return
        peer.received += data
        while len(peer.received) >= _SEQUENCE.size:
            (sequence,) = _SEQUENCE.unpack_from(peer.received)
            del peer.received[: _SEQUENCE.size]
            if sequence != peer.read or sequence >= self._sequence:
                self._drop(peer, f"acknowledged bucket {sequence} where {peer.read} was next")
                return
            peer.read += 1

    def _woken(self) -> None:
        os.eventfd_read(self._wake)
        if self._aborted == self._session:
            self.dropped |= dict.fromkeys(self._expected, "the session was aborted")
            self._expected = set()
            for peer in list(self._peers.values()):
                self._drop(peer, "the session was aborted")

    def _drop(self, peer: _Peer, why: str) -> None:
        self._part_from(peer)
        self.dropped[peer.who] = f"{why}; buckets it had read: {peer.read}"

    def _part_from(self, peer: _Peer) -> None:
        del self._peers[peer.who]
        self._selector.unregister(peer.sock)
        peer.sock.close()

    def _leave(self) -> None:
        for peer in list(self._peers.values()):
            self._part_from(peer)
        self._session = None

    def _need_readers(self) -> None:
        if not self._peers:
            raise NoReaders

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _await_read(self, sequence: int) -> None:
        """Wait until every reader has read bucket ``sequence``; those that do not are dropped."""
        waited_from = now_s()
        behind = lambda: [p for p in self._peers.values() if p.read <= sequence]
        if not self._pump(lambda: not behind(), self._limit()):
            for peer in behind():
                self._drop(peer, f"was silent for {now_s() - waited_from:.1f} s")


class _Peer:
    """A reader, as its writer sees it: it has read all buckets before number ``read``."""

    def __init__(self, who: str, sock: socket.socket) -> None:
        self.who, self.sock, self.read, self.received = who, sock, 0, bytearray()


class LocalReader:
    """Implements `BucketReader`. ``who`` is the replica's name; ``open_memory`` opens a writer's memory, which is on
    ``device``, by its welcome: it owns the descriptors. The memory stays open between sessions."""

    def __init__(
        self,
        who: str,
        device: str | None,
        open_memory: Callable[[Mapping[str, Any], Sequence[int]], OpenedMemory],
    ) -> None:
        self._who, self._device, self._open_memory = who, device, open_memory
        self._session = ""
        self._opened: dict[LocalAddress, OpenedMemory] = {}
        self._links: dict[LocalAddress, socket.socket] = {}

    def connect(self, session: str, addresses: Sequence[LocalAddress], deadline_s: float) -> None:
        self._hang_up()
        for gone in self._opened.keys() - set(addresses):
            self._forget(gone)
        self._session = session
        for address in addresses:
            if address.machine != _machine():
                raise self._failed("plan", address, "is on another machine, whose memory cannot be read here")
            if address.device != self._device:
                theirs, ours = address.device or "host memory", self._device or "host memory"
                problem = f"has its buckets in {theirs}, this replica reads from {ours}; both must be in one place"
                raise self._failed("plan", address, problem)
            link = self._links[address] = socket.socket(socket.AF_UNIX)
            link.settimeout(deadline_s)
            try:
                link.connect("\0" + address.socket)
                if not same_user(link):
                    raise self._failed("plan", address, "belongs to another user")
                link.sendall(framed({"session": session, "who": self._who}))
            except OSError as e:
                raise self._failed("plan", address, f"does not listen ({e}): its process has ended") from e

    def buckets(self, deadline_s: float, place: Placing | None = None) -> Iterator[Bucket]:
        """The writer's memory is open here already: there is nothing to gain from ``place``."""
        limit = now_s() + deadline_s
        session, links = self._session, dict(self._links)
        expected = dict.fromkeys(links, 0)
        with contextlib.ExitStack() as stack:
            stack.callback(self._hang_up)  # also when the consumer fails: the writers see it at once
            selector = stack.enter_context(selectors.DefaultSelector())
            for address, link in links.items():
                selector.register(link, selectors.EVENT_READ, address)
            welcomed: set[LocalAddress] = set()
            watchful_s = _WATCHFUL_S
            while selector.get_map():
                ready = _select(selector, limit, watchful_s)
                if not ready:
                    address = next(iter(selector.get_map().values())).data
                    reason = f"was not done by the deadline of {deadline_s:g} s"
                    raise self._failed("transfer", address, reason, expected[address])
                for key, _ in ready:
                    address, link = key.data, links[key.data]
                    try:
                        link.settimeout(max(limit - now_s(), 1e-3))
                        if address not in welcomed:
                            self._receive_welcome(address, link)
                            welcomed.add(address)
                            continue
                        message = read_message(link)
                        if "end" in message:
                            selector.unregister(link)
                            continue
                        parts = tuple(TensorPart(*part) for part in message["parts"])
                        which = BucketKey(session, address.sender, message["sequence"])
                        memory, place, checksum = self._opened[address], message["place"], message["checksum"]
                        if message["keep"]:
                            watchful_s = 0.0  # nobody waits for this reader, and its engine generates meanwhile
                            yield Bucket(*which, parts, memory.kept(place), checksum, kept=True)
                        else:
                            with memory.lent(place, which, self._who) as data:
                                yield Bucket(*which, parts, data, checksum)
                            link.sendall(_SEQUENCE.pack(message["sequence"]))
                        expected[address] += 1
                    except (OSError, EOFError) as e:
                        reason = f"went away amid the session ({e})"
                        raise self._failed("transfer", address, reason, expected[address]) from e

    def abort(self) -> None:
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):  # it may be closed, or never have been connected
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._hang_up()
        for address in list(self._opened):
            self._forget(address)

    def _receive_welcome(self, address: LocalAddress, link: socket.socket) -> None:
        with contextlib.ExitStack() as unwanted:
            byte, files, _, _ = socket.recv_fds(link, len(_WELCOME), _MOST_FILES)
            for file in files:
                unwanted.callback(os.close, file)
            if not byte:
                raise EOFError("it did not let this replica in")
            message = read_message(link)
            if address not in self._opened:
                unwanted.pop_all()
                self._opened[address] = self._open_memory(message, files)

    def _forget(self, address: LocalAddress) -> None:
        self._opened.pop(address).close()

    def _hang_up(self) -> None:
        while self._links:
            self._links.popitem()[1].close()

    def _failed(self, phase: str, address: LocalAddress, message: str, sequence: int | None = None) -> SyncError:
        bucket = None if sequence is None else BucketKey(self._session, address.sender, sequence)
        return SyncError(phase, self._who, None, bucket, f"sender {address.sender} {message}")


def _select(selector: selectors.BaseSelector, limit: float, watchful_s: float) -> list[tuple[Any, int]]:
    """What is ready by ``limit``. For the first ``watchful_s`` it looks again and again, letting others run between."""
    asleep_from = now_s() + watchful_s
    while not (ready := selector.select(0)) and now_s() < min(asleep_from, limit):
        os.sched_yield()
    return ready or selector.select(max(limit - now_s(), 0))


def whole_lines(bucket_bytes: int) -> int:
    """A bucket's capacity: ``bucket_bytes`` rounded down to lines of 64 bytes. Raises ValueError if none is left."""
    capacity = bucket_bytes // ALIGN_BYTES * ALIGN_BYTES
    if capacity <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, a bucket has at least {ALIGN_BYTES}")
    return capacity


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
