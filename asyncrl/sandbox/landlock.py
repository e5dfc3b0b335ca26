"""Sandboxes for machines that refuse namespaces: Landlock over files, signals and other processes, a filter of system
calls without sockets, and limits of which some are measured."""

from __future__ import annotations

import contextlib
import inspect
import logging
import marshal
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from types import ModuleType

from asyncrl.processes import isolation, landlock, parent, tree
from asyncrl.processes.keeper import remove_folder
from asyncrl.processes.landlock import EXECUTE, READ_DIR, READ_FILE, TRUNCATE, WRITE_FILE, landlock_version
from asyncrl.processes.tree import pids_below
from asyncrl.sandbox import landlock_entrance, measure, runner
from asyncrl.sandbox.base import WORKDIR, Limits, SandboxFailed
from asyncrl.sandbox.interpreter import Interpreter
from asyncrl.sandbox.local import Launch, process_limits
from asyncrl.sandbox.seccomp import SeccompError, seccomp_filter
from asyncrl.sandbox.users import Users

_MIN_VERSION = 3  # those before let programs truncate any file of their user
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_COPIED = (isolation, landlock, parent, tree, landlock_entrance, runner)  # modules, of which the last import the others
_START = "import sys; sys.path.insert(0, {!r}); from asyncrl.sandbox.landlock_entrance import main; main()"
_OURS = 2  # processes of a sandbox's user beside those of the sandbox: runner and guard
_SPARE = 512  # more processes that an ordinary user may have before those of its sandboxes start no others
_END_S = 5.0

log = logging.getLogger(__name__)


class Landlock:
    """Launches runners that Landlock keeps in a folder of their own, as root each as a user of its own.

    ``paths``: further files and folders that programs in the sandbox may read."""

    name, limited_by = "landlock", ""

    def __init__(self, limits: Limits, interpreter: Interpreter, paths: Sequence[str] = ()) -> None:
        """Raises SandboxFailed if this machine lacks something."""
        self._limits, self._interpreter = limits, interpreter
        version = landlock_version()
        if version < _MIN_VERSION:
            raise SandboxFailed("infra", f"expected Linux 6.2 with Landlock, found {_found(version)}")
        self._users = Users()
        scopes = landlock.SCOPE_ABSTRACT_SOCKETS | landlock.SCOPE_SIGNALS if version >= landlock.SCOPES_SINCE else 0
        try:
            program = seccomp_filter(
                namespaces=False, own_user=self._users.own, signals=bool(scopes) or self._users.own
            )
        except SeccompError as e:
            raise SandboxFailed("infra", str(e)) from None
        self._folder = tempfile.mkdtemp(prefix="asyncrl-sandbox-")
        os.chmod(self._folder, 0o755)
        shown = [interpreter.path, *interpreter.folders, *paths]
        if self._users.own and (closed := next(filter(None, map(_closed, [*shown, self._folder])), "")):
            remove_folder(self._folder)
            raise SandboxFailed(
                "infra",
                f"users of sandboxes may not enter {closed}; chmod o+x it, keep sandbox.python and sandbox.paths"
                " elsewhere, or use another kind",
            )
        self._settings = os.path.join(self._folder, "settings")
        every = landlock.all_rights(version)
        unneeded = landlock.MAKE_CHAR | landlock.MAKE_BLOCK | landlock.MAKE_SOCK | landlock.IOCTL_DEVICE
        with open(self._settings, "wb") as file:
            marshal.dump((every, list(_rules(shown)), scopes, every & ~unneeded, program), file, 2)
        os.chmod(self._settings, 0o644)
        self._copy(_COPIED)
        self.weaker = (
            "it shares the machine's kernel interfaces and list of processes, can ask whether a file exists anywhere,"
            " and its files are measured, not bound"
        )
        if not self._users.own:
            self.weaker += ", its processes likewise"

    def launch(self, bound: bool) -> Launch:
        uid = self._users.take()
        try:
            folder = _workdir(uid)
        except BaseException:  # such as a full disk
            self._users.give_back(uid)
            raise
        others = _OURS if self._users.own else _OURS + _threads_of_user() + _SPARE
        start = (self._interpreter.path, "-I", "-S", "-c", _START.format(self._folder))
        environment = {
            name: value.replace(WORKDIR, folder) if name in ("HOME", "TMPDIR") else value
            for name, value in self._interpreter.environment.items()
        }
        return Launch(
            (*start, self._settings, folder, *process_limits(self._limits, bound, others)),
            environment,
            uid=uid,
            workdir=folder,
            ends_by=signal.SIGTERM,
            exceeded=lambda pid: self._exceeded(pid, folder, bound),
            after=lambda ended: self._after(ended, uid, folder),
        )

    def close(self) -> None:
        """When no sandbox runs any more."""
        remove_folder(self._folder)  # nothing in a sandbox can write there, or mount

    def _exceeded(self, pid: int, folder: str, bound: bool) -> str:
        """``pid``: the guard."""
        guarded = pids_below(pid)  # the runner is the first
        return (
            ("" if bound else measure.memory(guarded, self._limits))
            or ("" if self._users.own else measure.threads(guarded[1:], self._limits))
            or measure.folder(folder, guarded, self._limits)
        )

    def _after(self, ended: bool, uid: int | None, folder: str) -> None:
        if uid is not None:
            ended = self._users.end_processes(uid, _END_S)
        if not ended:
            log.warning("processes of a sandbox did not end; their folder %s is left behind", folder)
            return
        remove_folder(folder)
        self._users.give_back(uid)

    def _copy(self, modules: Sequence[ModuleType]) -> None:
        for module in modules:
            path = os.path.join(self._folder, *module.__name__.split(".")) + ".py"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(inspect.getsource(module))
        compiled = (self._interpreter.path, "-I", "-S", "-m", "compileall", "-q", self._folder)
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # else each sandbox compiles them
            subprocess.run(compiled, capture_output=True, timeout=60)
        for folder, folders, files in os.walk(self._folder):
            for name in folders:
                os.chmod(os.path.join(folder, name), 0o755)
            for name in files:
                os.chmod(os.path.join(folder, name), 0o644)


def _workdir(uid: int | None) -> str:
    """A new folder for a sandbox, of its user. Raises OSError, and leaves nothing behind."""
    folder = tempfile.mkdtemp(prefix="asyncrl-sandbox-")
    try:
        temporary = os.path.join(folder, ".tmp")
        os.mkdir(temporary)
        if uid is not None:
            os.chown(temporary, uid, uid)
            os.chown(folder, uid, uid)
    except BaseException:
        remove_folder(folder)
        raise
    return folder


def _rules(shown: Sequence[str]) -> Iterator[tuple[str, int]]:
    for path in filter(os.path.exists, dict.fromkeys((*_SYSTEM, *_ETC, *shown))):
        yield path, EXECUTE | READ_FILE | READ_DIR
    for path in _DEVICES:
        yield path, READ_FILE | WRITE_FILE | TRUNCATE


def _closed(path: str) -> str:
    """The first file or folder on the way to ``path`` that other users may not read or enter; empty: none."""
    for way in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
        folder = os.path.dirname(way)
        while folder != os.path.dirname(folder):
            if not os.stat(folder).st_mode & 0o001:
                return folder
            folder = os.path.dirname(folder)
    return ""


def _threads_of_user() -> int:
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                found += len(os.listdir(f"/proc/{name}/task"))
    return found


def _found(version: int) -> str:
    return f"version {version} of it" if version > 0 else "none"
