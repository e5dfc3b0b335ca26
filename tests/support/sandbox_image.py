"""A small image for containers, made of this machine's Python and shell: there may be no registry to take one from."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "localhost/asyncrl-test-python3"
_PROGRAMS = ("sh", "cat", "sleep", "echo", "true", "date", "pwd", "id", "setsid", "env", "ls")
_LEFT_OUT = ("test", "dist-packages", "site-packages", "idlelib", "tkinter", "ensurepip", "lib2to3", "__pycache__")


@contextlib.contextmanager
def image_for_podman() -> Iterator[str]:
    """Name of an image. Skips the test if podman runs no container here with limits, by whichever runtime."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    name = _make_image()
    limits = "--network none --memory 64m --pids-limit 8 --ulimit nofile=64:64 --ulimit nproc=64:64".split()
    command = ["podman", "run", "--rm", *limits, name, "true"]
    before = os.environ.get("CONTAINERS_CONF")
    with tempfile.TemporaryDirectory() as folder:
        for runtime in ("", "runc", "crun"):
            if runtime:
                (Path(folder) / "containers.conf").write_text(f'[engine]\nruntime = "{runtime}"\n')
                os.environ["CONTAINERS_CONF"] = f"{folder}/containers.conf"
            tried = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if not tried.returncode:
                yield name
                break
        os.environ.pop("CONTAINERS_CONF", None)
        if before is not None:
            os.environ["CONTAINERS_CONF"] = before
    if tried.returncode:
        pytest.skip(f"podman runs nothing here: {tried.stderr.strip()[-300:]}")


def _make_image() -> str:
    """Imported if podman has none yet."""
    if subprocess.run(["podman", "image", "exists", NAME], timeout=120).returncode == 0:
        return NAME
    python = os.path.realpath(f"{sys.base_prefix}/bin/python3")
    library = Path(os.__file__).parent
    found = {f"/usr/bin/{name}": shutil.which(name) for name in _PROGRAMS}
    files = {place: os.path.realpath(path) for place, path in found.items() if path} | {"/usr/bin/python3": python}
    modules = [str(path) for path in (library / "lib-dynload").glob("*.so")]
    needed = subprocess.run(["ldd", *files.values(), *modules], capture_output=True, text=True, check=False).stdout
    for word in needed.split():
        if word.startswith("/") and not word.endswith(":"):
            files[word if word.startswith("/usr/") else f"/usr{word}"] = os.path.realpath(word)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "image.tar"
        with tarfile.open(archive, "w") as tar:
            for place, path in files.items():
                tar.add(path, place.removeprefix("/"), recursive=False)
            tar.add(library, f"usr/lib/{library.name}", filter=_needed)
            for name in ("bin", "lib", "lib64"):
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
                tar.addfile(link)
        subprocess.run(
            ["podman", "import", "--quiet", str(archive), NAME], check=True, timeout=240, capture_output=True
        )
    return NAME


def _needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if any(part in _LEFT_OUT for part in entry.name.split("/")) else entry
