"""Selector loop of a bucket writer: handles socket events and calls from other threads, within time limits."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.param_sync.transports.messages import framed


class CallQueue:
    """Calls from other threads to a thread that waits on a selector; ``fd`` is readable while any are queued."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def hand_over(self, call: Callable[[], None]) -> None:
        """Queue a call, from any thread. Dropped after `close`."""
        with self._lock:
            if not self._closed:
                self._calls.put(call)
                os.eventfd_write(self.fd, 1)

    def run(self) -> None:
        with contextlib.suppress(BlockingIOError):  # an earlier run has already consumed this wake-up
            os.eventfd_read(self.fd)
        while not self._calls.empty():
            self._calls.get()()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class Peer(Protocol):
    sock: socket.socket


class SelectorLoop(ABC):
    """Base of a `BucketWriter` that waits on sockets. A file is registered with ``_selector`` together with the
    function to call when it is ready. ``_deadline``: the session's, on the node's clock; ``_stall_s``: the longest wait
    for one reader."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls = CallQueue()
        self._selector.register(self._calls.fd, selectors.EVENT_READ, self._calls.run)
        self._deadline = self._stall_s = 0.0

    def _limit(self) -> float:
        return min(now_s() + self._stall_s, self._deadline)

    def _run_until(self, done: Callable[[], bool], limit: float) -> bool:
        """Handle events until ``done()``. False if ``limit`` comes first."""
        while not done():
            left = limit - now_s()
            if left <= 0:
                return False
            self._handle(left)
        return True

    def _handle(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            # an earlier event of this round may have closed the file
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    @abstractmethod
    def _drop(self, peer: Any, why: str) -> None:
        """Continue without this reader."""

    def _send(self, peers: Iterable[Peer], message: Mapping[str, Any]) -> None:
        """Send a message to each peer; drop peers that do not accept it in time."""
        data, limit = framed(message), self._limit()
        for peer in list(peers):
            try:
                # A reader accepts messages at once unless its process is stopped: they rarely fill the socket's buffer.
                peer.sock.settimeout(max(limit - now_s(), 1e-3))
                peer.sock.sendall(data)
                peer.sock.setblocking(False)
            except TimeoutError:
                self._drop(peer, f"was silent for {self._stall_s:g} s and accepted no message")
            except OSError as e:
                self._drop(peer, f"went away ({e})")
