"""Landlock: a process denies itself, and all that it will start, files outside a few places, and other processes.

It imports only the standard library, because programs in a sandbox run it, too (`asyncrl.sandbox.landlock_entrance`).
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls on every architecture but Alpha
_VERSION = 1  # flag of the first
_PATH_BENEATH = 1  # kind of rule

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = (1 << bit for bit in range(4))
MAKE_CHAR, MAKE_SOCK, MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
RENAME_ACROSS_FOLDERS, TRUNCATE, IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE  # the others are of folders
#: number of the rights over files, by the version that brought the last of them
_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}

SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2
SCOPES_SINCE = 6  # version

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class LandlockError(OSError):
    """The kernel refused a step."""


def landlock_version() -> int:
    """0 or less if this kernel has no Landlock; 2 is Linux 5.19, 3 is Linux 6.2, 6 is Linux 6.12."""
    return int(_libc.syscall(*map(ctypes.c_long, (_CREATE_RULESET, 0, 0, _VERSION))))


def all_rights(version: int) -> int:
    """Over files, as bits."""
    return (1 << max(count for since, count in _RIGHTS.items() if since <= version)) - 1


def restrict(handled: int, rules: Iterable[tuple[str, int]], scopes: int) -> None:
    """Deny the rights ``handled``, except those of the rules (path of a file or folder, rights below it), and what
    leads out of ``scopes``. For a process of a single thread that gains no privileges; it cannot be undone. Raises
    LandlockError, and OSError for a path that cannot be opened."""
    ruleset = _call(_CREATE_RULESET, struct.pack("=QQQ", handled, 0, scopes), 24 if scopes else 8, 0)
    try:
        for path, rights in rules:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                allowed = rights & handled & (-1 if stat.S_ISDIR(os.fstat(opened).st_mode) else _OF_FILES)
                _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, opened), 0)
            finally:
                os.close(opened)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _call(number: int, *arguments: bytes | int) -> int:
    result = int(_libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments))))
    if result < 0:
        raise LandlockError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
