"""Sandboxes of bubblewrap: namespaces of their own, a read-only system, no network, no privileges, a filter of system
calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from asyncrl.processes.tree import pids_below
from asyncrl.sandbox import measure, runner
from asyncrl.sandbox.base import WORKDIR, Limits, SandboxFailed
from asyncrl.sandbox.interpreter import Interpreter
from asyncrl.sandbox.local import Launch, process_limits
from asyncrl.sandbox.seccomp import SeccompError, seccomp_filter
from asyncrl.sandbox.users import Users

_RUNNER = "/runner.pyc"
_ID = "1000"  # of the only user inside
_SHM_BYTES = 16 * 1024 * 1024
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types")
_PASSWD = f"user:x:{_ID}:{_ID}::{WORKDIR}:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
_GROUP = f"user:x:{_ID}:\nnogroup:x:65534:\n"


class Bubblewrap:
    """Launches runners with bubblewrap, as root each as a user of its own.

    ``paths``: further files and folders that programs in the sandbox may read, at the same place."""

    name, weaker, limited_by = "bubblewrap", "", ""

    def __init__(self, limits: Limits, interpreter: Interpreter, paths: Sequence[str] = ()) -> None:
        """Raises SandboxFailed if this machine lacks a program."""
        self._limits, self._interpreter = limits, interpreter
        self._program = shutil.which("bwrap") or ""
        if not self._program:
            raise SandboxFailed("infra", "bubblewrap is not installed; apt-get install bubblewrap")
        try:
            self._filters = {bound: seccomp_filter(bound=bound) for bound in (True, False)}
        except SeccompError as e:
            raise SandboxFailed("infra", str(e)) from None
        self._users = Users()
        self._folder = tempfile.mkdtemp(prefix="asyncrl-sandbox-")
        os.chmod(self._folder, 0o711)
        self._etc = {"/etc/passwd": _PASSWD, "/etc/group": _GROUP, "/etc/hosts": "127.0.0.1 localhost\n"}
        for path, contents in self._etc.items():
            self._write(os.path.basename(path), contents)
        compiled = os.path.join(self._folder, os.path.basename(_RUNNER))
        interpreter.compile(runner.__file__, compiled)  # each sandbox would wait for that
        os.chmod(compiled, 0o644)
        self._sources = self._visible([*interpreter.folders, *paths])
        self._fixed = self._arguments()

    def launch(self, bound: bool) -> Launch:
        uid = self._users.take()
        try:
            read, write = os.pipe()
        except OSError:
            self._users.give_back(uid)
            raise
        os.write(write, self._filters[bound])  # a pipe holds more
        os.close(write)
        python = (self._interpreter.path, "-I", "-S", _RUNNER, *process_limits(self._limits, bound))
        argv = (self._program, "--seccomp", str(read), *self._fixed, "--", *python)
        mounts = {place: path for path, place in self._sources.items() if place != path}
        return Launch(
            argv,
            self._interpreter.environment,
            inputs=(read,),
            uid=uid,
            mounts=mounts,
            exceeded=None if bound else self._exceeded,
            after=lambda ended: self._users.give_back(uid),
        )

    def close(self) -> None:
        """When no sandbox runs any more. Nothing but what we made is removed, whatever may be mounted there."""
        for entry in os.scandir(self._folder):
            (os.rmdir if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
        os.rmdir(self._folder)

    def _exceeded(self, pid: int) -> str:
        return measure.memory_with_files(pids_below(pid), self._limits)

    def _arguments(self) -> list[str]:
        arguments = "--unshare-all --unshare-user --die-with-parent --new-session --as-pid-1 --clearenv".split()
        arguments += ["--cap-drop", "ALL", "--uid", _ID, "--gid", _ID, "--hostname", "sandbox"]
        if _version(self._program) >= (0, 8):
            arguments.append("--disable-userns")
        arguments += ["--ro-bind", "/usr", "/usr"]
        for path in _SYSTEM:
            if os.path.islink(path):
                arguments += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                arguments += ["--ro-bind", path, path]
        for path in _ETC:
            arguments += ["--ro-bind-try", path, path]
        for path in (*self._etc, _RUNNER):
            arguments += ["--ro-bind", os.path.join(self._folder, os.path.basename(path)), path]
        arguments += ["--proc", "/proc", "--dev", "/dev"]
        arguments += ["--size", str(_SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        arguments += ["--size", str(self._limits.disk_mb << 20), "--tmpfs", WORKDIR, "--dir", f"{WORKDIR}/.tmp"]
        arguments += ["--symlink", f"{WORKDIR[1:]}/.tmp", "/tmp", "--chdir", WORKDIR]
        for path, source in self._sources.items():  # some may be below /tmp
            arguments += ["--ro-bind", source, path]
        arguments += ["--remount-ro", "/"]
        return arguments

    def _write(self, name: str, contents: str) -> None:
        path = os.path.join(self._folder, name)
        with open(path, "w") as file:
            file.write(contents)
        os.chmod(path, 0o644)

    def _visible(self, paths: Sequence[str]) -> dict[str, str]:
        """path → where the sandbox's user finds it. A user of its own may not pass through our folders, such as
        root's; launches mount what is in them at empty places then."""
        kept = [path for path in dict.fromkeys(map(os.path.abspath, paths)) if not f"{path}/".startswith("/usr/")]
        kept = [path for path in kept if not any(path.startswith(f"{other}/") for other in kept)]
        if not self._users.own:
            return {path: path for path in kept}
        places: dict[str, str] = {}
        for number, path in enumerate(kept):
            place = os.path.join(self._folder, f"path-{number}")
            if os.path.isdir(path):
                os.mkdir(place)
            else:
                self._write(os.path.basename(place), "")
            places[path] = place
        return places


def _version(program: str) -> tuple[int, ...]:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout
    return tuple(map(int, re.findall(r"\d+", said)))
