"""The receiving end of the collective transport: see `asyncrl.param_sync.transports.collective` for what is said."""

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

from asyncrl.param_sync.errors import BucketKey, SyncError
from asyncrl.param_sync.receiver import Bucket, Placing, TensorPart
from asyncrl.param_sync.transports.backends import Backend, Seat
from asyncrl.param_sync.transports.collective import CollectiveAddress, packed_bytes, pieces_of
from asyncrl.param_sync.transports.lend import lent, lent_on_device
from asyncrl.param_sync.transports.messages import framed, take_messages
from asyncrl.param_sync.transports.process_group import (
    BUFFERS,
    Calls,
    Group,
    device_for,
    make_buffers,
)
from asyncrl.telemetry.recorder import now_s

_RECEIVE_BYTES = 1 << 16


class CollectiveReader:
    """Implements `BucketReader`. ``who`` is the replica's name; the bytes arrive on ``device`` (NCCL: a CUDA device, by
    default the current one), where `Bucket.data` is a uint8 tensor unless it is the CPU."""

    def __init__(self, who: str, backend: Backend = "gloo", device: torch.device | str | None = None) -> None:
        self._who, self._backend, self._device = who, backend, device_for(backend, device)
        self._session = ""
        self._calls = Calls()
        self._held: dict[CollectiveAddress, _Membership] = {}  # groups that the next session may use again
        self._links: dict[CollectiveAddress, _Link] = {}
        self._place: Placing | None = None
        self._writing: list[Group] = []  # given up, and yet they may still write to where `_place` said

    def connect(self, session: str, addresses: Sequence[CollectiveAddress], deadline_s: float) -> None:
        self._hang_up()
        for gone in self._held.keys() - set(addresses):
            self._held.pop(gone).group.abort()
        self._session, limit = session, now_s() + deadline_s
        self._need_quiet("plan")
        for address in addresses:
            if address.backend != self._backend:
                problem = f"sends over {address.backend}, this replica receives over {self._backend}; set both alike"
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

    def buckets(self, deadline_s: float, place: Placing | None = None) -> Iterator[Bucket]:
        self._place, limit = place, now_s() + deadline_s
        links = list(self._links.values())
        with contextlib.ExitStack() as stack:
            stack.callback(self._hang_up)  # also when the consumer fails: the writers see it at once
            selector = stack.enter_context(selectors.DefaultSelector())
            selector.register(self._calls.fd, selectors.EVENT_READ)
            for link in links:
                selector.register(link.sock, selectors.EVENT_READ, link)
            while not all(link.done for link in links):
                ready = next((link for link in links if link.here), None)
                # Whatever has come is handled first: the next bucket is on its way while this one is taken, and
                # nothing is taken from a sender that has gone.
                events = selector.select(0 if ready else max(limit - now_s(), 0))
                if not events and ready is None:
                    link = next(link for link in links if not link.done)
                    problem = f"was not done by the deadline of {deadline_s:g} s"
                    raise self._failed("transfer", link.address, problem, link.expected)
                for key, _ in events:
                    if key.data is None:
                        self._calls.run()
                        continue
                    self._guarded(key.data, limit, self._hear)
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
        except (OSError, EOFError) as e:
            raise self._failed("transfer", link.address, f"went away amid the session ({e})", link.expected) from e

    def _hear(self, link: _Link) -> None:
        data = link.sock.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError("its end of the connection is closed" if link.welcome else "it did not let this replica in")
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
        seat = Seat(**message["group"])
        held = self._held.get(link.address)
        link.welcome = True
        if held is not None and held.group.generation == seat.generation:
            return
        self._give_up(link)
        host = link.sock.getsockname()[0]
        group = Group(seat, host, self._backend, self._device, self._group_done)
        self._held[link.address] = _Membership(group, make_buffers(message["capacity"], self._device))

    def _receive(self, link: _Link, message: dict[str, Any]) -> None:
        """Post the receive."""
        held = self._held.get(link.address)
        if held is None:
            return  # of a generation that has failed here; it will be sent again
        bucket = held.arriving(message)
        if bucket.sequence >= link.expected:  # the receiver has those before: what comes again is for other readers
            for name, part in bucket.loose.items():
                live = self._place(self._session, part, self._device) if self._place is not None else None
                if live is not None:
                    bucket.placed[name] = live
                    held.writes = True
        link.coming.append(bucket)
        held.group.broadcast(bucket.pieces())

    def _stop(self, link: _Link, why: str) -> None:
        """Leave the generation. What has not been taken will be sent again."""
        if (generation := self._give_up(link)) is not None:
            link.sock.sendall(framed({"stopped": generation, "why": why}))

    def _give_up(self, link: _Link) -> str | None:
        link.coming.clear()
        link.here.clear()
        if (held := self._held.pop(link.address, None)) is None:
            return None
        if not held.group.abort() and held.writes:
            self._writing.append(held.group)
            self._need_quiet("transfer")
        return held.group.generation

    def _need_quiet(self, phase: str) -> None:
        """Raises SyncError while a broadcast of another session, or of this one's last generation, may still write into
        the weights."""
        self._writing = [group for group in self._writing if not group.abort()]
        if self._writing:
            problem = "a broadcast that was given up does not end and may write into the weights; end this process"
            raise SyncError(phase, self._who, None, None, problem)

    def _group_done(self, group: Group, error: Exception | None) -> None:
        self._calls.hand_over(partial(self._received, group, error))

    def _received(self, group: Group, error: Exception | None) -> None:
        for link in self._links.values():
            held = self._held.get(link.address)
            if held is None or held.group is not group:
                continue
            if error is not None:
                with contextlib.suppress(OSError):  # its end is handled where the link is read
                    self._stop(link, str(error))
            elif (bucket := link.coming.popleft()).sequence >= link.expected:
                link.here.append(bucket)

    @contextlib.contextmanager
    def _bucket(self, link: _Link, arrived: _Arriving) -> Iterator[Bucket]:
        key = BucketKey(self._session, link.address.sender, arrived.sequence)
        with _lent(arrived.buffer[: arrived.in_buffer()], key, self._who) as data:
            yield Bucket(*key, arrived.parts, data, arrived.checksum, placed=arrived.placed)

    def _hang_up(self) -> None:
        self._place = None
        with contextlib.ExitStack() as stack:  # all of it, also when a group cannot be left
            while self._links:
                _, link = self._links.popitem()
                link.sock.close()
                if not link.done:
                    stack.callback(self._give_up, link)

    def _failed(self, phase: str, address: CollectiveAddress, message: str, sequence: int | None = None) -> SyncError:
        bucket = None if sequence is None else BucketKey(self._session, address.sender, sequence)
        return SyncError(phase, self._who, None, bucket, f"sender {address.sender} {message}")


@dataclass(eq=False)
class _Membership:
    """A generation as a reader uses it. Its buffers are its own; ``writes``: it has also received to where they belong
    parts of buckets."""

    group: Group
    buffers: list[torch.Tensor]
    writes: bool = False

    def arriving(self, message: dict[str, Any]) -> _Arriving:
        parts, sequence = tuple(TensorPart(*part) for part in message["parts"]), message["sequence"]
        names = set(message["loose"])
        loose = {part.name: part for part in parts if part.name in names}
        buffer = self.buffers[sequence % BUFFERS]
        return _Arriving(sequence, parts, loose, message["packed"], message["checksum"], buffer)


@dataclass(eq=False)
class _Arriving:
    """A bucket from when its receive is posted: ``packed`` bytes and each ``loose`` part, ``placed`` or into the
    ``buffer`` too, which is free: nobody sends bucket k before all have acknowledged bucket k − 2."""

    sequence: int
    parts: tuple[TensorPart, ...]
    loose: dict[str, TensorPart]
    packed: int
    checksum: int | None
    buffer: torch.Tensor
    placed: dict[str, torch.Tensor] = field(default_factory=dict)

    def pieces(self) -> list[torch.Tensor]:
        """What the broadcasts fill, in their order."""
        into = lambda part: self.buffer[part.offset : part.offset + part.nbytes]
        loose = [self.placed[name] if name in self.placed else into(part) for name, part in self.loose.items()]
        return pieces_of(self.buffer, self.packed, loose)

    def in_buffer(self) -> int:
        return packed_bytes(self.parts, self.placed)


@dataclass(eq=False)
class _Link:
    """A sender, as its reader sees it. Buckets are ``coming`` when their receive is posted, then ``here`` until they
    are taken; ``expected`` is the next to take."""

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
        """Nothing is left to come, not even what was sent again to others: the next session may use the group."""
        return self.ended and not self.coming


def _lent(buffer: torch.Tensor, key: BucketKey, who: str) -> AbstractContextManager[memoryview | torch.Tensor]:
    return lent(buffer.numpy(), key, who) if buffer.device.type == "cpu" else lent_on_device(buffer, key, who)
