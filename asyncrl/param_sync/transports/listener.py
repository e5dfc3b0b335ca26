"""Listener that authenticates a writer's readers before it parses anything they send.

Every user of the machine can reach an abstract Unix socket, and every host of the network a TCP port. A thread accepts
connections at all times, so that strangers cannot fill the backlog between two sessions. A peer authenticates by its
user id (Unix) or the writer's token (TCP), then sends a hello, all within a deadline. Refused connections are counted.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.transports.messages import message_in, peer_user

log = logging.getLogger(__name__)

HELLO_BYTES = 4096  # maximum, including the token
HELLO_S = 20.0  # deadline of the hello
_CALLERS = 256  # maximum without a hello; one more evicts the oldest
_WITHOUT_FILES_S = 0.1  # wait after running out of descriptors

Hello = Mapping[str, str]

_refusals = Recorder("listeners")  # of all listeners of this process


def count_refusals(recorder: Recorder) -> None:
    """Move the number of connections that this process has refused since the last call to ``recorder``."""
    for name, number in _refusals.drain().counters.items():
        recorder.count(name, number)


@dataclass(eq=False)
class _Caller:
    sock: socket.socket
    name: str
    until_s: float
    received: bytearray = field(default_factory=bytearray)


class Listener:
    """Accepts on a listening socket. ``on_hello(sock, hello)`` is called in the listener's thread for each peer whose
    hello has exactly these ``keys``, and owns the connection."""

    def __init__(
        self,
        sock: socket.socket,
        keys: frozenset[str],
        on_hello: Callable[[socket.socket, Hello], None],
        token: str = "",
        hello_s: float = HELLO_S,
    ) -> None:
        self._sock, self._keys, self._on_hello = sock, keys, on_hello
        self._token, self._hello_s = token.encode(), hello_s
        self._callers: dict[socket.socket, _Caller] = {}  # oldest first
        self._reported = False
        self._closed = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._closed.is_set)
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for caller in list(self._callers.values()):
            self._remove(caller).close()
        self._selector.close()
        self._sock.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closed.is_set():
            oldest = next(iter(self._callers.values()), None)
            for key, _ in self._selector.select(None if oldest is None else max(oldest.until_s - now_s(), 0)):
                try:
                    key.data()
                except Exception:
                    log.exception("param_sync: a connection failed; the listener continues")
                    if isinstance(key.fileobj, socket.socket) and key.fileobj in self._callers:
                        self._remove(self._callers[key.fileobj]).close()  # it may stay readable
            for caller in [c for c in self._callers.values() if c.until_s <= now_s()]:
                self._refuse(caller, f"no hello within {self._hello_s:g} s")

    def _accept(self) -> None:
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionError):
            return  # the peer has already disconnected
        except OSError as e:
            self._report("anybody", str(e))
            self._closed.wait(_WITHOUT_FILES_S)
            return
        sock.setblocking(False)
        user = peer_user(sock) if sock.family == socket.AF_UNIX else None
        if user is not None and user != os.geteuid():
            self._report(f"user {user}", "only this process's user may connect")
            sock.close()
            return
        name = address[0] if user is None else f"user {user}"
        caller = _Caller(sock, name, now_s() + self._hello_s)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._on_readable(caller))
        self._callers[sock] = caller
        if len(self._callers) > _CALLERS:
            self._refuse(next(iter(self._callers.values())), f"{_CALLERS} other connections sent no hello either")

    def _on_readable(self, caller: _Caller) -> None:
        if caller.sock not in self._callers:
            return  # refused by an earlier event of this round
        data = b""
        with contextlib.suppress(OSError):
            data = caller.sock.recv(HELLO_BYTES)
        if not data:
            self._remove(caller).close()
            return
        caller.received += data
        try:
            hello = self._hello_in(caller.received)
        except ValueError as e:
            self._refuse(caller, f"invalid hello: {e}")
            return
        if hello is not None:
            self._on_hello(self._remove(caller), hello)

    def _hello_in(self, received: bytearray) -> Hello | None:
        """The hello, or None while it is incomplete. Parses nothing that does not begin with the token. Raises
        ValueError."""
        if len(received) < len(self._token):
            return None
        if not hmac.compare_digest(bytes(received[: len(self._token)]), self._token):
            raise ValueError("it does not begin with this writer's token")
        hello = message_in(received[len(self._token) :], HELLO_BYTES)
        if hello is not None and not (hello.keys() == self._keys and all(isinstance(v, str) for v in hello.values())):
            raise ValueError(f"expected {', '.join(sorted(self._keys))} as text")
        return hello

    def _refuse(self, caller: _Caller, why: str) -> None:
        self._report(caller.name, why)
        self._remove(caller).close()

    def _report(self, name: str, why: str) -> None:
        _refusals.count("param_sync/refused_connections")
        level = logging.DEBUG if self._reported else logging.WARNING  # a flood must not fill the log
        self._reported = True
        log.log(level, "param_sync: a connection from %s was refused (%s); others are logged at level debug", name, why)

    def _remove(self, caller: _Caller) -> socket.socket:
        del self._callers[caller.sock]
        self._selector.unregister(caller.sock)
        return caller.sock
