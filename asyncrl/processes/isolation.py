"""A process gives up access to the memory and environment of others, and the privileges that would give it back."""

from __future__ import annotations

import ctypes
import os
import struct

_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_V3 = 0x20080522
#: CAP_SYS_PTRACE, CAP_SYS_ADMIN and CAP_PERFMON read the memory of others, CAP_SYS_RESOURCE raises one's own limits
_DROPPED = 1 << 19 | 1 << 21 | 1 << 38 | 1 << 24
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls on every architecture but Alpha
_VERSION = 1  # flag of the first
_PATH_BENEATH = 1  # kind of rule
_RENAME_ACROSS_FOLDERS = 1 << 13
_SCOPE_SIGNAL = 1 << 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def landlock_version() -> int:
    """0 or less if this kernel has no Landlock; 2 is Linux 5.19, 6 is Linux 6.12."""
    return _call(_CREATE_RULESET, None, 0, _VERSION)


def isolate() -> None:
    """Deny this process, and all that it will start, the memory and environment of processes outside, and since Linux
    6.12 also to signal them. Programs that it starts gain no privileges, and root loses those that would undo this.

    For a process of a single thread. It cannot be undone. Where the kernel has no Landlock, other processes of the same
    user stay accessible."""
    nothing = ctypes.c_ulong(0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), nothing, nothing, nothing)
    _drop_capabilities()
    _enter_landlock(landlock_version())


def _drop_capabilities() -> None:
    header, data = struct.pack("=Ii", _CAPABILITIES_V3, 0), ctypes.create_string_buffer(24)
    _libc.capget(header, data)
    low, high = (~_DROPPED & 0xFFFFFFFF), ~_DROPPED >> 32 & 0xFFFFFFFF
    kept = [bits & mask for bits, mask in zip(struct.unpack("=6I", data.raw), [low] * 3 + [high] * 3)]
    _libc.capset(header, struct.pack("=6I", *kept))


def _enter_landlock(version: int) -> None:
    """A domain of any kind hides the processes outside. It must restrict something else besides: signals, or where the
    kernel cannot, a use of files that a rule then allows everywhere."""
    if version < 2:  # 1 would deny renames from one folder to another
        return
    files, signals = (0, _SCOPE_SIGNAL) if version >= 6 else (_RENAME_ACROSS_FOLDERS, 0)
    ruleset = _call(_CREATE_RULESET, struct.pack("=QQQ", files, 0, signals), 24, 0)
    if files:
        everywhere = os.open("/", os.O_PATH | os.O_CLOEXEC)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", files, everywhere), 0)
        os.close(everywhere)
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _call(number: int, *arguments: bytes | int | None) -> int:
    return int(_libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments))))
