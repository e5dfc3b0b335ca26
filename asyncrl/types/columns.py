"""Named NumPy columns in one flat buffer, read back without a copy."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Buffer = bytes | bytearray | memoryview | np.ndarray

_FORMAT = 3
_ALIGN = 64
_dtype = functools.cache(np.dtype)
_PREFIX = struct.Struct("<4sIQ")  # magic, format, header bytes


@dataclass(frozen=True)
class Layout:
    """Format of one flat buffer: a small JSON header, then each column aligned to 64 bytes.

    ``what`` names the contents in errors, ``magic`` (4 bytes) in the buffer. ``meta`` must have a ``uid``."""

    what: str
    magic: bytes

    def to_bytes(self, meta: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> bytes:
        table, chunks, at = [], [], 0
        for name, array in columns.items():
            array = np.ascontiguousarray(array)
            table.append((name, array.dtype.str, array.shape, at))
            pad = -array.nbytes % _ALIGN
            chunks += [array.tobytes(), b"\0" * pad]
            at += array.nbytes + pad
        header = json.dumps({"meta": meta, "columns": table}).encode()
        header += b" " * (-(len(header) + _PREFIX.size) % _ALIGN)
        return b"".join([_PREFIX.pack(self.magic, _FORMAT, len(header)), header, *chunks])

    def from_buffer(self, data: Buffer) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns (meta, columns); the columns are views that keep ``data`` alive.

        Raises ValueError for a buffer with other contents or another format, and for a truncated one."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        if len(view) < _PREFIX.size:
            raise ValueError(f"not a {self.what}: expected at least {_PREFIX.size} bytes, found {len(view)}")
        magic, fmt, header_bytes = _PREFIX.unpack_from(view)
        if magic != self.magic or fmt != _FORMAT:
            raise ValueError(
                f"not a {self.what}: expected magic {self.magic!r}, format {_FORMAT}, found {magic!r}, format {fmt}"
            )
        body = _PREFIX.size + header_bytes
        if len(view) < body:
            raise ValueError(f"{self.what} cut short in its header: expected {body} bytes, found {len(view)}")
        header = json.loads(bytes(view[_PREFIX.size : body]))
        columns: dict[str, np.ndarray] = {}
        for name, code, shape, at in header["columns"]:
            dtype, count = _dtype(code), math.prod(shape)
            if (end := body + at + count * dtype.itemsize) > len(view):
                raise ValueError(
                    f"{self.what} {header['meta']['uid']} cut short in column {name!r}: expected {end} bytes, "
                    f"found {len(view)}"
                )
            column = np.frombuffer(view, dtype, count, body + at)
            columns[name] = column if len(shape) == 1 else column.reshape(shape)
        return header["meta"], columns
