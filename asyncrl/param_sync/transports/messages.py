"""Messages on a socket: a length, then JSON. Small ones only, the data has other ways."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of a Unix socket's peer


def same_user(sock: socket.socket) -> bool:
    """An abstract socket has no file permissions: anybody on the machine can reach it."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid == os.getuid()


def framed(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def message_in(received: bytearray) -> dict[str, Any] | None:
    """The message that ``received`` begins with, or None while it is not whole."""
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    body = received[_LENGTH.size : _LENGTH.size + length]
    return json.loads(body) if len(body) == length else None


def take_messages(received: bytearray) -> Iterator[dict[str, Any]]:
    """The whole messages that ``received`` begins with; each is taken off it."""
    while (message := message_in(received)) is not None:
        (length,) = _LENGTH.unpack_from(received)
        del received[: _LENGTH.size + length]
        yield message


def read_message(sock: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_read_exactly(sock, _LENGTH.size))
    return json.loads(_read_exactly(sock, length))


def _read_exactly(sock: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        data = sock.recv(nbytes - len(received))
        if not data:
            raise EOFError("its end of the connection is closed")
        received += data
    return bytes(received)
