"""Folders of engines' sockets: private, and removed even if their process is killed."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.rollouter.engines.socket_folder import SocketFolder

MAKE_AND_WAIT = """
import socket, sys
from asyncrl.rollouter.engines.socket_folder import SocketFolder
folder = SocketFolder().path
socket.socket(socket.AF_UNIX).bind(str(folder / "socket"))
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def usual(monkeypatch):
    """The usual place for temporary files, with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


@contextlib.contextmanager
def engine():
    """A process with a folder of its own."""
    command = [sys.executable, "-c", MAKE_AND_WAIT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_folder_is_private_and_removed_at_the_end(usual):
    folder = SocketFolder()
    assert folder.path.parent == usual
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "file").touch()
    folder.close()
    folder.close()
    assert list(usual.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_and_no_other(usual):
    foreign = usual / "asyncrl-engine-12345678"
    foreign.symlink_to(usual / "elsewhere")
    (usual / "elsewhere").mkdir()
    with engine() as (killed, left), engine() as (_, kept):
        killed.kill()
        killed.wait()
        assert (left / "socket").exists()
        with closing(SocketFolder()) as new:
            assert not left.exists()
            assert (kept / "socket").exists()
            assert foreign.is_symlink()
            assert new.path != kept


def test_paths_of_sockets_are_short_enough_wherever_temporary_files_are(usual, monkeypatch):
    deep = usual / ("x" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with closing(SocketFolder()) as folder, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder.path / str(uuid.uuid4())))
