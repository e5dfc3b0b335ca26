"""A process gives up access to the memory and environment of others, and the privileges that would give it back."""

from __future__ import annotations

import contextlib
import ctypes
import struct

from asyncrl.processes.landlock import (
    RENAME_ACROSS_FOLDERS,
    SCOPE_SIGNALS,
    SCOPES_SINCE,
    LandlockError,
    landlock_version,
    restrict,
)

_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_V3 = 0x20080522
#: CAP_SYS_PTRACE, CAP_SYS_ADMIN and CAP_PERFMON read the memory of others, CAP_SYS_RESOURCE raises one's own limits
_DROPPED = 1 << 19 | 1 << 21 | 1 << 38 | 1 << 24
ALL_CAPABILITIES = (1 << 64) - 1

_libc = ctypes.CDLL(None, use_errno=True)


def isolate() -> None:
    """Deny this process, and all that it will start, the memory and environment of processes outside, and since Linux
    6.12 also to signal them. Programs that it starts gain no privileges, and root loses those that would undo this.

    For a process of a single thread. It cannot be undone. Where the kernel has no Landlock, other processes of the same
    user stay accessible."""
    gain_no_privileges()
    drop_capabilities(_DROPPED)
    with contextlib.suppress(LandlockError):
        _hide_others(landlock_version())


def gain_no_privileges() -> None:
    """Not by programs with a set-uid bit either."""
    nothing = ctypes.c_ulong(0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), nothing, nothing, nothing)


def drop_capabilities(dropped: int) -> None:
    """``dropped``: bits of those that this process gives up, if it has them."""
    header, data = struct.pack("=Ii", _CAPABILITIES_V3, 0), ctypes.create_string_buffer(24)
    _libc.capget(header, data)
    low, high = (~dropped & 0xFFFFFFFF), ~dropped >> 32 & 0xFFFFFFFF
    kept = [bits & mask for bits, mask in zip(struct.unpack("=6I", data.raw), [low] * 3 + [high] * 3)]
    _libc.capset(header, struct.pack("=6I", *kept))


def _hide_others(version: int) -> None:
    """A domain of any kind hides the processes outside. It must restrict something else besides: signals, or where the
    kernel cannot, a use of files that a rule then allows everywhere."""
    if version >= SCOPES_SINCE:
        restrict(0, (), SCOPE_SIGNALS)
    elif version >= 2:  # 1 would deny renames from one folder to another
        restrict(RENAME_ACROSS_FOLDERS, [("/", RENAME_ACROSS_FOLDERS)], 0)
