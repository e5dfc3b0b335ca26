"""Folder for the sockets and temporary files of an engine's processes, which only their user can enter.

A killed process cannot remove its folder, so the next one that makes a folder does: each process locks its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "asyncrl-engine-"
_RANDOM = "?" * 8  # that `mkdtemp` appends
_LONGEST = 60  # characters of the folder's path; a socket's whole path has at most 107


class SocketFolder:
    """A new folder at ``path``, in /tmp if the usual place for temporary files has too long a path."""

    def __init__(self) -> None:
        usual = Path(tempfile.gettempdir())
        root = usual if len(str(usual / f"{_PREFIX}{_RANDOM}")) <= _LONGEST else Path("/tmp")
        for folder in root.glob(f"{_PREFIX}{_RANDOM}"):
            _remove_if_dead(folder)
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
        self._lock: int | None = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(root / made.name.removeprefix("."))  # others find it only once it is locked

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_if_dead(folder: Path) -> None:
    with contextlib.suppress(OSError):  # locked, removed meanwhile, or another user's
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(file).st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        finally:
            os.close(file)
