"""Receiving end of the collective transports; `asyncrl.param_sync.transports.collective` describes the messages."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.param_sync.buckets import Bucket, DestinationOf, TensorPart
from asyncrl.param_sync.device_ranges import works_on
from asyncrl.param_sync.errors import BucketKey, SyncError
from asyncrl.param_sync.transports.borrowed_buffer import borrowed, borrowed_on_device
from asyncrl.param_sync.transports.broadcast import CollectiveBackend, GroupRendezvous
from asyncrl.param_sync.transports.collective import CollectiveAddress, packed_bytes, pieces_of
from asyncrl.param_sync.transports.messages import framed, take_messages
from asyncrl.param_sync.transports.process_group import (
    BUFFERS,
    Group,
    make_buffers,
)
from asyncrl.param_sync.transports.selector_loop import CallQueue

_RECEIVE_BYTES = 1 << 16


class CollectiveReader:
    """Implements `BucketReader`. ``who`` is the replica's name. Bytes arrive on ``device`` (None: the backend's
    default). `Bucket.data` is a uint8 tensor there, unless ``device`` is the CPU."""

    def __init__(self, who: str, backend: CollectiveBackend, device: torch.device | str | None = None) -> None:
        self._who, self._backend, self._device = who, backend, backend.device_for(device)
        works_on(self._device)
        self._session = ""
        self._calls = CallQueue()
        self._held: dict[CollectiveAddress, _Membership] = {}  # groups that the next session may reuse
        self._links: dict[CollectiveAddress, _Link] = {}
        self._destination: DestinationOf | None = None
        self._writing: list[Group] = []  # abandoned, but they may still write to a destination

    def connect(self, session: str, addresses: Sequence[CollectiveAddress], deadline_s: float) -> None:
        self._hang_up()
        for gone in self._held.keys() - set(addresses):
            self._held.pop(gone).group.abort()
        self._session, limit = session, now_s() + deadline_s
        self._require_quiet("plan")
        for address in addresses:
            name = self._backend.name
            if address.backend != name:
                problem = f"sends over {address.backend}, but this replica receives over {name}; both must be the same"
                raise self._failed("plan", address, problem)
            try:
                sock = socket.create_connection((address.host, address.port), max(limit - now_s(), 1e-3))
                self._links[address] = _Link(address, sock)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                held = self._held.get(address)
                hello = {"session": session, "who": self._who, "holds": held.group.generation if held else ""}
                sock.sendall(address.token.encode() + framed(hello))
            except OSError as e:
                raise self._failed("plan", address, f"does not listen ({e}): its process has ended") from e

    def buckets(self, deadline_s: float, destination: DestinationOf | None = None) -> Iterator[Bucket]:
        self._destination, limit = destination, now_s() + deadline_s
        links = list(self._links.values())
        with contextlib.ExitStack() as stack:
            stack.callback(self._hang_up)  # even if the consumer raises, so that the writers notice at once
            selector = stack.enter_context(selectors.DefaultSelector())
            selector.register(self._calls.fd, selectors.EVENT_READ)
            for link in links:
                selector.register(link.sock, selectors.EVENT_READ, link)
            while not all(link.done for link in links):
                ready = next((link for link in links if link.here), None)
                # Handle all messages first: the next bucket is in flight while this one is taken, and no bucket is
                # taken from a sender that has disconnected.
                events = selector.select(0 if ready else max(limit - now_s(), 0))
                if not events and ready is None:
                    link = next(link for link in links if not link.done)
                    problem = f"was not done by the deadline of {deadline_s:g} s"
                    raise self._failed("transfer", link.address, problem, link.expected)
                for key, _ in events:
                    if key.data is None:
                        self._calls.run()
                        continue
                    self._guarded(key.data, limit, self._on_readable)
                    if key.data.ended:
                        selector.unregister(key.data.sock)
                if not events and ready is not None:
                    with self._bucket(ready, ready.here.popleft()) as bucket:
                        yield bucket
                    self._guarded(ready, limit, self._acknowledge)

    def abort(self) -> None:
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):  # it may be closed
                link.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._hang_up()
        while self._held:
            self._held.popitem()[1].group.abort()
        self._calls.close()

    # -- a link to a sender -------------------------------------------------------------------------------------------

    def _guarded(self, link: _Link, limit: float, step: Callable[[_Link], None]) -> None:
        try:
            link.sock.settimeout(max(limit - now_s(), 1e-3))
            step(link)
        except (OSError, EOFError, ValueError) as e:
            raise self._failed("transfer", link.address, f"went away during the session ({e})", link.expected) from e

    def _on_readable(self, link: _Link) -> None:
        data = link.sock.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError("its end of the connection is closed" if link.welcome else "it did not admit this replica")
        link.received += data
        for message in take_messages(link.received):
            if "group" in message:
                self._join(link, message)
            elif "stop" in message:
                self._stop(link, "")
            elif "end" in message:
                link.ended = True
            else:
                self._receive(link, message)

    def _acknowledge(self, link: _Link) -> None:
        link.sock.sendall(framed({"read": link.expected}))
        link.expected += 1

    def _join(self, link: _Link, message: dict[str, Any]) -> None:
        rendezvous = GroupRendezvous(**message["group"])
        held = self._held.get(link.address)
        link.welcome = True
        if held is not None and held.group.generation == rendezvous.generation:
            return
        self._abandon(link)
        host = link.sock.getsockname()[0]
        group = Group(rendezvous, host, self._backend, self._device, self._group_done)
        self._held[link.address] = _Membership(group, make_buffers(message["capacity"], self._device))

    def _receive(self, link: _Link, message: dict[str, Any]) -> None:
        """Post the receive of the bucket that ``message`` announces."""
        held = self._held.get(link.address)
        if held is None:
            return  # its generation failed here; the bucket will be sent again
        bucket = held.arriving(message)
        if bucket.sequence >= link.expected:  # earlier ones are repeated for other readers
            for name, part in bucket.zero_copy.items():
                live = self._destination(self._session, part, self._device) if self._destination is not None else None
                if live is not None:
                    bucket.in_place[name] = live
                    held.writes = True
        link.coming.append(bucket)
        held.group.broadcast(bucket.pieces())

    def _stop(self, link: _Link, why: str) -> None:
        """Leave the generation. Buckets not taken yet will be sent again."""
        if (generation := self._abandon(link)) is not None:
            link.sock.sendall(framed({"stopped": generation, "why": why}))

    def _abandon(self, link: _Link) -> str | None:
        link.coming.clear()
        link.here.clear()
        if (held := self._held.pop(link.address, None)) is None:
            return None
        if not held.group.abort() and held.writes:
            self._writing.append(held.group)
            self._require_quiet("transfer")
        return held.group.generation

    def _require_quiet(self, phase: str) -> None:
        """Raises SyncError while a broadcast of an earlier session or generation may still write into the weights."""
        self._writing = [group for group in self._writing if not group.abort()]
        if self._writing:
            problem = "an aborted broadcast does not end and may still write into the weights; restart this process"
            raise SyncError(phase, self._who, None, None, problem)

    def _group_done(self, group: Group, error: Exception | None) -> None:
        self._calls.hand_over(partial(self._received, group, error))

    def _received(self, group: Group, error: Exception | None) -> None:
        for link in self._links.values():
            held = self._held.get(link.address)
            if held is None or held.group is not group:
                continue
            if error is not None:
                with contextlib.suppress(OSError):  # a closed link is handled where it is read
                    self._stop(link, str(error))
            elif (bucket := link.coming.popleft()).sequence >= link.expected:
                link.here.append(bucket)

    @contextlib.contextmanager
    def _bucket(self, link: _Link, arrived: _Arriving) -> Iterator[Bucket]:
        key = BucketKey(self._session, link.address.sender, arrived.sequence)
        with _borrowed(arrived.buffer[: arrived.in_buffer()], key, self._who) as data:
            yield Bucket(*key, arrived.parts, data, arrived.checksum, in_place=arrived.in_place)

    def _hang_up(self) -> None:
        self._destination = None
        with contextlib.ExitStack() as stack:  # every link, even if leaving a group raises
            while self._links:
                _, link = self._links.popitem()
                link.sock.close()
                if not link.done:
                    stack.callback(self._abandon, link)

    def _failed(self, phase: str, address: CollectiveAddress, message: str, sequence: int | None = None) -> SyncError:
        bucket = None if sequence is None else BucketKey(self._session, address.sender, sequence)
        return SyncError(phase, self._who, None, bucket, f"sender {address.sender} {message}")


@dataclass(eq=False)
class _Membership:
    """A reader's membership in one generation, with its own buffers. ``writes``: parts may also be received directly
    into their destinations."""

    group: Group
    buffers: list[torch.Tensor]
    writes: bool = False

    def arriving(self, message: dict[str, Any]) -> _Arriving:
        parts, sequence = tuple(TensorPart(*part) for part in message["parts"]), message["sequence"]
        names = set(message["zero_copy"])
        zero_copy = {part.name: part for part in parts if part.name in names}
        buffer = self.buffers[sequence % BUFFERS]
        return _Arriving(sequence, parts, zero_copy, message["packed"], message["checksum"], buffer)


@dataclass(eq=False)
class _Arriving:
    """A bucket whose receive is posted: ``packed`` bytes go into the ``buffer``, each ``zero_copy`` part ``in_place``
    or into the buffer too. The buffer is free, because bucket k is sent only after all readers have acknowledged bucket
    k − 2."""

    sequence: int
    parts: tuple[TensorPart, ...]
    zero_copy: dict[str, TensorPart]
    packed: int
    checksum: int | None
    buffer: torch.Tensor
    in_place: dict[str, torch.Tensor] = field(default_factory=dict)

    def pieces(self) -> list[torch.Tensor]:
        """Tensors that the broadcasts fill, in order."""
        into = lambda part: self.buffer[part.offset : part.offset + part.nbytes]
        zero_copy = [
            self.in_place[name] if name in self.in_place else into(part) for name, part in self.zero_copy.items()
        ]
        return pieces_of(self.buffer, self.packed, zero_copy)

    def in_buffer(self) -> int:
        return packed_bytes(self.parts, self.in_place)


@dataclass(eq=False)
class _Link:
    """A sender, as its reader sees it. Buckets are ``coming`` once their receive is posted, then ``here`` until they
    are taken. ``expected``: sequence of the next one to take."""

    address: CollectiveAddress
    sock: socket.socket
    expected: int = 0
    welcome: bool = False
    ended: bool = False
    coming: deque[_Arriving] = field(default_factory=deque)
    here: deque[_Arriving] = field(default_factory=deque)
    received: bytearray = field(default_factory=bytearray)

    @property
    def done(self) -> bool:
        """True if nothing more will come, not even repeats for other readers, so that the next session may reuse the
        group."""
        return self.ended and not self.coming


def _borrowed(buffer: torch.Tensor, key: BucketKey, who: str) -> AbstractContextManager[memoryview | torch.Tensor]:
    return borrowed(buffer.numpy(), key, who) if buffer.device.type == "cpu" else borrowed_on_device(buffer, key, who)
