"""Control messages on a socket: a length, then a JSON object. Bucket data travels elsewhere."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

MESSAGE_BYTES = 1 << 26  # between authenticated processes: names and offsets of a bucket's parts

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of a Unix socket's peer


def peer_user(sock: socket.socket) -> int:
    """User id of a Unix socket's peer. An abstract socket has no file permissions: every user can reach it."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid


def framed(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(_checked(len(body), MESSAGE_BYTES)) + body


def message_in(received: bytearray, limit: int = MESSAGE_BYTES) -> dict[str, Any] | None:
    """The first message in ``received``, or None while it is incomplete. Raises ValueError for anything else and for
    more than ``limit`` bytes."""
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    body = received[_LENGTH.size : _LENGTH.size + _checked(length, limit)]
    return _parsed(body) if len(body) == length else None


def take_messages(received: bytearray) -> Iterator[dict[str, Any]]:
    """Remove and yield the complete messages at the front of ``received``. Raises as `message_in`."""
    while (message := message_in(received)) is not None:
        (length,) = _LENGTH.unpack_from(received)
        del received[: _LENGTH.size + length]
        yield message


def read_message(sock: socket.socket) -> dict[str, Any]:
    """Raises ValueError for an invalid message, EOFError if the connection ends."""
    (length,) = _LENGTH.unpack(_read_exactly(sock, _LENGTH.size))
    return _parsed(_read_exactly(sock, _checked(length, MESSAGE_BYTES)))


def _checked(length: int, limit: int) -> int:
    if length > limit:
        raise ValueError(f"expected a message of at most {limit} bytes, found {length}")
    return length


def _parsed(body: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("expected a message without deep nesting") from None
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object as message, found {type(message).__name__}")
    return message


def _read_exactly(sock: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        data = sock.recv(nbytes - len(received))
        if not data:
            raise EOFError("its end of the connection is closed")
        received += data
    return bytes(received)
