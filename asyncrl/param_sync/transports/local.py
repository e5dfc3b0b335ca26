"""Buckets in shared memory, on one machine: the data is written once and read where it lies.

A writer owns a memory file (memfd), mapped and touched once per run, and a Unix socket in the abstract namespace.
Neither has a name in any folder, so a killed process leaves nothing behind. Only small messages take the socket::

    reader                                            writer
      hello {session, who}              ───────────►
                                        ◄───────────   one byte, with the memory file's descriptor
                                        ◄───────────   bucket {sequence, place, keep, checksum, parts}
      acknowledgement (sequence)        ───────────►   … the buffer is free when all readers have sent this
                                        ◄───────────   end {buckets}

The buffers in the file take turns. In a session that keeps, each bucket has a buffer of its own, nobody acknowledges,
and the readers read when they like, until the next session.

Whoever dies closes the socket, which the other end sees at once. A connection lives for one session, so a message of an
earlier session has no way to arrive. Linux only.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import selectors
import socket
import struct
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncrl.param_sync.buckets import ALIGN_BYTES, Filled
from asyncrl.param_sync.errors import BucketKey, SyncError
from asyncrl.param_sync.receiver import Bucket, TensorPart
from asyncrl.param_sync.transports.base import NoReaders
from asyncrl.param_sync.transports.lend import lent
from asyncrl.param_sync.transports.messages import framed, message_in, read_message, same_user
from asyncrl.param_sync.transports.pump import Pump
from asyncrl.telemetry.recorder import now_s

_SEQUENCE = struct.Struct("<Q")  # an acknowledgement
_BACKLOG = 1024
_WATCHFUL_S = 1e-3  # a reader that sleeps between two buckets costs its writer a tenth of the bucket's time to wake


class SharedMemoryAddress(NamedTuple):
    """``socket`` is unique to one writer's life; ``machine`` is the boot id of where it lives."""

    sender: int
    socket: str
    machine: str


class SharedMemoryWriter(Pump):
    """Implements `BucketWriter`. ``sender`` numbers the sending ranks; ``bucket_bytes`` is rounded down to whole lines
    of 64 bytes. So much is mapped here and in every reader for each of ``buffers`` (with two, filling one overlaps
    reading the other), and for all buckets at once after a session that kept them."""

    def __init__(self, sender: int, bucket_bytes: int, buffers: int = 2) -> None:
        super().__init__()
        self._capacity = bucket_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._stride = -(-self._capacity // mmap.PAGESIZE) * mmap.PAGESIZE  # buffers are mapped one by one
        if self._capacity <= 0:
            raise ValueError(f"bucket_bytes is {bucket_bytes}, a bucket has at least {ALIGN_BYTES}")
        self.address = SharedMemoryAddress(sender, f"asyncrl-{uuid.uuid4().hex}", _machine())
        self._file = os.memfd_create("asyncrl-buckets")
        self._buffers: list[torch.Tensor] = []
        self._rotating = buffers
        for index in range(buffers):
            self._at(index)
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
        self._session, self._expected, self._sequence, self._keep = session, set(readers), 0, keep
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
            self._await_read(self._sequence - self._rotating)
        self._need_readers()
        return self._at(self._index)

    def publish(self, filled: Filled) -> None:
        message = {
            "sequence": self._sequence,
            "place": (self._index * self._stride, self._capacity),
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

    def close(self) -> None:
        """Give everything back. The buffers are unmapped when nobody holds them any more."""
        self._leave()
        self._selector.close()
        self._listener.close()
        for file in (self._file, self._wake):
            os.close(file)
        self._buffers = []

    @property
    def _index(self) -> int:
        """Of the buffer for the bucket that is next."""
        return self._sequence if self._keep else self._sequence % self._rotating

    @functools.cached_property
    def ceiling(self) -> float:
        """Bytes per second of a plain copy of a bucket."""
        source, target = np.zeros(self._capacity, np.uint8), np.empty(self._capacity, np.uint8)
        np.copyto(target, source)  # touches the pages
        began_s = now_s()
        np.copyto(target, source)
        return self._capacity / max(now_s() - began_s, 1e-9)

    def _at(self, index: int) -> torch.Tensor:
        """The buffer of this index; it is made if there was none yet."""
        while index >= len(self._buffers):
            start = len(self._buffers) * self._stride
            os.truncate(self._file, start + self._stride)
            mapped = _map(self._file, start, self._capacity)
            self._buffers.append(torch.frombuffer(mapped, dtype=torch.uint8))
        return self._buffers[index]

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
            socket.send_fds(sock, [b"."], [self._file])
        except OSError as e:
            self._drop(peer, f"went away when it joined ({e})")

    def _acknowledged(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._drop(peer, "went away (its end of the connection is closed)")
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
        at = "" if peer.read >= self._sequence else f"; bucket {peer.read} was its next"
        self.dropped[peer.who] = why + at

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


class SharedMemoryReader:
    """Implements `BucketReader`. ``who`` is the replica's name. A writer's memory stays mapped between sessions."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._session = ""
        self._files: dict[SharedMemoryAddress, int] = {}
        self._mapped: dict[SharedMemoryAddress, dict[int, mmap.mmap]] = {}  # by their start in the file
        self._links: dict[SharedMemoryAddress, socket.socket] = {}

    def connect(self, session: str, addresses: Sequence[SharedMemoryAddress], deadline_s: float) -> None:
        self._hang_up()
        for gone in self._files.keys() - set(addresses):
            self._forget(gone)
        self._session = session
        for address in addresses:
            if address.machine != _machine():
                raise self._failed("plan", address, "is on another machine, where shared memory does not reach")
            link = self._links[address] = socket.socket(socket.AF_UNIX)
            link.settimeout(deadline_s)
            try:
                link.connect("\0" + address.socket)
                if not same_user(link):
                    raise self._failed("plan", address, "belongs to another user")
                link.sendall(framed({"session": session, "who": self._who}))
            except OSError as e:
                raise self._failed("plan", address, f"does not listen ({e}): its process has ended") from e

    def buckets(self, deadline_s: float) -> Iterator[Bucket]:
        limit = now_s() + deadline_s
        session, links = self._session, dict(self._links)
        expected = dict.fromkeys(links, 0)
        with contextlib.ExitStack() as stack:
            stack.callback(self._hang_up)  # also when the consumer fails: the writers see it at once
            selector = stack.enter_context(selectors.DefaultSelector())
            for address, link in links.items():
                selector.register(link, selectors.EVENT_READ, address)
            welcomed: set[SharedMemoryAddress] = set()
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
                        if message["keep"]:
                            watchful_s = 0.0  # nobody waits for this reader, and its engine generates meanwhile
                            data = memoryview(self._array(address, message["place"]).data)
                            yield Bucket(*which, parts, data, message["checksum"], kept=True)
                        else:
                            with lent(self._array(address, message["place"]), which, self._who) as data:
                                yield Bucket(*which, parts, data, message["checksum"])
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
        for address in list(self._files):
            self._forget(address)

    def _receive_welcome(self, address: SharedMemoryAddress, link: socket.socket) -> None:
        byte, files, _, _ = socket.recv_fds(link, 1, 1)
        if not byte:
            raise EOFError("it did not let this replica in")
        if address in self._files:
            os.close(files[0])
        else:
            self._files[address], self._mapped[address] = files[0], {}

    def _forget(self, address: SharedMemoryAddress) -> None:
        os.close(self._files.pop(address))
        del self._mapped[address]

    def _array(self, address: SharedMemoryAddress, place: Sequence[int]) -> np.ndarray:
        """uint8 [capacity]: a new array over a bucket's memory."""
        (start, length), mapped = place, self._mapped[address]
        if start not in mapped:
            mapped[start] = _map(self._files[address], start, length, mmap.PROT_READ)
        return np.frombuffer(mapped[start], dtype=np.uint8)

    def _hang_up(self) -> None:
        while self._links:
            self._links.popitem()[1].close()

    def _failed(self, phase: str, address: SharedMemoryAddress, message: str, sequence: int | None = None) -> SyncError:
        bucket = None if sequence is None else BucketKey(self._session, address.sender, sequence)
        return SyncError(phase, self._who, None, bucket, f"sender {address.sender} {message}")


def _select(selector: selectors.BaseSelector, limit: float, watchful_s: float) -> list[tuple[Any, int]]:
    """What is ready by ``limit``. For the first ``watchful_s`` it looks again and again, letting others run between."""
    asleep_from = now_s() + watchful_s
    while not (ready := selector.select(0)) and now_s() < min(asleep_from, limit):
        os.sched_yield()
    return ready or selector.select(max(limit - now_s(), 0))


def _map(file: int, start: int, length: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """Map a part of a file, all its pages present: no page fault is left for the transfer."""
    return mmap.mmap(file, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection, offset=start)


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
