"""Sending end of the collective transports: broadcasts buckets from one sender to all its readers in a process group.

Only the data goes through the group. Control messages use one TCP connection per reader, for one session::

    reader                                                  writer
      token, hello {session, who, holds}      ───────────►
                                              ◄───────────   group {generation, rank, size, store, …}
                                              ◄───────────   bucket {sequence, packed, checksum, parts, zero_copy}, and
                                                             then its packed bytes and each zero-copy part
      {read: sequence}                        ───────────►   … its memory is free once all readers have sent this
                                              ◄───────────   end {buckets}

A group outlives its session and serves the next one if that has the same members (``holds``). A group cannot lose a
member: if one disconnects, or nothing makes progress, the writer abandons the generation and pings every reader::

                                              ◄───────────   stop {generation}
      {stopped: generation}                   ───────────►   … also unasked, when the reader's part of the group failed
                                              ◄───────────   group {next generation}, then all buckets not read by all

A reader that does not answer is dropped. One that answers has no half-received bucket and will not take one twice.

Copies cost core time that the broadcast itself needs, so large parts are sent without a copy, from the sender's own
memory to the receiver's destination. That memory belongs to others: a member that abandons a group breaks its
connections first.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import uuid
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.param_sync.buckets import Filled, TensorPart, aligned_capacity
from asyncrl.param_sync.device_ranges import works_on
from asyncrl.param_sync.transports.base import NoReaders
from asyncrl.param_sync.transports.broadcast import CollectiveBackend, GroupRendezvous
from asyncrl.param_sync.transports.listener import Hello, Listener
from asyncrl.param_sync.transports.messages import take_messages
from asyncrl.param_sync.transports.process_group import (
    BUFFERS,
    Group,
    host_store,
    listen,
    make_buffers,
    synchronize,
)
from asyncrl.param_sync.transports.selector_loop import SelectorLoop

_ZERO_COPY_BYTES = 1 << 20  # from this size on a separate broadcast is cheaper than a copy
_ATTEMPTS = 3  # limit of consecutive failed generations with the same members
_HELLO = frozenset({"session", "who", "holds"})
_RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True)
class CollectiveAddress:
    """Address of a writer, which admits peers that present the ``token``. ``backend``: the name of its backend."""

    sender: int
    backend: str
    host: str
    port: int
    token: str = field(repr=False)


class CollectiveWriter(SelectorLoop):
    """Implements `BucketWriter`. ``sender`` numbers the sending ranks. ``bucket_bytes`` is rounded down to a multiple
    of 64; twice that is held here, and in every reader for each sender, on ``device`` (None: the backend's default).
    ``host``: this machine's address on the readers' network."""

    zero_copy_from = _ZERO_COPY_BYTES

    def __init__(
        self,
        sender: int,
        bucket_bytes: int,
        host: str,
        backend: CollectiveBackend,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        capacity = aligned_capacity(bucket_bytes)
        self._backend, self._device = backend, backend.device_for(device)
        self._buffers = make_buffers(capacity, self._device)
        works_on(self._device)  # compiles here, not in the first session
        self._store, sock = host_store(host), listen(host)
        self.address = CollectiveAddress(sender, backend.name, host, sock.getsockname()[1], secrets.token_hex(16))
        admit = lambda sock, hello: self._calls.hand_over(partial(self._admit, sock, hello))
        self._listener = Listener(sock, _HELLO, admit, self.address.token)
        self._session: str | None = None
        self._expected: set[str] = set()
        self._peers: dict[str, _Peer] = {}
        self._group: Group | None = None
        self._members: set[str] = set()
        self._generation = ""  # the current one, or the last if abandoned
        self._joined = False  # all members of the session are known
        self._broken = False  # the group must be abandoned
        self._failures, self._why = 0, ""  # consecutive failed generations, and the reason
        self._unread: dict[int, _Unread] = {}  # buckets that a new generation may need again
        self._sequence = 0  # of the bucket being filled
        self.dropped: dict[str, str] = {}
        self.ceiling: float | None = None  # the link's speed is not measured

    def open(self, session: str, readers: Sequence[str], deadline_s: float, stall_s: float, keep: bool = False) -> None:
        """``keep`` has no effect: buckets cannot be kept."""
        self._leave_session()
        self._session, self._expected, self._sequence, self._unread = session, set(readers), 0, {}
        self._deadline, self._stall_s = now_s() + deadline_s, stall_s
        self.dropped, self._joined, self._broken, self._failures = {}, False, False, 0
        if not self._run_until(lambda: not self._expected, self._limit()):
            self.dropped |= dict.fromkeys(self._expected, f"did not join within {stall_s:g} s")
            self._expected = set()
        if self._group is not None and self._reusable():
            self._announce()
        else:
            self._abandon()
        self._joined = True
        self._repair()
        self._need_readers()

    def buffer(self) -> torch.Tensor:
        self._await_read(self._sequence - BUFFERS)
        self._unread.pop(self._sequence - BUFFERS, None)
        self._need_readers()
        return self._buffers[self._sequence % BUFFERS]

    def publish(self, filled: Filled) -> None:
        synchronize(self._device)
        packed = packed_bytes(filled.parts, filled.zero_copy)
        message = {
            "sequence": self._sequence,
            "packed": packed,
            "checksum": filled.checksum,
            "parts": filled.parts,
            "zero_copy": list(filled.zero_copy),
        }
        pieces = pieces_of(self._buffers[self._sequence % BUFFERS], packed, filled.zero_copy.values())
        self._unread[self._sequence] = _Unread(message, pieces)
        self._sequence += 1
        if self._group is not None:  # a new generation gets all unread buckets
            self._send_bucket(self._group, self._sequence - 1)
        self._repair()
        self._need_readers()

    def finish(self) -> None:
        self._await_read(self._sequence - 1)
        self._send(self._peers.values(), {"end": self._sequence})
        self._session = None
        self._leave_session()

    def abort(self, session: str) -> None:
        self._calls.hand_over(partial(self._abort, session))

    def close(self) -> None:
        self._session = None
        self._leave_session()
        self._abandon()
        self._listener.close()
        self._calls.close()
        self._selector.close()
        self._buffers = []
        del self._store

    # -- readers come and go ------------------------------------------------------------------------------------------

    def _admit(self, sock: socket.socket, hello: Hello) -> None:
        """Admit a reader that this session expects; close any other connection."""
        if hello["session"] != self._session or hello["who"] not in self._expected:
            sock.close()
            return
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            machine = sock.getpeername()[0]
        except OSError:  # it is gone already
            sock.close()
            return
        peer = self._peers[hello["who"]] = _Peer(hello["who"], machine, sock, hello["holds"])
        self._selector.register(sock, selectors.EVENT_READ, partial(self._on_readable, peer))
        self._expected.discard(peer.who)

    def _on_readable(self, peer: _Peer) -> None:
        data = _receive(peer.sock)
        if not data:
            self._drop(peer, "went away (its end of the connection is closed)")
            return
        peer.received += data
        try:
            for message in take_messages(peer.received):
                if not self._handle_message(peer, message):
                    return
        except (ValueError, KeyError) as e:
            self._drop(peer, f"sent an invalid message ({e!r})")

    def _handle_message(self, peer: _Peer, message: dict[str, Any]) -> bool:
        """False if the peer was dropped. Raises KeyError for a message that no reader sends."""
        if "stopped" in message:
            # the answer to "stop", or unasked because the reader's part of the group failed
            if message["stopped"] == self._generation:
                peer.stopped = self._broken = True
                self._why = message["why"] or self._why
        elif message["read"] == peer.read < self._sequence:
            peer.read += 1
            self._failures = 0
        else:
            self._drop(peer, f"acknowledged bucket {message['read']} where {peer.read} was next")
            return False
        return True

    def _abort(self, session: str) -> None:
        if session == self._session:
            self.dropped |= dict.fromkeys(self._expected, "the session was aborted")
            self._expected = set()
            for peer in list(self._peers.values()):
                self._drop(peer, "the session was aborted")

    def _drop(self, peer: _Peer, why: str) -> None:
        if self._peers.get(peer.who) is not peer:
            return
        self._remove(peer)
        self.dropped[peer.who] = f"{why}; buckets it had read: {peer.read}"
        self._broken, self._failures = True, 0

    def _remove(self, peer: _Peer) -> None:
        del self._peers[peer.who]
        self._selector.unregister(peer.sock)
        peer.sock.close()

    def _leave_session(self) -> None:
        for peer in list(self._peers.values()):
            self._remove(peer)
        if self._session is not None or self._broken:  # members have left the group, or will
            self._abandon()
        self._session, self._unread = None, {}

    def _need_readers(self) -> None:
        if not self._peers:
            self._abandon()
            self._unread = {}
            raise NoReaders

    # -- the group ----------------------------------------------------------------------------------------------------

    def _repair(self) -> None:
        """Abandon a broken group, and form the next generation once every remaining reader has left it."""
        while self._joined and self._peers:
            if self._group is not None and self._broken:
                self._abandon()
                self._send((p for p in self._peers.values() if not p.stopped), {"stop": self._generation})
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
        self._group = Group(self._rendezvous(0), self.address.host, self._backend, self._device, self._group_done)
        self._announce()
        for sequence in range(min((p.read for p in self._peers.values()), default=self._sequence), self._sequence):
            self._send_bucket(self._group, sequence)

    def _announce(self) -> None:
        # a chain brings each bucket to a machine once: those of a machine are in a row, those of this one come first
        order = lambda peer: (peer.machine != self.address.host, peer.machine, peer.who)
        for rank, peer in enumerate(sorted(self._peers.values(), key=order), 1):
            peer.stopped = False
            self._send([peer], {"group": asdict(self._rendezvous(rank)), "capacity": self._buffers[0].numel()})

    def _rendezvous(self, rank: int) -> GroupRendezvous:
        size = len(self._members) + 1
        return GroupRendezvous(self._generation, rank, size, self.address.host, self._store.port, self._stall_s)

    def _reusable(self) -> bool:
        held = {who: peer.holds for who, peer in self._peers.items()}
        return not self._broken and held == dict.fromkeys(self._members, self._generation)

    def _group_done(self, group: Group, error: Exception | None) -> None:
        if error is not None:
            self._calls.hand_over(partial(self._group_failed, group, error))

    def _group_failed(self, group: Group, error: Exception) -> None:
        if group is self._group:
            self._broken, self._why = True, str(error)

    def _abandon(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _send_bucket(self, group: Group, sequence: int) -> None:
        bucket = self._unread[sequence]
        self._send(self._peers.values(), bucket.message)
        group.broadcast(bucket.pieces)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _handle(self, timeout_s: float) -> None:
        super()._handle(timeout_s)
        self._repair()

    def _await_read(self, sequence: int) -> None:
        """Wait until every reader has read bucket ``sequence``.

        One stalled member stops the whole group. After half of the stall time all readers are therefore asked to leave
        it, and those that have not answered after the other half are dropped."""
        read = lambda: all(p.read > sequence for p in self._peers.values())
        while not read():
            waited_from = now_s()
            if self._run_until(read, min(waited_from + self._stall_s / 2, self._deadline)):
                return
            self._broken, self._why = True, f"no reader made progress for {self._stall_s / 2:g} s"
            self._repair()
            moving = lambda: self._group is not None or read()
            limit = min(waited_from + self._stall_s, self._deadline)
            if self._run_until(moving, limit):
                continue
            late = now_s() >= self._deadline
            for peer in [p for p in self._peers.values() if (p.read <= sequence if late else not p.stopped)]:
                self._drop(peer, f"was silent for {limit - waited_from:.1f} s")


def packed_bytes(parts: Iterable[TensorPart], zero_copy: Container[str]) -> int:
    """Bytes of a bucket's buffer that its packed parts (those not in ``zero_copy``) occupy."""
    return max((part.offset + part.nbytes for part in parts if part.name not in zero_copy), default=0)


def pieces_of(buffer: torch.Tensor, packed: int, zero_copy: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors to broadcast for a bucket, in order; at least one byte."""
    pieces = list(zero_copy)
    return [buffer[: max(packed, 1)], *pieces] if packed or not pieces else pieces


class _Unread(NamedTuple):
    """A bucket that some reader has not read: its message and the tensors to broadcast."""

    message: dict[str, Any]
    pieces: list[torch.Tensor]


@dataclass(eq=False)
class _Peer:
    """A reader, as its writer sees it. It has read all buckets before ``read``. ``stopped``: it is in no group."""

    who: str
    machine: str  # its address
    sock: socket.socket
    holds: str
    read: int = 0
    stopped: bool = True
    received: bytearray = field(default_factory=bytearray)


def _receive(sock: socket.socket) -> bytes:
    """Received bytes; none if the connection is closed or broken."""
    try:
        return sock.recv(_RECEIVE_BYTES)
    except OSError:
        return b""
