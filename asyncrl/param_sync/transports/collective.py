"""Buckets between machines: each goes over a process group from the sender to all its readers, by gloo or NCCL.

Only the data takes the group. Everything else takes a TCP connection per reader, which lives for one session::

    reader                                                  writer
      token, hello {session, who, holds}      ───────────►
                                              ◄───────────   group {generation, rank, size, store, …}
                                              ◄───────────   bucket {sequence, packed, checksum, parts, loose}, and
                                                             then its packed bytes and each loose part
      {read: sequence}                        ───────────►   … its memory is free when all readers have sent this
                                              ◄───────────   end {buckets}

A group outlives its session and serves the next one if that has the same members (``holds`` says so). It is whole or
of no use: when a member goes, or nobody moves, the writer gives the generation up and asks for a sign of life::

                                              ◄───────────   stop {generation}
      {stopped: generation}                   ───────────►   … also by itself, when its part of the group failed
                                              ◄───────────   group {next generation}, then what not everyone has read

Who does not answer is dropped. A reader has nothing half done when it answers, and takes no bucket a second time.

Copying takes time of cores that gloo needs itself. So large parts travel loose: from where the sender has them and to
where the receiver wants them. Whoever gives a group up breaks its connections first: the memory is that of others.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import uuid
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from asyncrl.param_sync.buckets import ALIGN_BYTES, Filled
from asyncrl.param_sync.receiver import TensorPart
from asyncrl.param_sync.transports.backends import Backend, Seat
from asyncrl.param_sync.transports.base import NoReaders
from asyncrl.param_sync.transports.messages import message_in, take_messages
from asyncrl.param_sync.transports.process_group import (
    BUFFERS,
    Calls,
    Group,
    device_for,
    host_store,
    listen,
    make_buffers,
    settle,
)
from asyncrl.param_sync.transports.pump import Pump
from asyncrl.telemetry.recorder import now_s

_LOOSE_BYTES = 1 << 20  # a broadcast of its own is worth it from here on
_ATTEMPTS = 3  # generations in a row that may come to nothing with the same members
_HELLO_BYTES = 4096
_RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True)
class CollectiveAddress:
    """Where a writer listens; it admits who presents the ``token``."""

    sender: int
    backend: Backend
    host: str
    port: int
    token: str = field(repr=False)


class CollectiveWriter(Pump):
    """Implements `BucketWriter`. ``sender`` numbers the sending ranks; ``bucket_bytes`` is rounded down to whole lines
    of 64 bytes, and twice that is held here and per sender in every reader, on ``device`` (NCCL: a CUDA device, by
    default the current one). ``host``: this machine's address on the network where the readers are."""

    loose_from = _LOOSE_BYTES

    def __init__(
        self,
        sender: int,
        bucket_bytes: int,
        host: str,
        backend: Backend = "gloo",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        capacity = bucket_bytes // ALIGN_BYTES * ALIGN_BYTES
        if capacity <= 0:
            raise ValueError(f"bucket_bytes is {bucket_bytes}, a bucket has at least {ALIGN_BYTES}")
        self._backend, self._device = backend, device_for(backend, device)
        self._buffers = make_buffers(capacity, self._device)
        self._listener = listen(host)
        self._listener.setblocking(False)
        self._store = host_store(host)
        self.address = CollectiveAddress(sender, backend, host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._calls = Calls()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._calls.fd, selectors.EVENT_READ, self._calls.run)
        self._greeted: set[socket.socket] = set()  # those whose hello is not whole
        self._session: str | None = None
        self._expected: set[str] = set()
        self._peers: dict[str, _Peer] = {}
        self._group: Group | None = None
        self._members: set[str] = set()
        self._generation = ""  # of the group, or of the last one if it was given up
        self._joined = False  # the session's members are known
        self._broken = False  # the group is to be given up
        self._failures, self._why = 0, ""  # generations in a row that came to nothing
        self._unread: dict[int, _Unread] = {}  # buckets that a new generation may need again
        self._sequence = 0  # of the bucket being filled
        self.dropped: dict[str, str] = {}
        self.ceiling: float | None = None  # the link's own speed is not measured

    def open(self, session: str, readers: Sequence[str], deadline_s: float, stall_s: float, keep: bool = False) -> None:
        """Nothing can be kept here: ``keep`` makes no difference."""
        self._leave()
        self._session, self._expected, self._sequence, self._unread = session, set(readers), 0, {}
        self._deadline, self._stall_s = now_s() + deadline_s, stall_s
        self.dropped, self._joined, self._broken, self._failures = {}, False, False, 0
        if not self._pump(lambda: not self._expected, self._limit()):
            self.dropped |= dict.fromkeys(self._expected, f"did not join within {stall_s:g} s")
            self._expected = set()
        if self._group is not None and self._can_use_again():
            self._announce()
        else:
            self._give_up()
        self._joined = True
        self._mend()
        self._need_readers()

    def buffer(self) -> torch.Tensor:
        self._await_read(self._sequence - BUFFERS)
        self._unread.pop(self._sequence - BUFFERS, None)
        self._need_readers()
        return self._buffers[self._sequence % BUFFERS]

    def publish(self, filled: Filled) -> None:
        settle(self._device)
        packed = packed_bytes(filled.parts, filled.loose)
        message = {
            "sequence": self._sequence,
            "packed": packed,
            "checksum": filled.checksum,
            "parts": filled.parts,
            "loose": list(filled.loose),
        }
        pieces = pieces_of(self._buffers[self._sequence % BUFFERS], packed, filled.loose.values())
        self._unread[self._sequence] = _Unread(message, pieces)
        self._sequence += 1
        if self._group is not None:  # a new generation gets all that is unread
            self._send_bucket(self._group, self._sequence - 1)
        self._mend()
        self._need_readers()

    def finish(self) -> None:
        self._await_read(self._sequence - 1)
        self._tell(self._peers.values(), {"end": self._sequence})
        self._session = None
        self._leave()

    def abort(self, session: str) -> None:
        self._calls.hand_over(partial(self._abort, session))

    def close(self) -> None:
        self._session = None
        self._leave()
        self._give_up()
        self._calls.close()
        self._selector.close()
        self._listener.close()
        self._buffers = []
        del self._store

    # -- readers come and go ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                self._greeted.add(sock)
                self._selector.register(sock, selectors.EVENT_READ, partial(self._greet, sock, bytearray()))

    def _greet(self, sock: socket.socket, received: bytearray) -> None:
        """Read a hello, as far as it has come; let in whom this session expects, and turn away anybody else."""
        data = _receive(sock)
        received += data
        try:
            hello = self._hello_in(received)
        except ValueError:
            data, hello = b"", None
        if data and hello is None:
            return
        self._selector.unregister(sock)
        self._greeted.discard(sock)
        if hello is None or hello["session"] != self._session or hello["who"] not in self._expected:
            sock.close()
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = self._peers[hello["who"]] = _Peer(hello["who"], sock, hello["holds"])
        self._selector.register(sock, selectors.EVENT_READ, partial(self._hear, peer))
        self._expected.discard(peer.who)

    def _hello_in(self, received: bytearray) -> dict[str, Any] | None:
        """The hello, or None while it is not whole. Raises ValueError for anything that does not begin with the token:
        nothing else of it is looked at."""
        token = self.address.token.encode()
        if len(received) > _HELLO_BYTES:
            raise ValueError(f"a hello has at most {_HELLO_BYTES} bytes")
        if len(received) < len(token):
            return None
        if not hmac.compare_digest(bytes(received[: len(token)]), token):
            raise ValueError("not this writer's token")
        return message_in(received[len(token) :])

    def _hear(self, peer: _Peer) -> None:
        data = _receive(peer.sock)
        if not data:
            self._drop(peer, "went away (its end of the connection is closed)")
            return
        peer.received += data
        for message in take_messages(peer.received):
            if "stopped" in message:
                # an answer to "stop", or its part of the group failed
                if message["stopped"] == self._generation:
                    peer.stopped = self._broken = True
                    self._why = message["why"] or self._why
            elif message["read"] == peer.read < self._sequence:
                peer.read += 1
                self._failures = 0
            else:
                self._drop(peer, f"acknowledged bucket {message['read']} where {peer.read} was next")
                return

    def _abort(self, session: str) -> None:
        if session == self._session:
            self.dropped |= dict.fromkeys(self._expected, "the session was aborted")
            self._expected = set()
            for peer in list(self._peers.values()):
                self._drop(peer, "the session was aborted")

    def _drop(self, peer: _Peer, why: str) -> None:
        if self._peers.get(peer.who) is not peer:
            return
        self._part_from(peer)
        self.dropped[peer.who] = f"{why}; buckets it had read: {peer.read}"
        self._broken, self._failures = True, 0

    def _part_from(self, peer: _Peer) -> None:
        del self._peers[peer.who]
        self._selector.unregister(peer.sock)
        peer.sock.close()

    def _leave(self) -> None:
        for peer in list(self._peers.values()):
            self._part_from(peer)
        for sock in self._greeted:
            self._selector.unregister(sock)
            sock.close()
        self._greeted.clear()
        if self._session is not None or self._broken:  # members have left the group, or are about to
            self._give_up()
        self._session, self._unread = None, {}

    def _need_readers(self) -> None:
        if not self._peers:
            self._give_up()
            self._unread = {}
            raise NoReaders

    # -- the group ----------------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Give a broken group up, and form the next generation when all who are left have done so too."""
        while self._joined and self._peers:
            if self._group is not None and self._broken:
                self._give_up()
                self._tell((p for p in self._peers.values() if not p.stopped), {"stop": self._generation})
            elif self._group is None and all(peer.stopped for peer in self._peers.values()):
                self._form()
            else:
                return

    def _form(self) -> None:
        if self._failures == _ATTEMPTS:
            for peer in list(self._peers.values()):
                self._drop(peer, f"is in a group that failed {_ATTEMPTS} times in a row ({self._why})")
            return
        self._broken, self._failures = False, self._failures + 1
        self._generation, self._members = uuid.uuid4().hex, set(self._peers)
        self._group = Group(self._seat(0), self.address.host, self._backend, self._device, self._group_done)
        self._announce()
        for sequence in range(min((p.read for p in self._peers.values()), default=self._sequence), self._sequence):
            self._send_bucket(self._group, sequence)

    def _announce(self) -> None:
        for rank, peer in enumerate(sorted(self._peers.values(), key=lambda p: p.who), 1):
            peer.stopped = False
            self._tell([peer], {"group": asdict(self._seat(rank)), "capacity": self._buffers[0].numel()})

    def _seat(self, rank: int) -> Seat:
        size = len(self._members) + 1
        return Seat(self._generation, rank, size, self.address.host, self._store.port, self._stall_s)

    def _can_use_again(self) -> bool:
        held = {who: peer.holds for who, peer in self._peers.items()}
        return not self._broken and held == dict.fromkeys(self._members, self._generation)

    def _group_done(self, group: Group, error: Exception | None) -> None:
        if error is not None:
            self._calls.hand_over(partial(self._group_failed, group, error))

    def _group_failed(self, group: Group, error: Exception) -> None:
        if group is self._group:
            self._broken, self._why = True, str(error)

    def _give_up(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _send_bucket(self, group: Group, sequence: int) -> None:
        bucket = self._unread[sequence]
        self._tell(self._peers.values(), bucket.message)
        group.broadcast(bucket.pieces)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _handle(self, timeout_s: float) -> None:
        super()._handle(timeout_s)
        self._mend()

    def _await_read(self, sequence: int) -> None:
        """Wait until every reader has read bucket ``sequence``.

        In a group one that stands still stops the others. So when half of the stall time has passed all are asked to
        leave it, and those that have not answered when the other half has are dropped."""
        behind = lambda: [p for p in self._peers.values() if p.read <= sequence]
        while behind():
            waited_from = now_s()
            if self._pump(lambda: not behind(), min(waited_from + self._stall_s / 2, self._deadline)):
                return
            self._broken, self._why = True, f"nobody moved for {self._stall_s / 2:g} s"
            self._mend()
            moving = lambda: self._group is not None or not behind()
            if self._pump(moving, min(waited_from + self._stall_s, self._deadline)):
                continue
            mute = [p for p in self._peers.values() if not p.stopped]
            for peer in behind() if now_s() >= self._deadline else mute:
                self._drop(peer, f"was silent for {now_s() - waited_from:.1f} s")


def packed_bytes(parts: Iterable[TensorPart], loose: Container[str]) -> int:
    """How much of a bucket's buffer its parts take that are not loose."""
    return max((part.offset + part.nbytes for part in parts if part.name not in loose), default=0)


def pieces_of(buffer: torch.Tensor, packed: int, loose: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What is broadcast of a bucket, one after the other: at least something, if only a byte."""
    pieces = list(loose)
    return [buffer[: max(packed, 1)], *pieces] if packed or not pieces else pieces


class _Unread(NamedTuple):
    """A bucket that somebody has still to read: what is said of it, and what is broadcast."""

    message: dict[str, Any]
    pieces: list[torch.Tensor]


@dataclass(eq=False)
class _Peer:
    """A reader, as its writer sees it: it has read all buckets before number ``read``; ``stopped``: is in no group."""

    who: str
    sock: socket.socket
    holds: str
    read: int = 0
    stopped: bool = True
    received: bytearray = field(default_factory=bytearray)


def _receive(sock: socket.socket) -> bytes:
    """What has come; nothing if the connection is closed or broken."""
    try:
        return sock.recv(_RECEIVE_BYTES)
    except OSError:
        return b""
