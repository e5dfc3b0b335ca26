"""Writer and reader for processes of one machine: buckets are written once, into memory that the readers map.

A `BucketMemory` provides that memory, on the host or on a GPU. Control messages use a Unix socket in the abstract
namespace, which has no file, so that a killed process leaves nothing behind::

    reader                                            writer
      hello {session, who}              ───────────►
                                        ◄───────────   welcome: how the memory is opened
                                        ◄───────────   bucket {sequence, location, keep, checksum, parts}
      acknowledgement (sequence)        ───────────►   … the buffer is free once all readers have sent this
                                        ◄───────────   end {buckets}

Buffers are used in turn. In a session with ``keep``, every bucket has its own buffer, nothing is acknowledged, and
readers may read until the next session.

A dying process closes its socket, which the other end notices at once. A connection lasts one session, so no message
of an earlier session can arrive. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.param_sync.buckets import Bucket, DestinationOf, Filled, TensorPart
from asyncrl.param_sync.errors import BucketKey, SyncError
from asyncrl.param_sync.transports.base import NoReaders
from asyncrl.param_sync.transports.listener import Hello, Listener
from asyncrl.param_sync.transports.messages import framed, peer_user, read_message
from asyncrl.param_sync.transports.selector_loop import SelectorLoop

BUFFERS = 2  # filling one overlaps reading the other

_SEQUENCE = struct.Struct("<Q")  # an acknowledgement
_HELLO = frozenset({"session", "who"})
_WELCOME = b"."  # descriptors travel with it, then a message
_MAX_FILES = 4
_BACKLOG = 1024
_RETRY_S = 1e-3  # between two attempts to connect
_SPIN_S = 1e-3  # waking a reader that sleeps between buckets takes the writer a tenth of a bucket's time

#: location of a bucket in its memory: a JSON value that only that kind of memory reads
BufferLocation = Any


class LocalAddress(NamedTuple):
    """Address of a writer. ``socket``: its unique name; ``machine``: boot id; ``device``: the GPU with its buckets
    (None: host memory)."""

    sender: int
    socket: str
    machine: str
    device: str | None


class Welcome(NamedTuple):
    """Data with which a reader opens a memory: JSON values and file descriptors."""

    message: Mapping[str, Any]
    files: Sequence[int] = ()


class BucketMemory(Protocol):
    """The memory of a writer's buckets."""

    device: str | None
    keeps: bool  # can hold all buckets of a session
    welcome: Welcome

    def buffer(self, index: int) -> torch.Tensor:
        """The buffer of this index, uint8 [capacity]; allocated on first use."""
        ...

    def location(self, index: int) -> BufferLocation: ...

    def synchronize(self) -> None:
        """Wait until other processes may read what this thread has written."""

    @property
    def ceiling(self) -> float | None:
        """Speed of a plain copy of a bucket in bytes per second; None if it was not measured. May overwrite buffers, so
        it is read only between sessions."""
        ...

    def close(self) -> None:
        """Release the memory, at the latest when no buffer is referenced any more."""


class OpenedMemory(Protocol):
    """A writer's `BucketMemory` as its reader opened it."""

    def borrowed(
        self, location: BufferLocation, key: BucketKey, who: str
    ) -> AbstractContextManager[memoryview | torch.Tensor]:
        """Lend a bucket's data to ``who``, see `asyncrl.param_sync.transports.borrowed_buffer`."""
        ...

    def kept(self, location: BufferLocation) -> memoryview:
        """Data that stays unchanged until the next session; only of a memory that ``keeps``."""
        ...

    def close(self) -> None: ...


class LocalWriter(SelectorLoop):
    """Implements `BucketWriter` over a memory whose first ``buffers`` are used in turn. ``sender`` numbers the sending
    ranks."""

    def __init__(self, sender: int, memory: BucketMemory, buffers: int = BUFFERS) -> None:
        super().__init__()
        self._memory, self._buffers = memory, buffers
        self.zero_copy_from = None
        self.address = LocalAddress(sender, f"asyncrl-{uuid.uuid4().hex}", _machine(), memory.device)
        sock = socket.socket(socket.AF_UNIX)
        sock.bind("\0" + self.address.socket)
        sock.listen(_BACKLOG)
        admit = lambda sock, hello: self._calls.hand_over(partial(self._admit, sock, hello))
        self._listener = Listener(sock, _HELLO, admit)
        self._aborted: str | None = None
        self._session: str | None = None
        self._expected: set[str] = set()
        self._peers: dict[str, _Peer] = {}
        self._sequence = 0  # of the bucket being filled
        self._keep = False
        self.dropped: dict[str, str] = {}

    def open(self, session: str, readers: Sequence[str], deadline_s: float, stall_s: float, keep: bool = False) -> None:
        self._leave_session()
        self._session, self._expected, self._sequence = session, set(readers), 0
        self._keep = keep and self._memory.keeps
        self._deadline, self._stall_s = now_s() + deadline_s, stall_s
        self.dropped = {}
        if not self._run_until(lambda: not self._expected, self._limit()):
            self.dropped |= dict.fromkeys(self._expected, f"did not join within {stall_s:g} s")
            self._expected = set()
        self._need_readers()

    def buffer(self) -> torch.Tensor:
        if self._keep:
            self._handle(0)  # disconnected readers, an abort
        else:
            self._await_read(self._sequence - self._buffers)
        self._need_readers()
        return self._memory.buffer(self._index)

    def publish(self, filled: Filled) -> None:
        self._memory.synchronize()
        message = {
            "sequence": self._sequence,
            "location": self._memory.location(self._index),
            "keep": self._keep,
            "checksum": filled.checksum,
            "parts": filled.parts,
        }
        self._send(self._peers.values(), message)
        self._sequence += 1
        self._need_readers()

    def finish(self) -> None:
        if not self._keep:
            self._await_read(self._sequence - 1)
        self._send(self._peers.values(), {"end": self._sequence})
        self._leave_session()

    def abort(self, session: str) -> None:
        self._aborted = session
        self._calls.hand_over(self._abort)
        if session == self._session:  # readers must notice even if the writer's thread no longer waits
            for peer in tuple(self._peers.values()):
                with contextlib.suppress(OSError):
                    peer.sock.shutdown(socket.SHUT_RDWR)

    @property
    def ceiling(self) -> float | None:
        return self._memory.ceiling

    def close(self) -> None:
        self._leave_session()
        self._listener.close()
        self._calls.close()
        self._selector.close()
        self._memory.close()

    @property
    def _index(self) -> int:
        """Index of the next bucket's buffer."""
        return self._sequence if self._keep else self._sequence % self._buffers

    # -- readers come and go ------------------------------------------------------------------------------------------

    def _admit(self, sock: socket.socket, hello: Hello) -> None:
        """Admit a reader that this session expects; close any other connection."""
        who = hello["who"]
        if hello["session"] != self._session or who not in self._expected:
            sock.close()
            return
        self._expected.discard(who)
        peer = self._peers[who] = _Peer(who, sock)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._acknowledged, peer))
        try:
            message, files = self._memory.welcome
            socket.send_fds(sock, [_WELCOME, framed(message)], files)
        except OSError as e:
            self._drop(peer, f"went away while it joined ({e})")

    def _acknowledged(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(4096)
        except OSError:
            data = b""
        if not data:
            gone = "went away (its end of the connection is closed)"
            self._drop(peer, gone)
            return
        peer.received += data
        while len(peer.received) >= _SEQUENCE.size:
            (sequence,) = _SEQUENCE.unpack_from(peer.received)
            del peer.received[: _SEQUENCE.size]
            if sequence != peer.read or sequence >= self._sequence:
                self._drop(peer, f"acknowledged bucket {sequence} where {peer.read} was next")
                return
            peer.read += 1

    def _abort(self) -> None:
        if self._aborted == self._session:
            self.dropped |= dict.fromkeys(self._expected, "the session was aborted")
            self._expected = set()
            for peer in list(self._peers.values()):
                self._drop(peer, "the session was aborted")

    def _drop(self, peer: _Peer, why: str) -> None:
        if self._aborted == self._session:  # which shut down the sockets: any call may be the first to notice
            why = "the session was aborted"
        self._remove(peer)
        self.dropped[peer.who] = f"{why}; buckets it had read: {peer.read}"

    def _remove(self, peer: _Peer) -> None:
        del self._peers[peer.who]
        self._selector.unregister(peer.sock)
        peer.sock.close()

    def _leave_session(self) -> None:
        for peer in list(self._peers.values()):
            self._remove(peer)
        self._session = None

    def _need_readers(self) -> None:
        if not self._peers:
            raise NoReaders

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _await_read(self, sequence: int) -> None:
        """Wait until every reader has read bucket ``sequence``; drop those that do not."""
        waited_from, limit = now_s(), self._limit()
        if not self._run_until(lambda: all(p.read > sequence for p in self._peers.values()), limit):
            for peer in [p for p in self._peers.values() if p.read <= sequence]:
                self._drop(peer, f"was silent for {limit - waited_from:.1f} s")


class _Peer:
    """A reader, as its writer sees it. It has read all buckets before ``read``."""

    def __init__(self, who: str, sock: socket.socket) -> None:
        self.who, self.sock, self.read, self.received = who, sock, 0, bytearray()


class LocalReader:
    """Implements `BucketReader`. ``who`` is the replica's name. ``open_memory`` opens a writer's memory on ``device``
    from its welcome, and takes ownership of the descriptors. The memory stays open between sessions."""

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
                problem = f"has its buckets in {theirs}, but this replica reads from {ours}; both must be the same"
                raise self._failed("plan", address, problem)
            link = self._links[address] = socket.socket(socket.AF_UNIX)
            link.settimeout(deadline_s)
            try:
                _connect(link, "\0" + address.socket, deadline_s)
                if peer_user(link) != os.geteuid():
                    raise self._failed("plan", address, "belongs to another user")
                link.sendall(framed({"session": session, "who": self._who}))
            except OSError as e:
                raise self._failed("plan", address, f"does not listen ({e}): its process has ended") from e

    def buckets(self, deadline_s: float, destination: DestinationOf | None = None) -> Iterator[Bucket]:
        """Ignores ``destination``: the writer's memory is already mapped here."""
        limit = now_s() + deadline_s
        session, links = self._session, dict(self._links)
        expected = dict.fromkeys(links, 0)
        with contextlib.ExitStack() as stack:
            stack.callback(self._hang_up)  # even if the consumer raises, so that the writers notice at once
            selector = stack.enter_context(selectors.DefaultSelector())
            for address, link in links.items():
                selector.register(link, selectors.EVENT_READ, address)
            welcomed: set[LocalAddress] = set()
            spin_s = _SPIN_S
            while selector.get_map():
                ready = _select(selector, limit, spin_s)
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
                        memory, location, checksum = self._opened[address], message["location"], message["checksum"]
                        if message["keep"]:
                            spin_s = 0.0  # no writer waits for this reader, and its engine is generating
                            yield Bucket(*which, parts, memory.kept(location), checksum, kept=True)
                        else:
                            with memory.borrowed(location, which, self._who) as data:
                                yield Bucket(*which, parts, data, checksum)
                            link.sendall(_SEQUENCE.pack(message["sequence"]))
                        expected[address] += 1
                    except (OSError, EOFError, ValueError) as e:
                        reason = f"went away during the session ({e})"
                        raise self._failed("transfer", address, reason, expected[address]) from e

    def abort(self) -> None:
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):  # it may be closed, or was never connected
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._hang_up()
        for address in list(self._opened):
            self._forget(address)

    def _receive_welcome(self, address: LocalAddress, link: socket.socket) -> None:
        with contextlib.ExitStack() as unwanted:
            byte, files, _, _ = socket.recv_fds(link, len(_WELCOME), _MAX_FILES)
            for file in files:
                unwanted.callback(os.close, file)
            if not byte:
                raise EOFError("it did not admit this replica")
            message = read_message(link)
            if address not in self._opened:
                self._opened[address] = self._open_memory(message, files)
                unwanted.pop_all()

    def _forget(self, address: LocalAddress) -> None:
        self._opened.pop(address).close()

    def _hang_up(self) -> None:
        while self._links:
            self._links.popitem()[1].close()

    def _failed(self, phase: str, address: LocalAddress, message: str, sequence: int | None = None) -> SyncError:
        bucket = None if sequence is None else BucketKey(self._session, address.sender, sequence)
        return SyncError(phase, self._who, None, bucket, f"sender {address.sender} {message}")


def _connect(link: socket.socket, name: str, deadline_s: float) -> None:
    """Connect by the deadline. Retries while the listener's backlog is full: with a timeout on the socket, Linux then
    fails at once."""
    limit = now_s() + deadline_s
    while True:
        try:
            return link.connect(name)
        except BlockingIOError:
            if now_s() > limit:
                raise
            time.sleep(_RETRY_S)


def _select(selector: selectors.BaseSelector, limit: float, spin_s: float) -> list[tuple[Any, int]]:
    """Ready files by ``limit``. Polls for the first ``spin_s``, yielding the core in between."""
    asleep_from = now_s() + spin_s
    while not (ready := selector.select(0)) and now_s() < min(asleep_from, limit):
        os.sched_yield()
    return ready or selector.select(max(limit - now_s(), 0))


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
