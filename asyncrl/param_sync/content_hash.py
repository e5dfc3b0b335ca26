"""Hash of a tensor's bytes, defined so that a GPU computes it as fast as a CPU core, and equal.

XXH3 is sequential within its input. A GPU therefore hashes many chunks at once: the hash of bytes is xxh3_128 of the
concatenated xxh3_128 of their chunks of `CHUNK_BYTES`, or that of the only chunk. A chunk of at most 240 bytes, for
which XXH3 is another function, is filled up with zeros to 256; lengths are compared elsewhere.
`asyncrl.param_sync.device_hash` is the same on a device.
"""

from __future__ import annotations

from typing import Any

import xxhash

CHUNK_BYTES = 128 * 1024  # smaller ones slow down the CPU, larger ones leave a GPU idle
SHORT_BYTES = 240  # up to this length XXH3 is another function
PADDED_BYTES = 256  # length of a short chunk with its zeros
HASH_BYTES = 16


def content_hash(data: Any) -> bytes:
    """Hash of a buffer of bytes, 16 bytes."""
    if SHORT_BYTES < len(data) <= CHUNK_BYTES:
        return xxhash.xxh3_128_digest(data)
    if len(data) <= SHORT_BYTES:
        return xxhash.xxh3_128_digest(bytes(data).ljust(PADDED_BYTES, b"\0"))
    end = len(data) // CHUNK_BYTES * CHUNK_BYTES
    return joined(_chunk_hashes(data, 0, end) + (content_hash(data[end:]) if end < len(data) else b""))


def joined(chunks: bytes) -> bytes:
    """Hash from those of the chunks, one after the other; at least one."""
    return chunks if len(chunks) == HASH_BYTES else xxhash.xxh3_128_digest(chunks)


def _chunk_hashes(data: Any, start: int, end: int) -> bytes:
    """Of the complete chunks from ``start`` to ``end``."""
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(data[at : at + CHUNK_BYTES]) for at in range(start, end, CHUNK_BYTES)])


class ContentHash:
    """`content_hash` of bytes that come in pieces of any length."""

    def __init__(self) -> None:
        self._chunks = bytearray()  # hashes
        self._next, self._begun = xxhash.xxh3_128(), 0  # the chunk after them, and its bytes so far

    def update(self, data: Any) -> None:
        at = 0
        if self._begun:
            at = min(CHUNK_BYTES - self._begun, len(data))
            self._begin(data[:at])
            if self._begun == CHUNK_BYTES:
                self._chunks += self._next.digest()
                self._next, self._begun = xxhash.xxh3_128(), 0
        end = len(data) - (len(data) - at) % CHUNK_BYTES
        self._chunks += _chunk_hashes(data, at, end)
        if end < len(data):
            self._begin(data[end:])

    def digest(self) -> bytes:
        """Ends the hash: no bytes may follow."""
        if self._begun or not self._chunks:
            if self._begun <= SHORT_BYTES:
                self._next.update(bytes(PADDED_BYTES - self._begun))
            self._chunks += self._next.digest()
        return joined(bytes(self._chunks))

    def _begin(self, data: Any) -> None:
        self._next.update(data)
        self._begun += len(data)
