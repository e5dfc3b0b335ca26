"""What a writer waits for: events of its sockets, and answers to what it told its readers, all within limits."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from asyncrl.param_sync.transports.messages import framed
from asyncrl.telemetry.recorder import now_s


class Peer(Protocol):
    sock: socket.socket


class Pump:
    """The waiting half of a `BucketWriter`. Each registered file's data in ``_selector`` is what to call when it is
    ready. ``_deadline``: of the session, on the node's clock; ``_stall_s``: the longest wait for one reader."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._deadline = self._stall_s = 0.0

    def _limit(self) -> float:
        return min(now_s() + self._stall_s, self._deadline)

    def _pump(self, done: Callable[[], bool], limit: float) -> bool:
        """Handle what comes until ``done``; False at ``limit``."""
        while not done():
            left = limit - now_s()
            if left <= 0:
                return False
            self._handle(left)
        return True

    def _handle(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            # an earlier event of this round may have closed it
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def _drop(self, peer: Any, why: str) -> None:
        """Go on without this reader."""
        raise NotImplementedError

    def _tell(self, peers: Iterable[Peer], message: Mapping[str, Any]) -> None:
        """Send a message to each; those that do not take it are dropped."""
        data, limit = framed(message), self._limit()
        for peer in list(peers):
            try:
                # A reader takes its messages at once unless it is stopped, and few fill its socket's buffer.
                peer.sock.settimeout(max(limit - now_s(), 1e-3))
                peer.sock.sendall(data)
                peer.sock.setblocking(False)
            except TimeoutError:
                self._drop(peer, f"was silent for {self._stall_s:g} s, taking no message")
            except OSError as e:
                self._drop(peer, f"went away ({e})")
